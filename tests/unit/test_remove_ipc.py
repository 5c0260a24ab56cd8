# SPDX-License-Identifier: Apache-2.0
"""logind.conf as systemd reads it: folders, drop-ins, defaults, system users, lingering."""

from pathlib import Path

import pytest

from reader.remove_ipc import remove_ipc

MAIN, DROP = "systemd/logind.conf", "systemd/logind.conf.d"
NO, YES = "[Login]\nRemoveIPC=no\n", "[Login]\n RemoveIPC = yes\n"


def removes(root: Path, files: dict[str, str], uid: int = 1000) -> bool:
    (root / "run/systemd/seats").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    found = remove_ipc(uid, "ada", root)
    assert found is not None
    return found.removes


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, True),
        ({f"etc/{MAIN}": "[Login]\n#RemoveIPC=yes\n"}, True),
        ({f"usr/lib/{MAIN}": "[Login]\n#RemoveIPC=no\n"}, False),
        ({f"etc/{MAIN}": NO}, False),
        ({f"etc/{MAIN}": NO, f"usr/lib/{MAIN}": YES}, False),
        ({f"etc/{MAIN}": NO, f"usr/lib/{DROP}/10-ipc.conf": YES}, True),
        ({f"etc/{DROP}/a.conf": YES, f"usr/lib/{DROP}/a.conf": NO}, True),
        ({f"etc/{DROP}/a.conf": YES, f"usr/lib/{DROP}/b.conf": NO}, False),
        ({f"run/{DROP}/b.conf": "[Login]\nRemoveIPC=off\n", f"etc/{DROP}/a.conf": YES}, False),
        ({f"etc/{DROP}/a.conf": "[Login]\n#RemoveIPC=no\nRemoveIPC=perhaps\n"}, True),
        ({f"etc/{DROP}/a.txt": NO}, True),
        ({"var/lib/systemd/linger/ada": ""}, False),
        ({"var/lib/systemd/linger/bob": ""}, True),
        ({"etc/login.defs": "# x\nSYS_UID_MAX\t\t1200\n"}, False),
    ],
)
def test_the_setting_is_found_as_systemd_finds_it(
    tmp_path: Path, files: dict[str, str], want: bool
) -> None:
    assert removes(tmp_path, files) == want


def test_a_system_user_keeps_its_shared_memory(tmp_path: Path) -> None:
    assert not removes(tmp_path, {f"etc/{MAIN}": YES}, uid=999)
    assert removes(tmp_path, {}, uid=1000)


def test_where_no_logind_runs_nothing_is_removed(tmp_path: Path) -> None:
    assert remove_ipc(1000, "ada", tmp_path) is None


def test_what_says_so_is_named(tmp_path: Path) -> None:
    removes(tmp_path, {f"etc/{MAIN}": YES})
    found = remove_ipc(1000, "ada", tmp_path)
    assert found is not None
    assert found.why == f"RemoveIPC = yes in {tmp_path}/etc/{MAIN}"
