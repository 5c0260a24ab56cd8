# SPDX-License-Identifier: Apache-2.0
"""Train a draft head on hidden states as they come out of vLLM, through a ring.

    python examples/trainer/train.py RING --vocabulary IDS.json --held-out 16 --out DIR

Samples whose tag begins with `held-out` are only measured, never learnt from. It may be killed at
any time: started again with the same --out it goes on from its last checkpoint. What it learnt from
after that checkpoint comes again, because the leases of those samples are kept until a checkpoint
that counts them is on the disk.
"""

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from head import DraftHead, Lesson, Target
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shmconn.collate import Batch, Collator
from shmconn.dataset import SampleDataset
from shmconn.sample import Sample

MODEL = Path(__file__).resolve().parents[2] / ".cache" / "smollm2"
HELD_OUT = "held-out"
console = Console(highlight=False)


class Trainer:
    """Head, optimizer, what was read and what was measured: all that a checkpoint holds."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.out = Path(arguments.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.arguments = arguments
        self.target = Target.read(Path(arguments.model))
        self.draft_ids = torch.tensor(sorted(json.loads(Path(arguments.vocabulary).read_text())))
        self.head = DraftHead(self.target, self.draft_ids, layers=3)
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=arguments.lr)
        self.collator = Collator(arguments.batch, dtype="float32")
        self.dataset = SampleDataset(arguments.ring, "trainer", wait_s=arguments.wait)
        # What no checkpoint counts yet, by handle: tags, and views that keep the leases.
        self._kept: dict[str, tuple[str | None, torch.Tensor]] = {}
        self._used: list[str] = []
        self.held_out: list[Batch] = []
        self.exam: list[Lesson] = []
        self.batches: list[dict[str, Any]] = []
        self.exams: list[dict[str, float]] = []
        if self.checkpoint.exists():
            self._resume()

    @property
    def checkpoint(self) -> Path:
        """The file that a restart reads."""
        return self.out / "checkpoint.pt"

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, weights_only=True)
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.dataset.load_state_dict(state["dataset"])
        self.held_out, self.batches, self.exams = (
            state[name] for name in ("held_out", "batches", "exams")
        )
        console.print(f"resumed at batch {len(self.batches)}")

    def save(self) -> None:
        """Writes the checkpoint, whole or not at all; only then the samples' leases end."""
        making = self.checkpoint.with_suffix(".tmp")
        torch.save(
            {
                "head": self.head.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "dataset": self.dataset.state_dict(),
                "held_out": self.held_out,
                "batches": self.batches,
                "exams": self.exams,
            },
            making,
        )
        os.replace(making, self.checkpoint)
        for handle in self._used:
            self._kept.pop(handle)
        self._used.clear()
        # For whoever watches; what counts is the checkpoint.
        making.write_text(json.dumps({"batches": self.batches, "exams": self.exams}))
        os.replace(making, self.out / "figures.json")

    def run(self) -> Iterator[None]:
        """Learns from each batch of the ring, to its end; yields after each."""
        with self.dataset:
            # Recorded when they were learnt from, not when they were read.
            samples = self.dataset.unrecorded()
            self._read_held_out(samples)
            for batch in self.collator.pack(map(self._keep, samples)):
                self._learn(batch)
                if len(self.batches) % self.arguments.checkpoint_every == 0:
                    self._examine()
                    self.save()
                yield
            self._examine()
            self.save()

    def _read_held_out(self, samples: Iterator[Sample]) -> None:
        """The first samples are for the exam; a restart has them in its checkpoint."""

        def first() -> Iterator[Sample]:
            for _ in range(self.arguments.held_out):
                sample = next(samples, None)
                if sample is None:
                    raise SystemExit("the ring ended before all held-out samples had come")
                if not (sample.tag or "").startswith(HELD_OUT):
                    raise SystemExit(f"the sample of tag {sample.tag!r} came before the held-out")
                yield self._keep(sample)

        if not self.held_out:
            # torch.save takes no tensors of several dtypes over one memory, which a batch is.
            self.held_out = [
                {
                    name: part.clone() if torch.is_tensor(part) else part
                    for name, part in one.items()
                }
                for one in self.collator.pack(first())
            ]
            for one in self.held_out:
                self._record(one)
        self.exam = [Lesson.of(batch, self.target, self.draft_ids) for batch in self.held_out]
        if not self.exams:
            self._examine()
            self.save()

    def _keep(self, sample: Sample) -> Sample:
        self._kept[str(sample.handle)] = sample.tag, sample.token_ids
        return sample

    def _record(self, batch: Batch) -> None:
        self.dataset.record(batch)
        self._used += batch["handles"]

    def _learn(self, batch: Batch) -> None:
        lesson = Lesson.of(batch, self.target, self.draft_ids)
        first = 0.0
        for step in range(self.arguments.repeat):
            loss, _ = lesson.judge(self.head)
            first = first if step else loss.item()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            self.optimizer.step()
        self._record(batch)
        # The loss before the first step: of text that the head had never seen.
        tags = [self._kept[handle][0] for handle in batch["handles"]]
        self.batches.append({"loss": first, "handles": batch["handles"], "tags": tags})

    def _examine(self) -> None:
        with torch.no_grad():
            judged = [(lesson.judge(self.head), len(lesson.choice_n)) for lesson in self.exam]
        total = sum(count for _, count in judged)
        self.exams.append(
            {
                "batches": len(self.batches),
                "loss": sum(float(loss) * count for (loss, _), count in judged) / total,
                "acceptance": sum(rate * count for (_, rate), count in judged) / total,
            }
        )


