# SPDX-License-Identifier: Apache-2.0
"""`shmconn bench files` measures what it says; no speed is asserted here."""

import json
import os


def test_bench_files_reports_every_way_and_leaves_nothing(shmconn) -> None:
    bench = shmconn("bench", "files", "--sample-mib", 1, "--samples", 4, "--repeats", 1, "--json")
    assert bench.wait() in (0, 1), bench.err
    figures = json.loads(bench.out)
    assert len(figures) == 7
    assert all(figure["value"] > 0 for figure in figures)
    assert figures[-1]["goal"] == 1.0
    pid = bench.child.pid
    assert not [entry for entry in os.listdir("/dev/shm") if "shmconn-bench-" in entry], pid


def test_an_unknown_bench_is_named(run) -> None:
    assert "bench 'disk' is unknown" in run("bench", "disk", code=2).err
