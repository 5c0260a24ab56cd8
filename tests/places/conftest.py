# SPDX-License-Identifier: Apache-2.0
from harness.isolation import damaged_ring, pytest_terminal_summary, ring

from places.namespaces import namespaces, time_namespace

__all__ = ["damaged_ring", "namespaces", "pytest_terminal_summary", "ring", "time_namespace"]
