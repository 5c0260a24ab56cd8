# SPDX-License-Identifier: Apache-2.0
"""A sample to look at: out of a file, or copied out of a ring without joining it.

A group that joins takes samples from others, and the first to join takes all that nobody has read
yet. So a ring is looked at from outside: the newest sample is copied, and its sequence number read
again after the copy, since the producer clears it before it uses the pages anew.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shmconn import layout
from shmconn.checksum import check
from shmconn.errors import OptionError, RingMissing, SegmentCorrupt
from shmconn.sample import Facts, Row, Sample
from shmconn.segment import RingSegment, ring_files
from shmconn.which import missing_text

if TYPE_CHECKING:
    import torch

_TRIES = 5
_ORDER = ("request_id", "tag", "handle", "layer_ids", "dtype", "shape", "ring", "generation")


@dataclass(frozen=True)
class Look:
    """What there is to see of a sample.

    Attributes:
        source: where it came from.
        facts: names and values for people.
        layer_ids: along the second axis.
        states: [tokens, layers, hidden].
        token_ids: [tokens].
    """

    source: str
    facts: dict[str, str]
    layer_ids: list[int]
    states: "torch.Tensor"
    token_ids: "torch.Tensor"


def look_at(source: str, index: int) -> Look:
    """A sample of a file, of a shard or of a ring.

    Args:
        source: a path, or the name of a ring.
        index: of the sample, in a shard.

    Raises:
        OptionError: it is neither, or not such a file.
        RingMissing: there is no such ring.
    """
    path = Path(source)
    if path.is_file():
        return _of_file(path, index)
    if os.sep in source or source.endswith(".safetensors"):
        if path.is_dir():
            raise OptionError(f"{source!r} is a folder: name a file in it")
        raise OptionError(f"there is no file {source!r}")
    return _of_ring(source)


def _of_file(path: Path, index: int) -> Look:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            keys, metadata = set(file.keys()), dict(file.metadata() or {})
            prefix = "" if "hidden_states" in keys else f"{index}."
            if f"{prefix}hidden_states" not in keys:
                raise OptionError(f"{str(path)!r} holds no sample{f' {index}' if keys else ''}")
            states = file.get_tensor(f"{prefix}hidden_states")
            token_ids = file.get_tensor(f"{prefix}token_ids")
        if prefix:
            metadata = json.loads(metadata[str(index)])
        check(str(path), metadata, token_ids, states)
    except (SafetensorError, KeyError, ValueError) as error:
        raise OptionError(f"{str(path)!r} is not a file of hidden states: {error}") from None
    layer_ids = json.loads(metadata.get("layer_ids", "null"))
    return Look(
        source=str(path),
        facts={key: str(metadata[key]) for key in sorted(metadata, key=_place)},
        layer_ids=layer_ids or list(range(states.shape[1])),
        states=states,
        token_ids=token_ids,
    )


def _place(key: str) -> tuple[int, str]:
    """Known keys first, in the order of a sample's own metadata: a header has none."""
    return (_ORDER.index(key) if key in _ORDER else len(_ORDER), key)


def _of_ring(name: str) -> Look:
    from reader.sinks.safetensors import metadata_of

    files = ring_files(name)
    if not files:
        raise RingMissing(missing_text(name))
    for file_name in files:
        ring = RingSegment.attach(file_name, whole=True)
        sample = _newest(ring) if ring is not None else None
        if sample is not None:
            return Look(
                source=f"ring {name}, sample {sample.seq}, not taken from its readers",
                facts=metadata_of(sample),
                layer_ids=list(sample.layer_ids),
                states=sample.hidden_states,
                token_ids=sample.token_ids,
            )
    raise OptionError(f"ring {name!r} holds no sample now: all were read, or none has come yet")


def _newest(ring: RingSegment) -> Sample | None:
    """A copy of the newest sample that is still there."""
    words, shape = ring.words, ring.shape
    for _ in range(_TRIES):
        published = words.load(layout.PUBLISHED)
        seqs = words.copy(layout.SEQ, shape.slots).tolist()
        there = [(seq, slot) for slot, seq in enumerate(seqs) if 0 < seq <= published]
        if not there:
            return None
        seq, slot = max(there)
        try:
            row = Row.read(ring, slot)
            start = shape.page_at(row.first_page)
            data = words.read(start, row.json_offset + row.json_bytes)
            facts = Facts.read(ring, row, seq, data[row.json_offset :])
        except SegmentCorrupt:
            # Damaged, or only reused while we read; the sequence number tells.
            if words.load(shape.seq_at(slot)) == seq:
                raise
            continue
        if words.load(shape.seq_at(slot)) == seq:
            return _sample(facts, data[: row.json_offset], row.ids_offset)
    return None


def _sample(facts: Facts, data: bytes, ids_offset: int) -> Sample:
    buffer: Any = bytearray(data)
    return Sample(facts, buffer, ids_offset)
