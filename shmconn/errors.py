# SPDX-License-Identifier: Apache-2.0
"""Everything that shmconn raises on purpose.

    ShmConnError
    ├── OptionError          an option, name, size or request is wrong (ValueError)
    │   └── Oversized        the sample is larger than a third of the ring
    ├── RingMissing          there is no ring of that name (LookupError)
    ├── SegmentCorrupt       a segment holds what no producer writes; names the field
    │   └── FileCorrupt      a file of samples is not what was written; names file and field
    ├── LayoutMismatch       a segment of another version of shmconn
    ├── AccessDenied         another user's segment (PermissionError)
    ├── NoSpace              /dev/shm is too small for the ring (OSError)
    ├── NoDescriptors        this process may open no more files (OSError)
    ├── Busy                 a lock could not be had in time (TimeoutError)
    ├── RegistryFull         no group or member row is free
    ├── ProducerDied         all that was published is read, and the producer was killed
    ├── SampleLost           the request yielded no sample; says why
    ├── SampleGone           the sample was delivered to this group before, or is too old
    ├── NotReady             the sample did not come in time (TimeoutError)
    ├── ForkedError          used in a forked child of the process that opened it
    └── Closed               used after close()

A full ring is a value (``None``), never an exception.
"""

import errno


class ShmConnError(Exception):
    """Root of all errors of shmconn."""


class OptionError(ShmConnError, ValueError):
    """A user's option, name, size or request is wrong."""


class Oversized(OptionError):
    """A sample is larger than a third of the ring's data area."""


class RingMissing(ShmConnError, LookupError):
    """There is no ring of that name."""


class SegmentCorrupt(ShmConnError):
    """A segment holds what no producer writes.

    Attributes:
        field: the field of the segment that gave it away.
    """

    def __init__(self, segment: str, field: str, detail: str) -> None:
        super().__init__(segment, field, detail)
        self.field = field

    def __str__(self) -> str:
        segment, field, detail = self.args
        return (
            f"segment {segment!r} is damaged: {field} {detail}. "
            f"Nothing was read from it; remove it with `shmconn rm` once its producer is gone."
        )


class FileCorrupt(SegmentCorrupt):
    """A file of samples is not what was written: changed, cut, or mixed up."""

    def __str__(self) -> str:
        file, field, detail = self.args
        return (
            f"{file} is damaged: {field} {detail}. Nothing was taken from it: copy it again from "
            "where it came, or remove it"
        )


class LayoutMismatch(ShmConnError):
    """A segment was made by another version of shmconn."""


class AccessDenied(ShmConnError, PermissionError):
    """A segment belongs to another user."""


class NoSpace(ShmConnError, OSError):
    """/dev/shm has no room for the segment."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)

    def __str__(self) -> str:
        return str(self.args[1])

    def __reduce__(self) -> tuple[type["NoSpace"], tuple[str]]:
        return type(self), (str(self),)


class NoDescriptors(ShmConnError, OSError):
    """This process, or this host, may open no more files. Nothing is lost: try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.EMFILE, message)

    def __str__(self) -> str:
        return str(self.args[1])

    def __reduce__(self) -> tuple[type["NoDescriptors"], tuple[str]]:
        return type(self), (str(self),)


class NoMemory(ShmConnError, OSError):
    """The kernel lets this process map no more memory. Nothing is lost: try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOMEM, message)

    def __str__(self) -> str:
        return str(self.args[1])

    def __reduce__(self) -> tuple[type["NoMemory"], tuple[str]]:
        return type(self), (str(self),)


class Busy(ShmConnError, TimeoutError):
    """A lock could not be had in time."""


class RegistryFull(ShmConnError):
    """No group row, or no member row of the group, is free."""


class ProducerDied(ShmConnError):
    """The producer was killed; everything that it had published has been read.

    Attributes:
        accepted: highest request number that the producer had taken in.
        settled: every request up to this number was published or has a tombstone.
    """

    # A message alone is enough: so errors come through pickles, and through DataLoader workers.
    def __init__(self, message: str, *, accepted: int = 0, settled: int = 0) -> None:
        super().__init__(message)
        self.accepted = accepted
        self.settled = settled

    @property
    def unpublished(self) -> int:
        """Requests that were taken in and can never be delivered."""
        return max(0, self.accepted - self.settled)


class SampleLost(ShmConnError):
    """A request yielded no sample.

    Attributes:
        reason: aborted, short, oversized, no_reader, dropped, fault or shutdown.
        retry: whether sending the request again may help.
    """

    def __init__(self, message: str, *, reason: str = "fault", retry: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry = retry


class SampleGone(ShmConnError):
    """The sample was delivered to this group before, or its trace is overwritten."""


class NotReady(ShmConnError, TimeoutError):
    """The sample did not come within the timeout."""


class Standstill(ShmConnError, RuntimeError):
    """A wait for a sample that only what this very thread holds could end."""


class ForkedError(ShmConnError):
    """Used in a forked child of the process that opened it."""


class Closed(ShmConnError):
    """Used after ``close()``."""
