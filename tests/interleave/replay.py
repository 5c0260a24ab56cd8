# SPDX-License-Identifier: Apache-2.0
"""Shows a schedule that a test has found, step by step.

PYTHONPATH=tests python -m interleave.replay SCENARIO SCHEDULE [FAULT]
"""

import secrets
import sys

import pytest
from harness.isolation import use_prefix

from interleave import planted, seams
from interleave.explore import Priorities
from interleave.scenarios import SCENARIOS, maker
from interleave.scheduler import Touched


def main(scenario: str, schedule: str, fault: str = "") -> None:
    """Runs one schedule and prints its steps and what was wrong."""
    name = f"t{secrets.token_hex(4)}"
    with pytest.MonkeyPatch.context() as patch:
        use_prefix(patch, f"shmconn-{name}.")
        seams.install(patch)
        if fault:
            getattr(planted, fault)(patch)
        make = maker(SCENARIOS[scenario], name, again=schedule)
        run, violations = make(Priorities(0, 1, 1), Touched())
    print("\n".join([*(run.trace or []), *violations]))


if __name__ == "__main__":
    main(*sys.argv[1:])
