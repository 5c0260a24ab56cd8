# SPDX-License-Identifier: Apache-2.0
"""A watchdog that fits a demo: minutes, not the two that other tests get."""

import faulthandler

import pytest
from demo_run import HANG_S


@pytest.fixture(autouse=True)
def patient_watchdog() -> None:
    """Show where a test hangs only after longer than a demo takes on a busy machine."""
    faulthandler.dump_traceback_later(HANG_S)
