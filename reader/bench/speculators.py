# SPDX-License-Identifier: Apache-2.0
"""`python -m reader.bench.speculators --out DIR`: speculators' own `train` (EAGLE-3), online, with
`--hidden-states-backend shm` and with `file`, on one GPU with two real vLLM servers.

    equal   the same seed and order, one request at a time, so that vLLM's sums are the same; then
            the losses of both backends, step by step, and of one backend twice
    speed   several workers and longer batches: steps/s, how long the trainer waits for data, and
            how long the GPU is idle

Nothing is compiled: torch 2.11 cannot compile speculators 0.9's fused loss.

Each figure goes to DIR/figures.jsonl at once; the logs of servers and trainers lie beside it. The
table comes last. `--device cpu --shape tiny --server-python PYTHON` rehearses all of it.
"""

import argparse
import contextlib
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reader.bench.crew import Run
from reader.bench.engine import kill_group, start_group
from reader.bench.report import Record, read
from reader.bench.server import GROUP, Server
from reader.bench.verifier import LAYERS, MASK_ID, SHAPES, write_data, write_verifier
from reader.loopback import NO_PROXY

BACKENDS = ("shm", "file")


@dataclass(frozen=True)
class Course:
    """How one training goes.

    Attributes:
        tokens: of a batch; rows have from a twentieth to an eighth of it if there are several
            workers, a third to a half otherwise.
        warm: steps that are not counted, for which the workers had all ready.
    """

    name: str
    steps: int
    warm: int
    tokens: int
    workers: int

    @property
    def row(self) -> tuple[int, int]:
        """The least and the most tokens of a row."""
        parts = (20, 8) if self.workers > 1 else (3, 2)
        return self.tokens // parts[0], self.tokens // parts[1]


def courses(options: argparse.Namespace) -> dict[str, Course]:
    """The two courses."""
    if options.device == "cpu":
        return {
            "equal": Course("equal", 6, 1, 128, 1),
            "speed": Course("speed", 8, 2, 512, 2),
        }
    return {
        "equal": Course("equal", 110, 10, 2048, 1),
        "speed": Course("speed", options.steps, options.warm, 4096, options.workers),
    }


