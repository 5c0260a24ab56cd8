# SPDX-License-Identifier: Apache-2.0
"""The check of vLLM's connector interface: silent where all fits, and it names what does not."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from interface import CALLED, FIELDS, NAMES, OURS, ROOT, V1, changes, reader

HERE = Path(__file__).parent
spec = importlib.util.find_spec("vllm")
assert spec is not None and spec.origin is not None
VLLM = Path(spec.origin).parents[1]
PATHS = {one[2] for one in OURS} | {one[0] for one in (*CALLED, *NAMES, *FIELDS)}


def check(changed: dict[str, tuple[str, str]]) -> list[str]:
    """What is found when these texts of vLLM's files are replaced."""
    read = reader(VLLM)

    def planted(path: str) -> str:
        text = read(path)
        if path in changed:
            assert changed[path][0] in text
            text = text.replace(*changed[path])
        return text

    return changes(planted, reader(ROOT))


def test_the_installed_vllm_has_all_that_we_rely_on() -> None:
    assert check({}) == []


BASE = f"{V1}/base.py"


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        (BASE, "finished_req_ids: set[str]", "step: int, ids: set[str]", "get_finished is (step"),
        (BASE, "def get_finished_count(self)", "def get_count(self)", "no hook get_finished_count"),
        (
            BASE,
            "def on_new_request(self",
            "@abstractmethod\n    def on_new_request(self",
            "on_new_request must be defined; ShmHiddenStatesConnector has none",
        ),
        (BASE, "class SupportsHMA(ABC)", "class HMA(ABC)", "no class SupportsHMA any more"),
        (
            BASE,
            "def has_connector_metadata(",
            "def has_metadata(",
            "Base_V1.has_conn",
        ),
        (
            f"{V1}/metrics.py",
            "transfer_stats_data: dict[str, Any], engine_idx: int = 0",
            "data: dict[str, Any], engine: int",
            "KVConnectorPromMetrics.observe is (data, engine)",
        ),
        (
            "vllm/distributed/kv_transfer/kv_connector/factory.py",
            "cls, name: str, module_path: str, class_name: str",
            "cls, name: str, loader: object",
            "register_connector is (name, loader); we give it 3 arguments",
        ),
        ("vllm/plugins/__init__.py", "vllm.general_plugins", "vllm.plugins", "our entry point"),
        ("vllm/v1/request.py", "FINISHED_ERROR", "FAILED", "RequestStatus has no FINISHED_ERROR"),
    ],
)
def test_a_change_is_named(path: str, old: str, new: str, said: str) -> None:
    found = check({path: (old, new)})
    assert any(said in line for line in found), found


def test_the_command_names_a_change_and_fails(tmp_path: Path) -> None:
    for path in PATHS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text((VLLM / path).read_text())

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(HERE / "interface.py"), str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert (run().returncode, run().stderr) == (0, "")
    (tmp_path / BASE).write_text((VLLM / BASE).read_text().replace("def shutdown", "def end"))
    changed = run()
    assert changed.returncode == 1 and "no hook shutdown any more" in changed.stdout
    (tmp_path / "vllm/v1/request.py").unlink()
    assert "vllm/v1/request.py: the file is not there any more" in run().stdout
