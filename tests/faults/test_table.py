# SPDX-License-Identifier: Apache-2.0
"""The table of faults names tests that are there, and no row is left out."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "docs" / "reliability.md"
NAMED = re.compile(r"`([a-z_]+(?:/[a-z_]+\.py)?)?(?:::(test_[a-z0-9_]+))?`")


def test_every_row_is_there_and_names_tests_that_are_there() -> None:
    rows = set()
    missing = []
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0].isdigit():
            rows.add(int(cells[0]))
        file = ""
        for path, name in NAMED.findall(line):
            if path.endswith(".py"):
                file = path
                if not (TESTS / file).is_file():
                    missing.append(file)
                    continue
            if name and f"def {name}(" not in (TESTS / file).read_text():
                missing.append(f"{file}::{name}")
    assert missing == []
    assert rows == set(range(1, 30))
