# SPDX-License-Identifier: Apache-2.0
from harness.isolation import pytest_terminal_summary, ring

__all__ = ["pytest_terminal_summary", "ring"]
