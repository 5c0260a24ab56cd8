# SPDX-License-Identifier: Apache-2.0
"""File names are data made harmless: they stay in their folder and never collide."""

import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reader.names import MAX_BYTES, file_names, safe_stem

HANDLE = "shmconn:q:" + "a" * 32 + ":7:" + "b" * 32
SUFFIX = ".safetensors"
ALLOWED = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
NASTY = [
    "",
    ".",
    "..",
    "../x",
    "/etc/x",
    "a/b",
    "x" * 300,
    "a\0b",
    "żółw",
    "\ud800",
    "a\nb",
    " ",
    "C:\\x",
]


def digest(handle: str = HANDLE) -> str:
    return hashlib.sha256(handle.encode()).hexdigest()


def test_a_harmless_text_is_its_own_name() -> None:
    assert next(file_names("hs_12", HANDLE, SUFFIX)) == "hs_12.safetensors"


@pytest.mark.parametrize("text", NASTY)
def test_a_changed_text_always_carries_the_digest_of_the_handle(text: str) -> None:
    first = next(file_names(text, HANDLE, SUFFIX))
    assert first.endswith(f"-{digest()[:8]}{SUFFIX}")
    assert ALLOWED.fullmatch(first)


def test_a_taken_name_is_followed_by_the_digest_then_by_longer_ones() -> None:
    names = list(file_names("x", HANDLE, SUFFIX))
    assert names == [f"x{SUFFIX}"] + [f"x-{digest()[:n]}{SUFFIX}" for n in (8, 16, 32, 64)]


def test_the_longest_text_that_fits_is_kept_and_one_more_byte_is_cut() -> None:
    longest = "y" * (MAX_BYTES - len(SUFFIX))
    assert next(file_names(longest, HANDLE, SUFFIX)) == longest + SUFFIX
    cut = next(file_names(longest + "y", HANDLE, SUFFIX))
    assert len(cut) == MAX_BYTES
    assert cut.endswith(f"-{digest()[:8]}{SUFFIX}")


@given(st.text(max_size=400), st.sampled_from([".safetensors", ".ckpt", ".pt"]))
def test_every_name_is_short_plain_and_without_a_leading_dot(text: str, suffix: str) -> None:
    for name in file_names(text, HANDLE, suffix):
        assert ALLOWED.fullmatch(name)
        assert len(name.encode()) <= MAX_BYTES
        assert name.endswith(suffix)


@given(st.text(max_size=40), st.text(max_size=40))
def test_different_texts_share_a_first_name_only_with_different_digests(a: str, b: str) -> None:
    if a != b:
        assert next(file_names(a, HANDLE + "1", SUFFIX)) != next(
            file_names(b, HANDLE + "2", SUFFIX)
        )


def test_a_stem_that_becomes_empty_still_has_a_name() -> None:
    assert safe_stem("", 10) == "sample"
