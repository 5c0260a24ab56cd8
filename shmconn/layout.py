# SPDX-License-Identifier: Apache-2.0
"""Where every byte of a segment is.

    registry /shmconn.NAME                       ring /shmconn.NAME.GENERATION
    +------------------------------+ 0           +------------------------------+ 0
    | magic version size id epoch  |             | magic version ... layer ids  | immutable
    | lock notes R, L[16]          |             +------------------------------+ 4096
    +------------------------------+ 256         | published accepted settled.. | one line each
    | states, group rows [16]      |             | start[16]  lost[8]           |
    +------------------------------+ 4096        +------------------------------+ 8192
    | member rows [16][256]        |             | tombstones [4096]            |
    +------------------------------+ 1052672     +------------------------------+ 270336
                                                 | seq[slots]                   |
                                                 | hold[16][slots]              |
                                                 | slot rows [slots]            |
                                                 +------------------------------+ multiple of page
                                                 | pages                        |
                                                 +------------------------------+

Offsets are in bytes; the order of the constants is the order in memory. ``docs/format.md`` says
the same for people, and `docs/protocol.md` who may store what, and when.
"""

from dataclasses import dataclass

VERSION = 1
REGISTRY_VERSION = 2
SHM_DIR = "/dev/shm"
PREFIX = "shmconn."
CACHE_LINE = 64

GROUPS = 16
MEMBERS = 256
TOMBSTONES = 4096
MAX_SLOTS = 4096
MAX_LAYERS = 256
MIN_PAGE = 64 * 1024
MAX_SEQ = (1 << 48) - 1

# --- registry -----------------------------------------------------------------------------------
REGISTRY_MAGIC = int.from_bytes(b"shmcREG1", "little")
MAGIC = 0
VERSION_AT = 8
SIZE_AT = 16
REGISTRY_ID = 24  # two words
EPOCH = 40
NOTE_R = 48
NOTE_L = 64  # one word per group
GROUP_STATES = 256  # one word per group
GROUP_ROWS = 512
GROUP_ROW = 128
MEMBER_ROWS = 4096
MEMBER_ROW = 256
REGISTRY_SIZE = MEMBER_ROWS + GROUPS * MEMBERS * MEMBER_ROW

# group row
GROUP_KIND = 8
GROUP_DURABLE = 16
GROUP_NAME_LENGTH = 24
GROUP_NAME = 32
FREE, REGISTERING, ACTIVE, NAMELESS = range(4)
EVERY_SAMPLE, BY_HANDLE = range(2)

# member row: joined decides, the rest is for people
MEMBER_JOINED = 0
MEMBER_PID = 8
MEMBER_STARTED = 16  # Unix time in ns
MEMBER_CLAIMED = 24
MEMBER_RELEASED = 32
MEMBER_BYTES = 40
MEMBER_HOST_LENGTH = 48
MEMBER_HOST = 56
HOST_BYTES = 128
MEMBER_BACKGROUND = 184  # 1 = drains in a thread of its own

# --- ring: immutable head -----------------------------------------------------------------------
RING_MAGIC = int.from_bytes(b"shmcRNG1", "little")
GENERATION = 24  # two words
RING_REGISTRY_ID = 40  # two words
PAGE_SIZE = 56
PAGES = 64
SLOTS = 72
DATA = 80
DTYPE = 88
HIDDEN_SIZE = 96
LAYERS = 104
PRODUCER_PID = 112
PRODUCER_STARTED = 120  # Unix time in ns
ENGINE_ID_LENGTH = 128
HOST_LENGTH = 136
MAX_SAMPLE = 144  # bytes; a third of the data area
ENGINE_ID = 256
ENGINE_ID_BYTES = 256
HOST = 512
LAYER_IDS = 1024  # one word each

# --- ring: words of the producer ----------------------------------------------------------------
PUBLISHED = 4096
ACCEPTED = PUBLISHED + CACHE_LINE
SETTLED = ACCEPTED + CACHE_LINE
LOST = SETTLED + CACHE_LINE
HELD_SINCE = LOST + CACHE_LINE  # Unix time in ns, 0 = nothing is held
FREE_PAGES = HELD_SINCE + CACHE_LINE
FREE_SLOTS = FREE_PAGES + CACHE_LINE
PUBLISHED_BYTES = FREE_SLOTS + CACHE_LINE
CLOSED = PUBLISHED_BYTES + CACHE_LINE
LOST_BY_REASON = CLOSED + CACHE_LINE  # one word per reason
START = 4096 + 2048  # one word per group, written under R

