# SPDX-License-Identifier: Apache-2.0
"""The checks of `shmconn verify`, in the order in which the report shows them.

Samples of one prompt form a family: the model runs once over the longest of their sequences, each
of them is judged against it, and then each against the next one of the family.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from reader.names import file_names
from reader.verify.files import SampleFile, Send, read_samples, read_sends
from reader.verify.reference import Reference
from reader.verify.report import Report
from reader.verify.rules import BOUNDS, compare, judge
from shmconn.errors import OptionError

_FILES = "files are samples"
_KIND = "layers, size, dtype alike"
_NAMES = "names are the samples' own"
_PROMISED = "promised samples are there"
_OTHERS = "samples were promised"
_REPLY = "name, tag, ids as replied"
_STATES = "states are the model's"
_PAIRS = "sends of a prompt agree"
_NEXT = "last layer to next token"

# Nats that the likeliest token may be ahead of the server's: its own rounding decides near-ties.
_NEXT_TOKEN_BOUNDS = {"float32": 0.01, "bfloat16": 0.25, "float16": 0.25}


@dataclass(frozen=True)
class VerifyOptions:
    """What the user asked of `shmconn verify`.

    Attributes:
        directory: Folder with the files of `shmconn drain`.
        model: Folder or hub name of the model that was served.
        sends: The sender's log; without it completeness is unchecked.
        json: Print the report as JSON on stdout instead of a table.
        device: Where the reference runs, "cpu" or "cuda".
    """

    directory: Path
    model: str
    sends: Path | None = None
    json: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class _Member:
    """A sample of a family, with its line of the log."""

    sample: SampleFile
    send: Send | None

    @property
    def name(self) -> str:
        return self.sample.name


def run(options: VerifyOptions) -> int:
    """Verify, and print the report.

    Returns:
        0 when everything holds, 1 when a sample is off or missing.

    Raises:
        OptionError: The folder, the model or the log cannot be read, or there is nothing to verify.
    """
    with Progress(console=Console(stderr=True), transient=True) as progress:
        report = examine(options, progress)
    if options.json:
        print(report.as_json())
    else:
        report.show(Console())
    return 0 if report.ok else 1


def examine(options: VerifyOptions, progress: Progress) -> Report:
    """All checks. Raises as `run`."""
    sends = None if options.sends is None else read_sends(options.sends)
    samples, bad = read_samples(options.directory)
    if not samples and not bad and sends is None:
        raise OptionError(f"there is no .safetensors file in {str(options.directory)!r}")
    report = Report(complete=sends is not None)
    for sample in samples:
        report.check(_FILES, sample.name)
    for file in bad:
        report.check(_FILES, file.name, [f"is no sample: {file.reason}"])
    _check_kinds(report, samples)
    if sends is None:
        for sample in samples:
            report.check(_NAMES, sample.name, _misnamed(sample))
    members = [_Member(sample, None) for sample in samples]
    if sends is not None:
        members = _match(report, samples, sends)
    if members:
        load = progress.add_task("loading the model", total=None)
        reference = Reference(options.model, options.device)
        progress.remove_task(load)
        _check_states(report, reference, _families(members), progress)
    return report


def _check_kinds(report: Report, samples: list[SampleFile]) -> None:
    """The samples are of one kind."""
    kinds = Counter(sample.identity for sample in samples)
    for sample in samples:
        usual, _ = kinds.most_common(1)[0]
        odd = [f"is of {sample.identity}, most are of {usual}"]
        report.check(_KIND, sample.name, odd if sample.identity != usual else [])


def _misnamed(sample: SampleFile) -> Iterator[str]:
    """Where a file has the name of another sample."""
    names = list(file_names(sample.tag or sample.request_id, sample.handle, sample.path.suffix))
    if sample.index is None and sample.handle and sample.path.name not in names:
        yield f"the file of this sample is called {names[0]}; were files renamed?"


def _match(report: Report, samples: list[SampleFile], sends: list[Send]) -> list[_Member]:
    """Each send has its sample, each sample its send, and they say the same."""
    files: dict[str, list[SampleFile]] = {}
    for sample in samples:
        files.setdefault(sample.handle, []).append(sample)
    for send in sends:
        there = files.get(send.handle, [])
        faults = [] if there else [f"no file holds the sample {send.handle}"]
        if len(there) > 1:
            names = ", ".join(sample.name for sample in there)
            faults = [f"{len(there)} files hold this one sample: {names}"]
        report.check(_PROMISED, send.name, faults)
    by_handle = {send.handle: send for send in sends}
    members = []
    for sample in samples:
        member = _Member(sample, by_handle.get(sample.handle))
        members.append(member)
        unknown = [f"no send has the handle {sample.handle or '(none)'}"]
        report.check(_OTHERS, member.name, unknown if member.send is None else [])
        if member.send is not None:
            report.check(_REPLY, member.name, _differences(sample, member.send))
    return members


def _differences(sample: SampleFile, send: Send) -> Iterator[str]:
    """Where the file does not say what the reply said."""
    expected, got = send.sample_token_ids, sample.token_ids.tolist()
    if got != expected:
        pairs = zip(got, expected, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
        yield (
            f"token ids differ from the reply's at {first} ({len(got)} tokens, the reply promises "
            f"{len(expected)})"
        )
    yield from _misnamed(sample)
    if sample.tag != (send.tag or ""):
        yield f"tag is {sample.tag!r}, the request asked for {send.tag!r}"
    for name in ("layer_ids", "shape", "dtype"):
        promised, held = getattr(send, name), getattr(sample, name)
        held = list(held) if isinstance(held, tuple) else held
        if promised is not None and promised != held:
            yield f"{name} is {held}, the reply says {promised}"


def _families(members: list[_Member]) -> list[list[_Member]]:
    """Members by prompt; without a log, by the whole of their token ids."""
    families: dict[tuple[int, ...], list[_Member]] = {}
    for member in members:
        ids = member.sample.token_ids.tolist() if member.send is None else None
        key = tuple(member.send.prompt_token_ids if member.send is not None else ids or [])
        families.setdefault(key, []).append(member)
    return list(families.values())


def _check_states(
    report: Report, reference: Reference, families: list[list[_Member]], progress: Progress
) -> None:
    task = progress.add_task("running the model", total=len(families))
    for family in families:
        fitting = []
        for member in family:
            misfit = list(_misfits(member.sample, reference))
            if misfit:
                report.check(_STATES, member.name, misfit)
            else:
                fitting.append(member)
        before: tuple[_Member, torch.Tensor] | None = None
        for member, expected in _with_reference(fitting, reference):
            sample = member.sample
            got = sample.hidden_states()
            verdict = judge(got, expected, sample.layer_ids, BOUNDS[sample.dtype])
            report.check(_STATES, member.name, verdict.faults)
            for layer, noise in zip(sample.layer_ids, verdict.noise, strict=True):
                report.measure(sample.dtype, f"layer {layer}", noise)
            if before is not None:
                _check_pair(report, before, (member, got))
            _check_next_token(report, reference, member, got)
            before = (member, got)
        progress.advance(task)


def _misfits(sample: SampleFile, reference: Reference) -> Iterator[str]:
    """Why the model cannot have made this sample at all."""
    if sample.dtype not in BOUNDS:
        yield f"no bounds are known for dtype {sample.dtype}, only for {', '.join(sorted(BOUNDS))}"
    if sample.shape[2] != reference.hidden_size:
        yield f"hidden size is {sample.shape[2]}, the model's {reference.hidden_size}"
    wrong = [layer for layer in sample.layer_ids if not 0 <= layer <= reference.layers]
    if wrong:
        yield f"layer {wrong[0]} does not exist, the model has {reference.layers}"
    low, high = int(sample.token_ids.min()), int(sample.token_ids.max())
    if low < 0 or high >= reference.vocabulary:
        yield f"token ids run from {low} to {high}, the model knows {reference.vocabulary}"


def _with_reference(
    family: list[_Member], reference: Reference
) -> Iterator[tuple[_Member, torch.Tensor]]:
    """Each member with its reference rows [T, L, D]; the model runs once where ids are a prefix."""
    layers = tuple(sorted({layer for member in family for layer in member.sample.layer_ids}))
    ran: list[tuple[list[int], torch.Tensor]] = []
    for member in sorted(family, key=lambda member: -member.sample.shape[0]):
        ids = member.sample.token_ids.tolist()
        states = next((states for longer, states in ran if longer[: len(ids)] == ids), None)
        if states is None:
            states = reference.states(member.sample.token_ids, layers)
            ran.append((ids, states))
        index = [layers.index(layer) for layer in member.sample.layer_ids]
        yield member, states[: len(ids), index]


def _check_pair(
    report: Report, one: tuple[_Member, torch.Tensor], two: tuple[_Member, torch.Tensor]
) -> None:
    """Two samples agree as far as their tokens do; generated ones may differ in a near-tie."""
    (first, a), (second, b) = one, two
    if (first.sample.layer_ids, first.sample.dtype) != (
        second.sample.layer_ids,
        second.sample.dtype,
    ):
        return
    length = min(len(a), len(b))
    same = first.sample.token_ids[:length] == second.sample.token_ids[:length]
    common = length if bool(same.all()) else int(same.int().argmin())
    if common == 0:
        return
    bounds = BOUNDS[first.sample.dtype].halved()
    verdict = compare(b[:common], a[:common], first.sample.layer_ids, bounds)
    name = f"{first.name} and {second.name}"
    report.check(_PAIRS, name, verdict.faults)
    for noise in verdict.noise:
        report.measure(first.sample.dtype, "between two sends", noise)


def _check_next_token(
    report: Report, reference: Reference, member: _Member, states: torch.Tensor
) -> None:
    """Final norm and head over the last layer's rows give the tokens that the server chose."""
    sample, send = member.sample, member.send
    if send is None or send.temperature != 0 or not send.token_ids:
        return
    if sample.layer_ids[-1] != reference.layers:
        return
    first = len(send.prompt_token_ids) - 1
    rows = states[first : first + len(send.token_ids), -1]
    if len(rows) == 0:
        return
    gap = reference.next_token_gap(rows, send.token_ids[: len(rows)])
    bound = _NEXT_TOKEN_BOUNDS[sample.dtype]
    over = (gap > bound).nonzero().flatten().tolist()
    faults = [
        f"the token after row {first + row} is {send.token_ids[row]}, and the last layer makes "
        f"another one {float(gap[row]):.2g} nats likelier (bound {bound})"
        for row in over
    ]
    report.check(_NEXT, member.name, faults, worst=float(gap.max()), unit="nats")
