# SPDX-License-Identifier: Apache-2.0
"""`shmconn verify`: are these files what the model computed, all of it, and nothing else?

The command line calls `run(VerifyOptions(...))`. It prints a report and returns the exit code: 0
when everything holds, 1 when a sample is off or missing. Bad input (2) raises `OptionError`.
"""

from reader.verify.command import VerifyOptions, run

__all__ = ["VerifyOptions", "run"]
