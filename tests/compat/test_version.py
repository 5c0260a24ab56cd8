# SPDX-License-Identifier: Apache-2.0
"""Whatever vLLM is installed: offline requests and their samples, one for one.

`make compat` runs this, and the push tier's tests of tests/vllm, under each version.
"""

from pathlib import Path

import pytest
from test_engines import run


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.parametrize("name", ["smollm", "apart"])
def test_offline_requests_yield_one_right_sample_each(name: str, tmp_path: Path) -> None:
    done = run(name, tmp_path)
    assert done.returncode == 0 and f"DONE {name}" in done.stdout, done.stdout + done.stderr
