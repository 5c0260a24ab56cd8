# SPDX-License-Identifier: Apache-2.0
"""Hidden states of a running vLLM, through a ring in shared memory, to a trainer."""

__version__ = "0.1.0"
