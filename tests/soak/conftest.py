# SPDX-License-Identifier: Apache-2.0
from harness.isolation import damaged_ring, pytest_terminal_summary, ring

__all__ = ["damaged_ring", "pytest_terminal_summary", "ring"]
