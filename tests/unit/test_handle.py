# SPDX-License-Identifier: Apache-2.0
"""Names, handles and sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmconn import Handle, OptionError
from shmconn.handle import check_name, format_size, parse_size

GENERATION = "0123456789abcdef" * 2


@given(st.text(), st.integers(1, 10**18))
def test_a_handle_survives_its_text(request_id: str, number: int) -> None:
    handle = Handle.make("qwen", GENERATION, number, request_id)
    assert Handle.parse(str(handle)) == handle
    assert Handle.parse({"handle": str(handle), "ring": "qwen"}) == handle


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        assert str(Handle.parse(text)) == text
    except OptionError as error:
        assert "handle" in str(error)


@pytest.mark.parametrize("source", [None, 7, {}, [], {"handle": 7}, "shmconn:../x:0:1:2"])
def test_what_is_no_handle_is_named(source: object) -> None:
    with pytest.raises(OptionError, match="handle"):
        Handle.parse(source)


def test_a_reply_without_a_handle_tells_the_error_it_carries() -> None:
    with pytest.raises(OptionError, match="tag must be text"):
        Handle.parse({"error": "tag must be text"})


@pytest.mark.parametrize("name", ["", "a" * 65, "a.b", "../x", "a b", "ä", None, 3, "x\n"])
def test_a_name_with_other_characters_is_refused(name: object) -> None:
    with pytest.raises(OptionError, match="is not allowed"):
        check_name(name)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GiB", 8 << 30), ("8G", 8 << 30), ("1GB", 10**9), ("64 KiB", 65536), ("1.5m", 3 << 19)]
    + [("4096", 4096), (4096, 4096), ("10b", 10)],
)
def test_sizes_are_read_as_people_write_them(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "8 XB", "1e9", 0, -5, True, None, 1.5, "0"])
def test_what_is_no_size_is_named(text: object) -> None:
    with pytest.raises(OptionError, match="bytes|is not a size"):
        parse_size(text)


def test_sizes_are_shown_in_binary_units() -> None:
    assert [format_size(n) for n in (5, 2048, 8 << 30, 3 << 40)] == [
        "5 B",
        "2.0 KiB",
        "8.0 GiB",
        "3.0 TiB",
    ]