TOMBSTONE_TABLE = 8192
TOMBSTONE = 64
SEQ = TOMBSTONE_TABLE + TOMBSTONES * TOMBSTONE

# tombstone: index first; 0 while it is rewritten
TOMB_INDEX = 0
TOMB_NUMBER = 8
TOMB_DIGEST = 16  # two words
TOMB_REASON = 32
TOMB_GROUPS = 40

REASONS = ("aborted", "short", "oversized", "no_reader", "dropped", "fault", "shutdown", "expired")

# slot row
SLOT_ROW = 512
SLOT_NUMBER = 0
SLOT_DIGEST = 8  # two words
SLOT_FIRST_PAGE = 24
SLOT_PAGES = 32
SLOT_TOKENS = 40
SLOT_LAYERS = 48
SLOT_HIDDEN = 56
SLOT_DTYPE = 64
SLOT_STATES_BYTES = 72
SLOT_IDS_OFFSET = 80
SLOT_JSON_OFFSET = 88
SLOT_JSON_BYTES = 96
SLOT_PUBLISHED_AT = 104  # Unix time in ns, for people
SLOT_ID_LENGTH = 112
SLOT_ID = 128
SLOT_ID_BYTES = 200

# hold word: seq << 16 | code
UNCLAIMED = 0
RELEASED = 0xFFFF

DTYPES = {"bfloat16": 1, "float16": 2, "float32": 3}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# --- locks: far beyond the end of the file, so that content and locks never meet ----------------
LOCK_R = 1 << 40
LOCK_P = 1 << 40
LOCK_L = LOCK_R + 16
LOCK_M = LOCK_R + 4096


def align(value: int, unit: int) -> int:
    """``value`` rounded up to a multiple of ``unit``."""
    return -(-value // unit) * unit


def group_row(group: int) -> int:
    """Offset of a group's row in the registry."""
    return GROUP_ROWS + group * GROUP_ROW


def member_row(group: int, member: int) -> int:
    """Offset of a member's row in the registry."""
    return MEMBER_ROWS + (group * MEMBERS + member) * MEMBER_ROW


def member_lock(group: int, member: int) -> int:
    """Offset of the lock that says that the member is alive."""
    return LOCK_M + group * MEMBERS + member


def hold_word(seq: int, code: int) -> int:
    """A hold word: unclaimed, claimed by member ``code - 1``, or released, for one sequence."""
    return seq << 16 | code


@dataclass(frozen=True)
class RingShape:
    """Sizes of one ring, from which all its offsets follow."""

    page_size: int
    pages: int
    slots: int

    @property
    def hold(self) -> int:
        """Offset of hold[0][0]."""
        return SEQ + self.slots * 8

    @property
    def rows(self) -> int:
        """Offset of the slot table."""
        return self.hold + GROUPS * self.slots * 8

    @property
    def data(self) -> int:
        """Offset of the first page."""
        return align(self.rows + self.slots * SLOT_ROW, self.page_size)

    @property
    def size(self) -> int:
        """Bytes of the whole segment."""
        return self.data + self.pages * self.page_size

    @property
    def max_sample(self) -> int:
        """Bytes of the largest sample: a third of the data area."""
        return self.pages // 3 * self.page_size

    def seq_at(self, slot: int) -> int:
        """Offset of the sequence word of a slot."""
        return SEQ + slot * 8

    def hold_at(self, group: int, slot: int) -> int:
        """Offset of hold[group][slot]."""
        return self.hold + (group * self.slots + slot) * 8

    def row_at(self, slot: int) -> int:
        """Offset of a slot's row."""
        return self.rows + slot * SLOT_ROW

    def page_at(self, page: int) -> int:
        """Offset of a page."""
        return self.data + page * self.page_size

    @classmethod
    def of_size(cls, size: int, page_size: int, slots: int | None) -> "RingShape":
        """The largest ring that fits into ``size`` bytes; pages may be 0 if nothing fits."""
        pages = size // page_size
        while pages > 0:
            shape = cls(page_size, pages, slots or min(pages, MAX_SLOTS))
            if shape.size <= size:
                return shape
            pages -= max(1, (shape.size - size) // page_size)
        return cls(page_size, 0, slots or 1)