class Busy:
    """NVML's share of time in which the GPU ran a kernel, of the trainer or of a server."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Busy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def _watch(self) -> None:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        while not self._stop.wait(0.1):
            self._seen.append((time.time(), pynvml.nvmlDeviceGetUtilizationRates(card).gpu))

    def idle(self, begin: float, end: float) -> float | None:
        """The idle share between two times of day, or None if it was not watched."""
        kept = [percent for at, percent in self._seen if begin <= at <= end]
        return 1 - statistics.fmean(kept) / 100 if kept else None


class Training:
    """One run of speculators' `train` against a server."""

    def __init__(
        self,
        run: Run,
        options: argparse.Namespace,
        course: Course,
        server: Server,
        model: Path,
        data: Path,
        number: int,
    ) -> None:
        self.run, self.course, self.server, self.number = run, course, server, number
        name = f"{course.name}-{server.backend}-{number}"
        self._steps = run.out / f"steps-{name}.jsonl"
        self._saved = run.work / name
        command = [sys.executable, "-m", "reader.bench.speculators_train", str(self._steps)]
        command += [options.device, "train", "--verifier-name-or-path", str(model)]
        command += ["--speculator-type", "eagle3", "--data-path", str(data)]
        command += ["--target-layer-ids", *map(str, LAYERS[:-1]), "--mask-token-id", str(MASK_ID)]
        command += ["--vllm-endpoint", f"http://127.0.0.1:{server.port}/v1"]
        command += ["--hidden-states-backend", server.backend]
        if server.backend == "shm":
            command += ["--shm-ring", server.ring, "--shm-group", GROUP]
        command += ["--total-seq-len", str(course.tokens), "--num-workers", str(course.workers)]
        command += ["--prefetch-factor", "2", "--train-data-ratio", "0.98"]
        command += ["--epochs", "1", "--max-steps", str(course.steps), "--seed", "7"]
        command += ["--save-path", str(self._saved), "--log-dir", str(self._saved / "logs")]
        command += ["--no-resume-from-checkpoint", "--deterministic-cuda"]
        command += ["--draft-attn-impl", "eager", "--loss-implementation", "eager"]
        if options.device == "cpu":
            command += ["--hidden-states-dtype", "float32"]
        environment = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", **NO_PROXY}
        # Kernels that are chosen by their speed differ from one process to the next.
        environment |= {"TORCHDYNAMO_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        self._began = time.monotonic()
        with open(run.out / f"train-{name}.log", "w") as log:
            self.process = start_group(command, log, environment)

    def finish(self, limit_s: float, busy: Busy | None = None) -> None:
        """Waits for its end and writes its figures down, also those of a run that was cut.

        Raises:
            RuntimeError: it failed or took too long.
        """
        try:
            self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            kill_group(self.process)
        shutil.rmtree(self._saved, ignore_errors=True)
        lines = read([self._steps]) if self._steps.exists() else []
        steps = [one for one in lines if "train" in one]
        record: Record = {
            "backend": self.server.backend,
            "course": self.course.name,
            "number": self.number,
            "code": self.process.returncode,
            "steps": len(steps),
            "wall_s": time.monotonic() - self._began,
            "losses": [one["train"]["loss"] for one in steps],
            "errors": sum(one["train"].get("error_records", 0) for one in steps),
            **self.server.state(),
        }
        counted = steps[self.course.warm :]
        if len(counted) > 1:
            begin, end = counted[0]["at"], counted[-1]["at"]
            profiles = [one["profile"] for one in counted[1:]]
            whole = sum(one["step_ms"] for one in profiles)
            record |= {
                "counted": len(profiles),
                "steps_s": len(profiles) / (end - begin),
                "tokens_s": sum(one["tokens_per_s"] * one["step_ms"] / 1e3 for one in profiles)
                / (end - begin),
                "step_ms": statistics.median(one["step_ms"] for one in profiles),
                "waits": sum(one["queue_ms"] for one in profiles) / whole,
                "moves": sum(one["h2d_ms"] for one in profiles) / whole,
                "gpu_idle": busy.idle(begin, end) if busy else None,
            }
        self.run.note("training", **record)
        if self.process.returncode or len(steps) < self.course.steps:
            raise RuntimeError(
                f"training {self.course.name} with {self.server.backend}: {len(steps)} of "
                f"{self.course.steps} steps, exit code {self.process.returncode}: see its log"
            )

    def kill(self) -> None:
        """Ends it if it runs."""
        kill_group(self.process)


class Bench:
    """Both servers, and the trainings in turn."""

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self.run, self.options = run, options
        self.courses = courses(options)
        self.servers: dict[str, Server] = {}
        self.number = 0

    @contextlib.contextmanager
    def up(self) -> Iterator[None]:
        """Writes the model and the data, and has both servers up."""
        began = time.monotonic()
        self.model = write_verifier(self.run.work, self.options.shape, self.options.device)
        try:
            for backend in BACKENDS:
                self.servers[backend] = Server(self.run, self.options, backend, self.model)
            self.data = {
                name: write_data(self.run.work, self.options.shape, self._rows(course), course.row)
                for name, course in self.courses.items()
            }
            for server in self.servers.values():
                server.wait()
            self.run.note("up", seconds=time.monotonic() - began, shape=self.options.shape)
            yield
        finally:
            for server in self.servers.values():
                server.stop()

    def _rows(self, course: Course) -> int:
        # One epoch holds all steps, and what is read ahead; 2 % are for the validation.
        ahead = 2 * course.workers + 5
        return int((course.steps + ahead) * course.tokens / (sum(course.row) / 2) / 0.98) + 50

    def train(self, name: str, backends: tuple[str, ...], limit_s: float) -> None:
        """Trainings on these backends at once; all are ended, and the first failure is raised."""
        self.number += 1
        started: list[Training] = []
        self.run.part = name
        with Busy() if self.options.device == "cuda" else contextlib.nullcontext() as busy:
            try:
                for backend in backends:
                    place = (self.model, self.data[name], self.number)
                    server = self.servers[backend]
                    started.append(
                        Training(self.run, self.options, self.courses[name], server, *place)
                    )
                deadline = time.monotonic() + limit_s
                for training in started:
                    training.finish(max(1.0, deadline - time.monotonic()), busy)
            finally:
                for training in started:
                    training.kill()

    def all(self) -> int:
        """Everything, until the time is over; returns 1 if something failed."""
        failed = 0
        # Speed alone on the card; equality with both at once, for the time of the lease.
        turns = [("equal", BACKENDS), ("speed", ("shm",)), ("speed", ("file",))]
        turns += [("equal", BACKENDS), ("speed", ("file",)), ("speed", ("shm",))]
        turns = [turn for turn in turns if turn[0] in self.options.only]
        for index, (name, backends) in enumerate(turns):
            if index >= len(turns) // 2 and self.run.left() < self.options.turn_s:
                self.run.note("cut", turns=index)
                break
            try:
                self.train(name, backends, self.options.train_limit_s)
            except RuntimeError as error:
                failed = 1
                self.run.note("failed", error=str(error))
        return failed


def lines(records: list[Record]) -> list[str]:
    """The table."""
    table = [f"!! {one['part']}: {one['error']}" for one in records if one["what"] == "failed"]
    runs = [one for one in records if one["what"] == "training" and one["steps"]]
    equal = {
        backend: [one["losses"] for one in runs if _is(one, "equal", backend)]
        for backend in BACKENDS
    }
    for first, second in (("shm", "file"), ("shm", "shm"), ("file", "file")):
        pair = [*equal[first][:1], *equal[second][first == second :][:1]]
        if len(pair) == 2:
            table.append(_compare(f"{first} and {second}, same seed and order", *pair))
    timed = [one for one in runs if "steps_s" in one]
    for backend in BACKENDS:
        for one in (one for one in timed if _is(one, "speed", backend)):
            idle = "not read" if one["gpu_idle"] is None else f"{100 * one['gpu_idle']:.1f} %"
            table.append(
                f"{backend:<5} {one['steps_s']:>7.2f} steps/s  {one['tokens_s']:>9,.0f} tokens/s  "
                f"trainer waits for data {100 * one['waits']:>5.1f} %  GPU idle {idle:>8}  "
                f"({one['counted']} steps, {one['errors']:.0f} errors)"
            )
    for name in ("speed", "equal"):
        speed = {
            backend: [one["steps_s"] for one in timed if _is(one, name, backend)]
            for backend in BACKENDS
        }
        if all(speed.values()):
            shm, file = (statistics.median(speed[backend]) for backend in BACKENDS)
            note = "" if name == "speed" else ", one worker, both at once"
            table.append(f"steps/s, shm / file{note}: {shm:.2f} / {file:.2f} = {shm / file:.2f} x")
    return table


def _is(one: Record, course: str, backend: str) -> bool:
    return bool(one["course"] == course and one["backend"] == backend)


def _compare(title: str, one: list[float], other: list[float]) -> str:
    both = list(zip(one, other, strict=False))
    differ = [index for index, (left, right) in enumerate(both) if left != right]
    far = max(abs(left - right) for left, right in both)
    text = f"losses of {title}: {len(both) - len(differ)} of {len(both)} equal bit for bit"
    ends = f"{both[0][0]:.4f} to {both[-1][0]:.4f}"
    first = f", first at step {differ[0]}, at most {far:.2g} apart" if differ else ""
    return f"{text}{first}; {ends}"


def main() -> int:
    """Measures; the exit code is 1 if a training failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for figures.jsonl and the logs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--only", default="equal,speed", help="courses, with commas between")
    parser.add_argument("--steps", type=int, default=200, help="of the course for speed")
    parser.add_argument("--warm", type=int, default=60, help="of them, not counted")
    parser.add_argument("--workers", type=int, default=8, help="DataLoader workers, for speed")
    parser.add_argument("--ring-size", default="4GiB")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs in vLLM: starts later")
    parser.add_argument("--server-python", default=sys.executable, help="the one with vLLM")
    parser.add_argument("--limit-s", type=float, default=290.0, help="begin no repeat after that")
    parser.add_argument("--turn-s", type=float, default=60.0, help="what one repeat needs")
    parser.add_argument("--train-limit-s", type=float, default=150.0, help="of one training")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(courses(options)):
        parser.error(f"no course {', '.join(sorted(unknown))!r}: there are equal and speed")
    options.tiny, options.repeats = options.shape == "tiny", 1
    run = Run(options)
    bench = Bench(run, options)
    # A run that is cut short still ends its servers and prints its table.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    failed = 1
    try:
        with bench.up():
            failed = bench.all()
    except Exception as error:
        run.note("failed", error=f"{type(error).__name__}: {error}"[-2000:])
        traceback.print_exc()
    finally:
        shutil.rmtree(run.work, ignore_errors=True)
        table = lines(read([run.figures]))
        (run.out / "table.txt").write_text("\n".join(table) + "\n")
        print("\n".join(table))
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
