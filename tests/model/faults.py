# SPDX-License-Identifier: Apache-2.0
"""The protocol with one rule left out: what a search must be able to see."""

from __future__ import annotations

from enum import Enum


class Fault(Enum):
    """A seeded fault. 1 to 20 are the rows of the table in section 6 of docs/protocol.md."""

    TAKEOVER_WITHOUT_RELOAD = "1"
    START_BEFORE_VISIBLE = "2"
    BACKLOG_BESIDE_OTHERS = "3"
    ACTIVE_BEFORE_START = "4"
    DEAD_REGISTRANT_STAYS = "5"
    REGISTRY_FREE_BEFORE_JOIN = "6"
    LAST_LIVE_MEMBER_REMOVES = "7"
    GROUPS_PER_GENERATION = "8"
    SCAN_BEFORE_TEST = "9"
    NO_SWEEP = "10"
    CLEAR_THEN_RELEASE = "11"
    EXPIRE_WITHOUT_LOCK = "12"
    CLAIM_WITHOUT_LOCK = "13a"
    SEQ_BEFORE_PAGES = "13b"
    NAMELESS_FROM_BEGINNING = "14"
    NO_NAMELESS_ROW = "15"
    NO_FENCE = "16"
    LEAVER_TRUSTS_REGISTERING = "17"
    UNDO_WITHOUT_LOOK = "18a"
    GROUPS_BEFORE_RESERVE = "18b"  # undone only if nobody joined
    UNCLAIMED_IS_NOTHING = "19"
    EMPTY_REGISTRY_STAYS = "20"
    # Rules that the table does not list, each left out in turn.
    OPEN_WITHOUT_LOOK = "21"
    CLEAN_WITHOUT_LOOK = "22"
    CLEAN_WITHOUT_NEED = "23"
    PRODUCER_LOCK_AFTER_R = "24"
    END_WITHOUT_EPOCH = "25"
    MAGIC_BEFORE_LOCK = "26"
    SETTLED_AFTER_SLOTS = "27"
    SETTLED_BEFORE_TOMBSTONE = "28"
    FIND_BEFORE_END = "29"
    RUN_BY_ITS_FIRST_PAGE = "30"
    SEQ_AT_ALLOCATION = "31"
