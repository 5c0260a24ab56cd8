# SPDX-License-Identifier: Apache-2.0
"""`.ci/venv.sh` with a real interpreter and a real pip, on a project that needs no network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "tiny"
version = "1"
"""

# The least that pip takes for an editable install.
BACKEND = """\
import zipfile

META = "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\nProvides-Extra: dev\\n"
WHEEL = "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(f"{wheel_directory}/{name}", "w") as wheel:
        wheel.writestr("tiny-1.dist-info/METADATA", META)
        wheel.writestr("tiny-1.dist-info/WHEEL", WHEEL)
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    return name
"""


class Clone:
    """A folder with the script and the tiny project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "venv.sh", folder / ".ci")
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "backend.py").write_text(BACKEND)
        for name in ("requirements.txt", "requirements-model.txt"):
            (folder / ".ci" / name).write_text("# nothing\n")

    @property
    def stamp(self) -> Path:
        return self.folder / ".venv" / "shmconn.stamp"

    @property
    def making(self) -> Path:
        return self.folder / ".venv" / "shmconn.making"

    def run(self, code: int = 0, **environment: str) -> str:
        """Run the script; what it said."""
        environment = {"PYTHON": sys.executable, "PIP_NO_INDEX": "1", **environment}
        done = subprocess.run(
            [".ci/venv.sh"],
            cwd=self.folder,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def test_a_second_run_does_and_says_nothing_until_a_pin_changes(clone: Clone) -> None:
    said = clone.run()
    assert "making .venv with Python 3.1" in said and "done" in said
    assert clone.stamp.exists() and not clone.making.exists()
    assert clone.run() == ""
    (clone.folder / ".ci" / "requirements.txt").write_text("# another\n")
    said = clone.run()
    assert "installing" in said and "making" not in said
    assert clone.run() == ""


def test_a_half_made_one_is_thrown_away(clone: Clone) -> None:
    clone.run()
    leftover = clone.folder / ".venv" / "leftover"
    for path in (clone.making, leftover):
        path.touch()
    clone.stamp.unlink()
    assert "was not finished: starting afresh" in clone.run()
    assert clone.stamp.exists() and not leftover.exists()


def test_an_environment_that_the_user_made_is_filled_and_kept(clone: Clone) -> None:
    subprocess.run([sys.executable, "-m", "venv", clone.folder / ".venv"], check=True)
    mine = clone.folder / ".venv" / "mine"
    mine.touch()
    assert "making" not in clone.run()
    assert clone.stamp.exists() and mine.exists()


def test_a_failed_install_leaves_no_stamp_and_shows_pips_reason(clone: Clone) -> None:
    (clone.folder / ".ci" / "requirements.txt").write_text("no-such-package-at-all==1\n")
    said = clone.run(code=1)
    assert "No matching distribution found for no-such-package-at-all==1" in said
    assert "pytorch" not in said
    assert not clone.stamp.exists()


def test_pytorch_for_the_cpu_is_looked_for_in_its_own_index_too(clone: Clone) -> None:
    (clone.folder / ".ci" / "requirements.txt").write_text("torch==2.0.99+cpu\n")
    # Without any index the second attempt fails as well; that it is made is what counts here.
    said = clone.run(code=1)
    assert "adding https://download.pytorch.org/whl/cpu" in said
    assert not clone.stamp.exists()


def test_an_interpreter_that_will_not_do_is_named_with_the_remedy(
    clone: Clone, tmp_path: Path
) -> None:
    old = tmp_path / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.1 && exit\nexit 1\n')
    old.chmod(0o755)
    said = clone.run(code=1, PYTHON=str(old))
    assert "needs Python 3.11, 3.12 or 3.13" in said
    assert f"found {old} (Python 3.10.1)" in said
    assert "make PYTHON=" in said
    assert not (clone.folder / ".venv").exists()
