# SPDX-License-Identifier: Apache-2.0
"""Shared words: whole, and reached in one place only."""

import ast
import mmap
import os
import signal
from pathlib import Path

import pytest

import shmconn
from shmconn import words
from shmconn.words import Words

CHANGES = 20_000
LOW, HIGH = 0x1111_1111_1111_1111, 0xEEEE_EEEE_EEEE_EEEE


def _poll_while_a_child_flips(flip: str) -> tuple[int, set[int]]:
    """Changes seen while another process flips a word between two values, and values seen."""
    memory = mmap.mmap(-1, 4096)
    shared = Words(memory)
    shared.store(0, LOW)
    child = os.fork()
    if child == 0:
        import struct

        while True:
            for value in (HIGH, LOW):
                if flip == "store":
                    shared.store(0, value)
                else:
                    struct.pack_into("<Q", memory, 0, value)
    try:
        changes, last, seen = 0, LOW, set[int]()
        while changes < CHANGES and len(seen) < 3:
            value = shared.load(0)
            seen.add(value)
            changes += value != last
            last = value
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return changes, seen


def test_a_polling_process_sees_whole_words_only() -> None:
    changes, seen = _poll_while_a_child_flips("store")
    print(f"changes seen: {changes}")
    assert changes >= CHANGES
    assert seen == {LOW, HIGH}


def test_the_poll_would_see_a_torn_word() -> None:
    _, seen = _poll_while_a_child_flips("pack_into")
    assert seen - {LOW, HIGH}


def test_values_are_cut_to_64_bits() -> None:
    shared = Words(bytearray(16))
    shared.store(8, 1 << 64 | 5)
    assert shared.load(8) == 5


def test_a_copy_is_private() -> None:
    shared = Words(bytearray(16))
    copy = shared.copy(0, 2)
    shared.store(0, 9)
    assert copy.tolist() == [0, 0]


def test_a_column_has_one_word_of_each_row_and_is_private() -> None:
    shared = Words(bytearray(7 * 8))
    for word in range(7):
        shared.store(8 * word, word)
    column = shared.column(8, 24, 2)
    shared.store(8, 9)
    assert column.tolist() == [1, 4]


def test_every_access_passes_the_watcher() -> None:
    seen: list[str] = []
    shared = Words(bytearray(16))
    words.watch(seen.append)
    try:
        shared.load(0)
        shared.store(8, 1)
        shared.copy(0, 1)
        shared.column(0, 8, 2)
        shared.write(0, b"x")
    finally:
        words.watch(None)
    assert [name.split()[0] for name in seen] == ["load", "store", "copy", "copy", "write"]


@pytest.mark.parametrize(
    "file", sorted(Path(shmconn.__file__).parent.rglob("*.py")), ids=lambda file: file.name
)
def test_no_module_stores_words_another_way(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        assert name != "pack_into", f"{file.name}:{getattr(node, 'lineno', 0)} uses pack_into"
        is_word_view = (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "cast"
            and [getattr(arg, "value", None) for arg in node.args] == ["Q"]
        )
        assert not is_word_view or file.name == "words.py", f"{file.name} casts to words"
