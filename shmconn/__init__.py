# SPDX-License-Identifier: Apache-2.0
"""Hidden states of a running vLLM, through a ring in shared memory, to a trainer.

    with shmconn.subscribe("qwen", group="trainer") as subscription:
        for sample in subscription:
            sample.hidden_states    # torch view, [tokens, layers, hidden]
            sample.token_ids        # int64 [tokens]

Names are loaded on first use: importing this package imports neither torch nor vLLM.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shmconn.collate import Collator
    from shmconn.dataset import SampleDataset
    from shmconn.directory import rings
    from shmconn.errors import (
        AccessDenied,
        Busy,
        Closed,
        FileCorrupt,
        ForkedError,
        LayoutMismatch,
        NoDescriptors,
        NoMemory,
        NoSpace,
        NotReady,
        OptionError,
        Oversized,
        ProducerDied,
        RegistryFull,
        RingMissing,
        SampleGone,
        SampleLost,
        SegmentCorrupt,
        ShmConnError,
        Standstill,
    )
    from shmconn.even import EvenBatches
    from shmconn.handle import Handle
    from shmconn.prefetch import CudaPrefetcher
    from shmconn.ring import Producer
    from shmconn.sample import Sample
    from shmconn.subscription import Subscription, subscribe

__version__ = "0.1.0"

_HOMES = {
    "Collator": "collate",
    "CudaPrefetcher": "prefetch",
    "EvenBatches": "even",
    "SampleDataset": "dataset",
    "rings": "directory",
    "Handle": "handle",
    "Producer": "ring",
    "Sample": "sample",
    "Subscription": "subscription",
    "subscribe": "subscription",
}

__all__ = [
    "AccessDenied",
    "Busy",
    "Closed",
    "Collator",
    "CudaPrefetcher",
    "EvenBatches",
    "FileCorrupt",
    "ForkedError",
    "Handle",
    "LayoutMismatch",
    "NoDescriptors",
    "NoMemory",
    "NoSpace",
    "NotReady",
    "OptionError",
    "Oversized",
    "Producer",
    "ProducerDied",
    "RegistryFull",
    "RingMissing",
    "Sample",
    "SampleDataset",
    "SampleGone",
    "SampleLost",
    "SegmentCorrupt",
    "ShmConnError",
    "Standstill",
    "Subscription",
    "rings",
    "subscribe",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shmconn' has no attribute {name!r}")
    value = getattr(import_module(f"shmconn.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
