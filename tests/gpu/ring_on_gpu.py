# SPDX-License-Identifier: Apache-2.0
"""A real ring that is filled out of a paged cache on the device."""

from collections.abc import Sequence
from typing import Any

import torch

import shmconn
from shmconn.capture import CacheView
from shmconn.capture_cuda import DeviceCapture

BLOCK, LAYERS, HIDDEN = 16, 4, 512


def random_cache(blocks: int, *, hidden: int = HIDDEN, seed: int = 0) -> torch.Tensor:
    """bf16 ``[blocks, block, layers, hidden]`` of any bits, on the device."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (blocks, BLOCK, LAYERS, hidden)
    bits = torch.randint(
        -(1 << 15), 1 << 15, shape, generator=generator, dtype=torch.int16, device="cuda"
    )
    return bits.view(torch.bfloat16)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, so that NaN equals itself."""
    return tensor.contiguous().view(torch.int16).cpu()


def rows(cache: torch.Tensor, blocks: Sequence[int], tokens: int) -> torch.Tensor:
    """What a sample of these blocks holds, on the host."""
    return bits(cache[list(blocks)].flatten(0, 1)[:tokens])


class RingOnGpu:
    """A producer whose samples come out of a cache, as in vLLM's worker."""

    def __init__(self, name: str, cache: torch.Tensor, size: str, **capture: Any) -> None:
        self.cache = cache
        self.producer = shmconn.Producer.create(
            name,
            size=size,
            layer_ids=list(range(LAYERS)),
            hidden_size=cache.shape[3],
            dtype="bfloat16",
        )
        self.capture = DeviceCapture(CacheView(cache), self.producer.data_area, **capture)
        self.capture.bind()
        self.number = 0

    def put(self, blocks: Sequence[int], tokens: int) -> bool:
        """Publishes one sample; False if there is no room."""
        ready = self.capture.mark()
        fill = self.producer.allocate(
            number=self.number + 1, request_id=f"r{self.number + 1}", token_ids=range(tokens)
        )
        if fill is None:
            return False
        self.number += 1
        self.producer.accept(self.number)
        self.capture.copy(fill, blocks, ready)
        self.producer.publish(fill)
        return True

    def close(self) -> None:
        """In the order of a worker's end."""
        self.capture.close()
        self.producer.close()
