# SPDX-License-Identifier: Apache-2.0
"""Registration with the device: its arithmetic, and what is undone, with a driver that is none."""

import logging
import mmap
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmconn import pinning
from shmconn.pinning import Pinned


class Driver:
    """Takes notes; refuses the registration number ``refuse``."""

    def __init__(self, refuse: int = -1) -> None:
        self.refuse = refuse
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> Any:
        if len(self.registered) == self.refuse:
            return SimpleNamespace(value=2)
        self.registered[address] = size
        return SimpleNamespace(value=0)

    def cudaHostUnregister(self, address: int) -> Any:
        del self.registered[address]
        return SimpleNamespace(value=0)


def area(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size))


def pinned(monkeypatch: pytest.MonkeyPatch, driver: Driver, size: int, chunk: int) -> Pinned:
    monkeypatch.setattr(pinning, "_cudart", lambda: driver)
    return Pinned(area(size), chunk)


@given(st.integers(1, 9), st.integers(0, 40_000), st.integers(1, 40_000))
@settings(max_examples=100, deadline=None)
def test_pieces_make_up_the_range_and_none_crosses_an_edge(
    chunk: int, offset: int, length: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        one = pinned(monkeypatch, Driver(), 81_920, chunk * 4096)
    start = one._start
    pieces = list(one.pieces(start + offset, length))
    assert [at for at, _ in pieces] == [sum(n for _, n in pieces[:i]) for i in range(len(pieces))]
    assert sum(size for _, size in pieces) == length
    for at, size in pieces:
        first, last = offset + at, offset + at + size - 1
        assert first // (chunk * 4096) == last // (chunk * 4096)
    assert one.edges(offset, length) == tuple(at for at, _ in pieces if at)


def test_the_whole_area_is_registered_in_chunks_and_unregistered_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    one = pinned(monkeypatch, driver, 81_920, 32_768)
    assert list(driver.registered.values()) == [32_768, 32_768, 16_384]
    one.close()
    assert driver.registered == {}
    one.close()


def test_a_refused_chunk_undoes_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(refuse=2)
    monkeypatch.setattr(pinning, "_take_error", lambda: None)
    with pytest.raises(RuntimeError, match="cudaHostRegister of 16.0 KiB"):
        pinned(monkeypatch, driver, 81_920, 32_768)
    assert driver.registered == {}


def test_a_child_of_a_fork_unregisters_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    one = pinned(monkeypatch, driver, 8192, 4096)
    monkeypatch.setattr(one, "_pid", -1)
    one.close()
    assert len(driver.registered) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_one_warning_says_whose_pages_are_not_registered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert Pinned.try_register(area(4096), "the pages of a test") is None
    assert caplog.messages == ["the pages of a test: torch has no CUDA device here"]
