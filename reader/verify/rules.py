# SPDX-License-Identifier: Apache-2.0
"""Whether hidden states are those of a reference, row by row and layer by layer.

Shapes: T tokens, L captured layers, D hidden size. e(row) = |got - ref| / |ref| over D.

A sample's relative error as a whole says nothing: the first token's row is an attention sink, up to
150 times as long as the others, and hides them all. So each row of each layer is judged:

1. every value is finite;
2. the first row, without the 4 largest dimensions of its reference: e at most `first`;
3. the other rows: median of e at most `median`, 99 % quantile at most `q99` (from 100 rows on),
   each at most `row`, and the median of any 8 rows in sequence at most `run`;
4. a row is nearer to its own reference row than to those of its neighbours;
5. a layer's median row is nearest to its own layer's reference.

3 finds stale, zero and foreign rows; 4 finds rows that changed places; 5 finds layers that did.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

# The first row's length lies in these few dimensions; what is left can be compared.
_SINK_DIMENSIONS = 4
_RUN = 8
_ROWS_FOR_QUANTILE = 100


@dataclass(frozen=True)
class Bounds:
    """Largest allowed e(row); see the module's text for each."""

    first: float
    median: float
    q99: float
    row: float
    run: float

    def halved(self) -> Bounds:
        """The bounds between two samples of one prompt, which share the reference."""
        return Bounds(**{field.name: getattr(self, field.name) / 2 for field in fields(self)})


# The largest that honest samples of SmolLM2-135M reached on two machines (72 and 96 samples):
#   bfloat16   first .024, median .027, q99 .052, row .187, run .041
#   float32    first 7e-6, median 3e-6, q99 6e-6, row 1.8e-5, run 5e-6
# In float32 the noise is a thousandth of the distance between any two rows or layers.
BOUNDS = {
    "bfloat16": Bounds(first=0.05, median=0.04, q99=0.10, row=0.25, run=0.08),
    "float32": Bounds(first=1e-4, median=1e-4, q99=1e-4, row=1e-4, run=1e-4),
}
# Half precision has three more bits than bfloat16: its noise lies well inside the same bounds.
BOUNDS["float16"] = BOUNDS["bfloat16"]


