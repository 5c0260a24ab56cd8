# SPDX-License-Identifier: Apache-2.0
"""``shmconn inspect``: a sample's metadata and the norms of its rows, by layer."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from reader.peek import Look, look_at
from reader.tables import Column, Row, fitted
from shmconn.errors import OptionError
from shmconn.handle import format_size

if TYPE_CHECKING:
    import torch

_LAYERS = (
    Column("LAYER", right=True),
    Column("FIRST ROW", right=True, rank=3),
    Column("MEDIAN", right=True, rank=1),
    Column("LEAST", right=True, rank=4),
    Column("GREATEST", right=True, rank=5),
    Column("ZERO ROWS", right=True),
    Column("NOT FINITE", right=True),
)
_CELL_HEIGHT = 26  # pixels per layer
_WIDTH = 1000  # pixels of the map at most; fewer tokens get wider cells
_LEFT, _TOP, _RIGHT, _BOTTOM = 70, 44, 90, 46
# Dark blue to yellow, as (position, red, green, blue).
_COLOURS = ((0.0, 13, 8, 135), (0.35, 156, 23, 158), (0.7, 237, 121, 83), (1.0, 240, 249, 33))


def run(source: str, *, index: int, png: Path | None, as_json: bool) -> None:
    """Show a sample of a file or of a ring."""
    look = look_at(source, index)
    rows = norms(look.states)
    layers = summaries(look, rows)
    if png is not None:
        draw(look, rows, png)
    if as_json:
        facts: dict[str, Any] = {
            "source": look.source,
            "metadata": look.facts,
            "tokens": look.states.shape[0],
            "shape": list(look.states.shape),
            "layers": layers,
        }
        print(json.dumps(facts))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(look.source, style="bold"))
    size = look.states.numel() * look.states.element_size()
    for key, value in look.facts.items():
        console.print(Text(f"  {key:<11}"), Text(value[:300]), sep="")
    console.print(f"  {'size':<11}{format_size(size)}")
    console.print(f"  {'token ids':<11}{_ids(look.token_ids)}")
    console.print(fitted(_LAYERS, _rows(layers), console))
    if png is not None:
        console.print(f"wrote {png}", markup=False)


def norms(states: "torch.Tensor") -> "torch.Tensor":
    """Length of each row: float32 [tokens, layers]."""
    found: torch.Tensor = states.float().norm(dim=-1)
    return found


def summaries(look: Look, rows: "torch.Tensor") -> list[dict[str, Any]]:
    """For each layer: the first row's norm, and median, least and greatest of the others."""
    import torch

    found = []
    for position, layer in enumerate(look.layer_ids):
        column = rows[:, position]
        rest = column[1:] if len(column) > 1 else column
        states = look.states[:, position]
        bad = int((~torch.isfinite(states)).any(-1).sum())
        finite = rest[torch.isfinite(rest)]
        found.append(
            {
                "layer": layer,
                "first": float(column[0]) if len(column) else None,
                "median": float(finite.median()) if len(finite) else None,
                "least": float(finite.min()) if len(finite) else None,
                "greatest": float(finite.max()) if len(finite) else None,
                "zero_rows": int((column == 0).sum()),
                "rows_not_finite": bad,
            }
        )
    return found


def _ids(token_ids: "torch.Tensor") -> str:
    shown = ", ".join(str(number) for number in token_ids[:12].tolist())
    more = len(token_ids) - 12
    return f"{shown}{f', ... {more} more' if more > 0 else ''}"


def _rows(layers: list[dict[str, Any]]) -> list[Row]:
    rows: list[Row] = []
    for layer in layers:
        numbers = [layer[key] for key in ("first", "median", "least", "greatest")]
        rows.append(
            (
                str(layer["layer"]),
                *("-" if number is None else f"{number:.4g}" for number in numbers),
                Text(str(layer["zero_rows"]), style="red" if layer["zero_rows"] else ""),
                Text(str(layer["rows_not_finite"]), style="red" * bool(layer["rows_not_finite"])),
            )
        )
    return rows


