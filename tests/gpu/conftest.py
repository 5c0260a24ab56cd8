# SPDX-License-Identifier: Apache-2.0
"""Tests that need a CUDA device; elsewhere they are skipped, with the reason."""

import pytest
import torch
from harness.isolation import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks every test of this folder."""
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