@dataclass(frozen=True)
class Noise:
    """What one layer of one sample shows; 0 where there are no such rows."""

    first: float = 0.0
    median: float = 0.0
    q99: float = 0.0
    row: float = 0.0
    run: float = 0.0

    def worst(self, other: Noise) -> Noise:
        """The larger of each figure."""
        pairs = {
            field.name: max(getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        }
        return Noise(**pairs)


@dataclass(frozen=True)
class Verdict:
    """The figures of each layer, in order, and one sentence for each rule that was broken."""

    noise: tuple[Noise, ...]
    faults: tuple[str, ...]


def judge(
    got: torch.Tensor, ref: torch.Tensor, layer_ids: list[int] | tuple[int, ...], bounds: Bounds
) -> Verdict:
    """All five rules.

    Args:
        got: The sample, [T, L, D], any float dtype.
        ref: What the model computes, [T, L, D], float32.
        layer_ids: Names of the L layers, for the sentences.
        bounds: By the dtype of the sample.
    """
    got = got.float()
    if not torch.isfinite(got).all():
        rows = (~torch.isfinite(got)).any(dim=2).any(dim=1).nonzero().flatten().tolist()
        blank = tuple(Noise() for _ in layer_ids)
        return Verdict(blank, (f"{len(rows)} rows hold a value that is not finite: {_some(rows)}",))
    measured = compare(got, ref, layer_ids, bounds)
    faults = [*measured.faults, *_neighbours(got, ref, layer_ids), *_layers(got, ref, layer_ids)]
    return Verdict(measured.noise, tuple(faults))


def compare(
    got: torch.Tensor, ref: torch.Tensor, layer_ids: list[int] | tuple[int, ...], bounds: Bounds
) -> Verdict:
    """Rules 2 and 3 only: how far two sets of rows are apart. Shapes as in `judge`."""
    got, ref = got.float(), ref.float()
    errors = _relative(got - ref, ref)  # [T, L]
    noise: list[Noise] = []
    faults: list[str] = []
    for index, layer in enumerate(layer_ids):
        rest = errors[1:, index]
        figures = Noise(first=_first_row(got[0, index], ref[0, index]), **_spread(rest))
        noise.append(figures)
        for field in fields(Bounds):
            value, bound = getattr(figures, field.name), getattr(bounds, field.name)
            if value > bound:
                where = ""
                if field.name == "row":
                    over = ((rest > bound).nonzero().flatten() + 1).tolist()
                    where = f" ({len(over)} of {len(rest)} rows: {_some(over)})"
                faults.append(
                    f"layer {layer}: {_NAMES[field.name]} {value:.2g}, bound {bound:.2g}{where}"
                )
    return Verdict(tuple(noise), tuple(faults))


_NAMES = {
    "first": "first row off by",
    "median": "median row off by",
    "q99": "99 % of rows off by up to",
    "row": "a row off by",
    "run": f"{_RUN} rows in sequence off by",
}


def _relative(difference: torch.Tensor, ref: torch.Tensor) -> torch.Tensor:
    """Length of the difference over that of the reference, along the last axis."""
    # A reference of length 0 does not occur in a model; the floor only keeps 0/0 out.
    errors: torch.Tensor = difference.norm(dim=-1) / ref.norm(dim=-1).clamp_min(1e-30)
    return errors


def _first_row(got: torch.Tensor, ref: torch.Tensor) -> float:
    keep = torch.ones_like(ref, dtype=torch.bool)
    keep[ref.abs().topk(min(_SINK_DIMENSIONS, len(ref) - 1)).indices] = False
    return float(_relative((got - ref)[keep], ref[keep]))


def _spread(errors: torch.Tensor) -> dict[str, float]:
    """Median, 99 % quantile, largest, and the largest median of `_RUN` in sequence."""
    count = len(errors)
    if count == 0:
        return {}
    figures = {"median": float(errors.median()), "row": float(errors.max())}
    if count >= _ROWS_FOR_QUANTILE:
        figures["q99"] = float(errors.quantile(0.99))
    if count >= _RUN:
        figures["run"] = float(errors.unfold(0, _RUN, 1).median(dim=1).values.max())
    return figures


def _neighbours(
    got: torch.Tensor, ref: torch.Tensor, layer_ids: list[int] | tuple[int, ...]
) -> list[str]:
    own = (got - ref).norm(dim=2)  # [T, L]
    nearest = torch.full_like(own, float("inf"))
    if len(ref) > 1:
        nearest[1:] = (got[1:] - ref[:-1]).norm(dim=2)
        nearest[:-1] = torch.minimum(nearest[:-1], (got[:-1] - ref[1:]).norm(dim=2))
    faults = []
    for index, layer in enumerate(layer_ids):
        rows = (own[:, index] >= nearest[:, index]).nonzero().flatten().tolist()
        if rows:
            faults.append(
                f"layer {layer}: {len(rows)} rows are nearer to a neighbour's place than to "
                f"their own: {_some(rows)}"
            )
    return faults


def _layers(
    got: torch.Tensor, ref: torch.Tensor, layer_ids: list[int] | tuple[int, ...]
) -> list[str]:
    # The first rows of middle layers are nearly alike, so they count only where nothing else is.
    rows = slice(1, None) if len(got) > 1 else slice(0, 1)
    faults = []
    for index, layer in enumerate(layer_ids):
        differences = got[rows, index, None] - ref[rows]  # [T, L, D]
        distances = differences.norm(dim=2).median(dim=0).values
        nearest = int(distances.argmin())
        if nearest != index:
            faults.append(f"layer {layer}: its rows are those of layer {layer_ids[nearest]}")
    return faults


def _some(rows: list[int]) -> str:
    """The first few row numbers, counted from 0."""
    return ", ".join(map(str, rows[:5])) + (", …" if len(rows) > 5 else "")