def draw(look: Look, rows: "torch.Tensor", path: Path) -> None:
    """A heat map of the rows' norms as a PNG: tokens to the right, layers down, log scale.

    Raises:
        OptionError: Pillow is not installed, or there is nothing to draw, or no room for it.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise OptionError("--png needs Pillow: pip install 'shmconn[png]'") from None
    if not rows.numel():
        raise OptionError("the sample has no tokens: there is nothing to draw")
    tokens, layers = rows.shape
    width = max(1, min(_WIDTH, 40 * tokens))
    height = _CELL_HEIGHT * layers
    scaled, least, greatest = _scaled(rows)
    pixels = bytes(channel for value in scaled.t().flatten().tolist() for channel in _colour(value))
    heat = Image.frombytes("RGB", (tokens, layers), pixels)
    # A narrow map averages tokens; a wide one repeats them.
    heat = heat.resize(
        (width, height), Image.Resampling.BOX if tokens > width else Image.Resampling.NEAREST
    )
    image = Image.new("RGB", (_LEFT + width + _RIGHT, _TOP + height + _BOTTOM), "white")
    image.paste(heat, (_LEFT, _TOP))
    pen = ImageDraw.Draw(image)
    pen.text(
        (_LEFT, 8), f"{look.facts.get('tag') or look.facts.get('request_id') or ''}"[:90], "black"
    )
    pen.text((_LEFT, 24), "length of each hidden state, log scale; grey: not finite", "dimgray")
    for position, layer in enumerate(look.layer_ids):
        at = _TOP + position * _CELL_HEIGHT + _CELL_HEIGHT // 2
        pen.text((_LEFT - 6, at), f"layer {layer}", "black", anchor="rm")
    for part in range(5):
        token = round(part * (tokens - 1) / 4)
        x = _LEFT + (token + 0.5) * width / tokens
        pen.text((x, _TOP + height + 6), str(token), "black", anchor="ma")
    pen.text((_LEFT + width / 2, _TOP + height + 24), "token", "black", anchor="ma")
    _bar(image, pen, _LEFT + width + 16, height, least, greatest)
    try:
        image.save(path, "PNG")
    except OSError as error:
        raise OptionError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def _scaled(rows: "torch.Tensor") -> "tuple[torch.Tensor, float, float]":
    """Log norms from 0 to 1, nan where not finite; and the norms at both ends."""
    import torch

    finite = rows[torch.isfinite(rows) & (rows > 0)]
    least = float(finite.min()) if len(finite) else 1.0
    greatest = float(finite.max()) if len(finite) else 1.0
    span = max(torch.tensor(greatest / least).log().item(), 1e-6)
    logs = (rows.clamp_min(least) / least).log() / span
    return torch.where(torch.isfinite(rows), logs.clamp(0, 1), torch.nan), least, greatest


def _colour(value: float) -> tuple[int, int, int]:
    if value != value:
        return (128, 128, 128)
    for (low, *first), (high, *second) in zip(_COLOURS, _COLOURS[1:], strict=False):
        if value <= high:
            part = (value - low) / (high - low)
            red, green, blue = (
                round(a + (b - a) * part) for a, b in zip(first, second, strict=True)
            )
            return (red, green, blue)
    return (240, 249, 33)


def _bar(image: Any, pen: Any, left: int, height: int, least: float, greatest: float) -> None:
    """The scale of colours, with the norms at its ends."""
    for y in range(height):
        pen.line((left, _TOP + y, left + 12, _TOP + y), _colour(1 - y / max(1, height - 1)))
    pen.text((left + 18, _TOP), f"{greatest:.3g}", "black")
    pen.text((left + 18, _TOP + height), f"{least:.3g}", "black", anchor="ls")
