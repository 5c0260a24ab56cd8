# SPDX-License-Identifier: Apache-2.0
"""Where every byte is: no two things in one place, nothing outside its segment."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from shmconn import layout
from shmconn.layout import RingShape


def test_the_registry_rows_follow_each_other_without_overlap() -> None:
    end_of_states = layout.GROUP_STATES + 8 * layout.GROUPS
    assert layout.NOTE_L + 8 * layout.GROUPS <= layout.GROUP_STATES
    assert end_of_states <= layout.GROUP_ROWS
    assert layout.group_row(layout.GROUPS) <= layout.MEMBER_ROWS
    assert layout.GROUP_NAME + 64 <= layout.GROUP_ROW
    assert layout.MEMBER_HOST + layout.HOST_BYTES <= layout.MEMBER_BACKGROUND
    assert layout.MEMBER_BACKGROUND + 8 <= layout.MEMBER_ROW
    assert layout.member_row(layout.GROUPS, 0) == layout.REGISTRY_SIZE


def test_the_words_of_the_ring_do_not_overlap() -> None:
    words = [
        layout.PUBLISHED, layout.ACCEPTED, layout.SETTLED, layout.LOST, layout.HELD_SINCE,
        layout.FREE_PAGES, layout.FREE_SLOTS, layout.PUBLISHED_BYTES, layout.CLOSED,
        layout.LOST_BY_REASON,
    ]  # fmt: skip
    assert len({at // layout.CACHE_LINE for at in words}) == len(words)
    assert layout.LOST_BY_REASON + 8 * len(layout.REASONS) <= layout.START
    assert layout.START + 8 * layout.GROUPS <= layout.TOMBSTONE_TABLE
    assert layout.TOMB_GROUPS + 8 <= layout.TOMBSTONE
    assert layout.LAYER_IDS + 8 * layout.MAX_LAYERS <= layout.PUBLISHED
    assert layout.SLOT_ID + layout.SLOT_ID_BYTES <= layout.SLOT_ROW


def test_locks_lie_beyond_every_segment_and_apart() -> None:
    locks = {layout.LOCK_R}
    locks |= {layout.LOCK_L + group for group in range(layout.GROUPS)}
    members = {
        layout.member_lock(group, member)
        for group in range(layout.GROUPS)
        for member in range(layout.MEMBERS)
    }
    assert len(members) == layout.GROUPS * layout.MEMBERS
    assert not members & locks
    assert min(locks) >= 1 << 40


def test_the_slot_row_is_what_the_offsets_say() -> None:
    from shmconn.fill import _ROW

    assert _ROW.size + 8 == layout.SLOT_ID
    row = _ROW.pack(1, bytes(16), *range(2, 13), 13)
    (length,) = struct.unpack_from("<Q", row, layout.SLOT_ID_LENGTH)
    assert length == 13
    (first_page,) = struct.unpack_from("<Q", row, layout.SLOT_FIRST_PAGE)
    assert first_page == 2


@given(
    st.integers(1, 1 << 34),
    st.sampled_from([1 << 16, 1 << 17, 1 << 21]),
    st.one_of(st.none(), st.integers(1, layout.MAX_SLOTS)),
)
def test_a_ring_is_as_large_as_its_size_allows_and_no_larger(
    size: int, page_size: int, slots: int | None
) -> None:
    shape = RingShape.of_size(size, page_size, slots)
    if shape.pages:
        assert shape.size <= size
        assert shape.data % page_size == 0
        assert shape.row_at(shape.slots) <= shape.data
        assert shape.hold_at(layout.GROUPS, 0) == shape.rows
        assert size - shape.size < 2 * page_size
