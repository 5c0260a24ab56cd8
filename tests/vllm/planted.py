# SPDX-License-Identifier: Apache-2.0
"""The connector with faults and a second copy, each only for requests whose tag asks for it.

vLLM loads this class by its module path in the tests' server; everything else is the real thing.

    plant:PLACE    the function named raises for this one request
    twin...        its rows are also copied in the plainest way, before the connector takes it in,
                   into $SHMCONN_TWINS/GENERATION-NUMBER.pt
"""

import os
from pathlib import Path
from typing import Any

import torch

from shmconn.connector import ShmHiddenStatesConnector


class Planted(RuntimeError):
    """A fault that a test planted."""


class PlantedConnector(ShmHiddenStatesConnector):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plants: set[str] = set()
        real = self._intake._decide

        def decide(request: Any, blocks: Any) -> Any:
            tag = str((request.kv_transfer_params or {}).get("tag"))
            if tag == "plant:decide":
                raise Planted(tag)
            if tag == "plant:build_connector_meta":
                self._plants.add(tag)
            return real(request, blocks)

        self._intake._decide = decide
        take = self._intake.take

        def take_or_raise() -> Any:
            if "plant:build_connector_meta" in self._plants:
                self._plants.clear()
                raise Planted("plant:build_connector_meta")
            return take()

        self._intake.take = take_or_raise

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if self._worker.identity is None:
            return
        copier, producer = self._worker._copier, self._worker._producer
        current = ""

        def plant(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal current
                current = str(kwargs["tag"]) if "tag" in kwargs else current
                if current == f"plant:{name}":
                    current = ""
                    raise Planted(name)
                return real(*args, **kwargs)

            setattr(owner, name, wrapped)

        plant(producer, "allocate")
        plant(producer, "publish")
        plant(self._worker._capture, "copy")
        plant(copier._tally, "published")

        submit = self._worker.submit

        def submit_with_twins(work: Any) -> None:
            work = list(work)
            # First: once it is taken in, the sample may be with its reader at any moment.
            for one in work:
                if one.reason is None and str(one.tag).startswith("twin"):
                    self._save_twin(one)
            submit(work)

        self._worker.submit = submit_with_twins

    def _save_twin(self, work: Any) -> None:
        name = f"{self._worker.identity.generation}-{work.number}.pt"
        file = Path(os.environ["SHMCONN_TWINS"]) / name
        if file.exists():
            # A request is handed over more than once, and its blocks are freed after the first.
            return
        cache = self._worker._capture._cache
        rows = []
        for token in range(len(work.token_ids)):
            index, place = divmod(token, cache.block)
            block = work.blocks[index // cache.expand] * cache.expand + index % cache.expand
            rows.append(cache.states[block, place].clone())
        torch.save(torch.stack(rows).cpu(), file)
