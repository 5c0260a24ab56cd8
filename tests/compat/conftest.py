# SPDX-License-Identifier: Apache-2.0
"""These tests use the engines of tests/vllm."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "vllm"))
