# SPDX-License-Identifier: Apache-2.0
"""Whatever vLLM is installed: offline requests and their samples, one for one.

`make compat` runs this, and the push tier's tests of tests/vllm, under each version.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "vllm" / "modes.py"


@pytest.mark.long
@pytest.mark.vllm
def test_offline_requests_yield_one_right_sample_each(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "smollm", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0 and "DONE smollm" in done.stdout, done.stdout + done.stderr