def plot(exams: list[dict[str, float]], path: Path) -> bool:
    """Loss and acceptance of the held-out texts; False where there is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, left = pyplot.subplots(figsize=(7, 4))
    right = left.twinx()
    batches = [one["batches"] for one in exams]
    left.plot(batches, [one["loss"] for one in exams], color="tab:red", marker=".")
    right.plot(batches, [100 * one["acceptance"] for one in exams], color="tab:blue", marker=".")
    left.set_xlabel("batches learnt from")
    left.set_ylabel("loss", color="tab:red")
    right.set_ylabel("accepted, %", color="tab:blue")
    left.set_title("Held-out texts, while a draft head is trained online out of a ring")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
    return True


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("ring")
    parser.add_argument("--model", default=str(MODEL), help="folder of the target model")
    parser.add_argument("--vocabulary", required=True, help="JSON list of the draft's token ids")
    parser.add_argument("--held-out", type=int, required=True, help="samples of the exam")
    parser.add_argument("--out", required=True, help="folder for the checkpoint and the plot")
    parser.add_argument("--samples", type=int, help="how many will come, for the bar")
    parser.add_argument("--batch", type=int, default=512, help="tokens in a batch")
    parser.add_argument("--repeat", type=int, default=2, help="steps on each batch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--wait", type=float, default=600, help="seconds to wait for the ring")
    parser.add_argument("--checkpoint-every", type=int, default=4, help="batches")
    arguments = parser.parse_args()

    trainer = Trainer(arguments)
    columns = (
        *(TextColumn("training"), BarColumn(), MofNCompleteColumn()),
        TextColumn("samples · held-out: {task.fields[exam]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=arguments.samples, exam="")

        def show() -> None:
            exam = _text(trainer.exams[-1]) if trainer.exams else ""
            progress.update(task, completed=trainer.dataset.handed_out, exam=exam)

        show()
        for _ in trainer.run():
            show()
        show()
    console.print(f"before: {_text(trainer.exams[0])}")
    console.print(f"after {len(trainer.batches)} batches: {_text(trainer.exams[-1])}")
    picture = trainer.out / "progress.png"
    if plot(trainer.exams, picture):
        console.print(f"plot: {picture}")
    else:
        console.print(f"no plot (pip install matplotlib); figures: {trainer.out / 'figures.json'}")


def _text(exam: dict[str, float]) -> str:
    return f"loss {exam['loss']:.2f}, accepted {exam['acceptance']:.1%}"


if __name__ == "__main__":
    main()
