# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from shmconn.config import ConnectorConfig, auto_ring_name, default_ring_size
from shmconn.errors import OptionError


def test_no_options_give_the_documented_defaults() -> None:
    config = ConnectorConfig.parse({})
    assert config.model_dump() == {
        "ring": None,
        "ring_size": None,
        "slots": None,
        "page_size": 65536,
        "groups": (),
        "on_full": "hold",
        "no_reader_timeout_s": 60.0,
        "unclaimed_ttl_s": 600.0,
        "shutdown_grace_s": 5.0,
        "mode": 0o600,
    }


def test_every_option_is_read() -> None:
    config = ConnectorConfig.parse(
        {
            "ring": "qwen",
            "ring_size": "2GiB",
            "slots": 7,
            "page_size": "1MiB",
            "groups": ["trainer", {"name": "probe", "by_handle": True}],
            "on_full": "drop",
            "no_reader_timeout_s": 1,
            "unclaimed_ttl_s": 2.5,
            "shutdown_grace_s": 0,
            "mode": "0660",
        }
    )
    assert (config.ring, config.ring_size, config.slots) == ("qwen", 2 << 30, 7)
    assert (config.page_size, config.on_full, config.mode) == (1 << 20, "drop", 0o660)
    assert config.groups_for_ring() == [
        {"name": "trainer", "by_handle": False},
        {"name": "probe", "by_handle": True},
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ringsize": "8GiB"}, "unknown option 'ringsize' (did you mean 'ring_size'?)"),
        ({"shared_storage_path": "/tmp"}, "unknown option 'shared_storage_path' (known are"),
        ({"ring": "../x"}, "ring name '../x' is not allowed"),
        ({"ring": 5}, "ring name 5 is not allowed"),
        ({"ring_size": "lots"}, "ring_size 'lots' is not a size"),
        ({"ring_size": -1}, "ring_size -1 is not a size"),
        ({"ring_size": True}, "ring_size True is not a size"),
        ({"slots": 0}, "slots is 0"),
        ({"slots": "5"}, "slots is '5'"),
        ({"page_size": 4096}, "page_size 4096 must be a power of two"),
        ({"page_size": "96KiB"}, "page_size '96KiB' must be a power of two"),
        ({"groups": "trainer"}, "groups 'trainer' must be a list"),
        ({"groups": ["a b"]}, "group name 'a b' is not allowed"),
        ({"groups": ["a", "a"]}, "groups names 'a' twice"),
        ({"groups": [{"name": "a", "byhandle": True}]}, "did you mean 'by_handle'?"),
        ({"groups": [7]}, "groups.0 is 7"),
        ({"on_full": "wait"}, "on_full is 'wait'"),
        ({"no_reader_timeout_s": -1}, "no_reader_timeout_s is -1"),
        ({"no_reader_timeout_s": float("nan")}, "no_reader_timeout_s is nan"),
        ({"unclaimed_ttl_s": 0}, "unclaimed_ttl_s is 0"),
        ({"shutdown_grace_s": "soon"}, "shutdown_grace_s is 'soon'"),
        ({"mode": 600}, "mode 600 must be octal digits in quotes"),
        ({"mode": "0400"}, "mode '0400' must be octal digits"),
        ({"mode": "4755"}, "mode '4755' must be octal digits"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError) as caught:
        ConnectorConfig.parse(options)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_wrong_options_are_named_in_one_line() -> None:
    with pytest.raises(OptionError, match="slots is 0.*; unknown option .rnig."):
        ConnectorConfig.parse({"rnig": "a", "slots": 0})


def test_all_data_parallel_ranks_of_an_engine_have_one_automatic_name() -> None:
    names = {auto_ring_name(f"3f0c{end}") for end in ("", "_dp0", "_dp13", "_dp_rank_2")}
    assert len(names) == 1
    assert next(iter(names)).startswith("auto-")
    assert len(next(iter(names))) == len("auto-") + 12
    assert auto_ring_name("3f0d") not in names


def test_an_engine_id_that_only_looks_like_a_rank_keeps_its_own_name() -> None:
    assert auto_ring_name("a_dp0_b") != auto_ring_name("a_b")
    assert auto_ring_name("a_dp0_b") != auto_ring_name("a")


def test_the_default_size_is_bounded_by_8_gib_and_by_a_quarter_of_what_is_free() -> None:
    assert default_ring_size(1 << 40) == 8 << 30
    assert default_ring_size(4 << 20) == 1 << 20
    assert 0 <= default_ring_size() <= 8 << 30
