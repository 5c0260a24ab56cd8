# SPDX-License-Identifier: Apache-2.0
"""The bench of what grows: it measures each operation, and leaves nothing."""

import json
import os

import pytest

from reader.bench import growth


def test_each_operation_is_measured_and_the_rings_are_gone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ring_name: str
) -> None:
    monkeypatch.setattr(growth.secrets, "token_hex", lambda count: ring_name)
    monkeypatch.setattr(growth, "SLOTS", (40,))
    monkeypatch.setattr(growth, "GROUPS", 3)
    assert growth.run(repeats=2, json_out=True) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [(line["groups"], line["slots"]) for line in lines] == [(1, 40), (3, 40)]
    for line in lines:
        assert all(line[what] > 0 for what in growth._WHATS), line
    assert [file for file in os.listdir("/dev/shm") if ring_name in file] == []
    growth.run(repeats=2)
    assert "expiry" in capsys.readouterr().out
