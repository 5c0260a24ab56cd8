# SPDX-License-Identifier: Apache-2.0
from harness.isolation import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]
