# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.gpu.modes --out DIR`: ways of running real vLLM on a GPU, one engine each.

    base           as vLLM runs of itself: async scheduling, graphs, chunks, prefix cache, aborts
    fp8            KV cache in fp8: samples keep the model's dtype
    preemption     a cache so small that requests lose their blocks
    mamba          Mamba-2 layers and attention (Nemotron-H)
    mla            latent attention (DeepSeek-V2)
    lora, prompt_embeds, pooling, sleep, plain
    apart          an engine in a process of its own, ours the only child of a MultiConnector
    offloading     beside vLLM's own offloading of KV blocks, in a MultiConnector
    runner_v2      the second model runner, or vLLM's words that refuse it
    eager          base without graphs
    tp2            two tensor-parallel ranks, if there are two devices

Each mode gives N requests and must get N samples, bit for bit those of a second copy that the
worker takes of the same blocks, all KV blocks free afterwards, and counts that add up. Random
weights, nothing from the network. One line a mode goes to DIR/modes.jsonl as it ends, its log to
DIR/MODE.log; the exit code is 1 if one failed. `--device cpu` rehearses with small models.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

VLLM_TESTS = Path(__file__).parents[1] / "vllm"
sys.path.append(str(VLLM_TESTS))

import torch  # noqa: E402
from offline import set_up  # noqa: E402
from rings import remove_ring  # noqa: E402

from .engines import MODES, REFUSALS  # noqa: E402

SAID = ("ENGINE", "GROUPS", "SAMPLES", "TRANSFORMERS", "PREEMPTIONS", "RUNNER", "REFUSED")
TAIL = 25


class Running:
    """One mode in a process group of its own, with a folder and a log."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        self.out = Path(options.out)
        self._folder = tempfile.TemporaryDirectory(prefix=f"{name}-")
        self._log = self.out / f"{name}.log"
        environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}
        # The connector with the second copy is loaded by its module's name.
        environment["PYTHONPATH"] = f"{VLLM_TESTS}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        if name == "runner_v2":
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        if options.device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "tests.gpu.modes", "--one", name]
        command += ["--count", str(options.count), "--out", self._folder.name]
        self._began = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._began

    @property
    def ended(self) -> bool:
        """By itself."""
        return self._process.poll() is not None

    def end(self, why: str = "") -> dict[str, Any]:
        """Ends it, if it has not ended; what became of it.

        Args:
            why: it is ended.
        """
        seconds = round(self.seconds)
        # Of a mode that ended by itself, what its engine may have left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._folder.cleanup()
        lines = self._log.read_text(errors="replace").splitlines()
        for line in lines:
            if line.startswith("RING "):
                remove_ring(line.split()[1])
        refused = [one for one in lines if any(word in one for word in REFUSALS.get(self.name, ()))]
        state = (
            "passed" if code == 0 and not why else "refused" if refused and not why else "failed"
        )
        said = [one for one in lines if one.split(" ")[0] in SAID]
        if state != "passed":
            ends = [
                line for line in lines if re.search(r"^(\[rank0\]: +)?\w*(Error|Exception)\b", line)
            ]
            said += [why] if why else (refused or ends)[-1:]
        if state == "failed":
            print(f"--- the end of {self._log}:", *lines[-TAIL:], "---", sep="\n")
        return {"mode": self.name, "state": state, "seconds": seconds, "said": said}


def run_all(chosen: list[str], options: argparse.Namespace) -> bool:
    """Runs these modes, so many at once; whether none failed."""
    deadline = time.monotonic() + options.limit_s
    waiting, running, failed = list(chosen), list[Running](), False
    with open(Path(options.out) / "modes.jsonl", "a") as file:

        def note(record: dict[str, Any]) -> None:
            nonlocal failed
            failed |= record["state"] == "failed"
            file.write(json.dumps(record) + "\n")
            file.flush()
            said = (f"    {line}"[:300] for line in record["said"])
            head = f"{record['mode']:14} {record['state']:8} {record['seconds']:4} s"
            print(head, *said, sep="\n", flush=True)

        try:
            while waiting or running:
                late = time.monotonic() > deadline
                while waiting and len(running) < options.at_once and not late:
                    running.append(Running(waiting.pop(0), options))
                for one in list(running):
                    why = "the limit for all was reached" if late else ""
                    if one.seconds > options.timeout_s:
                        why = f"it took more than {options.timeout_s:g} s"
                    if one.ended or why:
                        running.remove(one)
                        note(one.end("" if one.ended else why))
                if late and waiting:
                    said = ["not started: the limit for all was reached"]
                    note({"mode": waiting.pop(0), "state": "failed", "seconds": 0, "said": said})
                time.sleep(0.2)
        finally:
            for one in running:
                one.end("interrupted")
    return not failed


def main() -> int:
    """Runs the modes; the exit code is 1 if one failed."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for modes.jsonl and logs")
    parser.add_argument("--only", default="", help="modes, with commas between; all if left out")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--count", type=int, default=64, help="requests of one round")
    parser.add_argument("--at-once", type=int, default=1, help="modes that run at once (1)")
    parser.add_argument("--timeout-s", type=float, default=240.0, help="for one mode (240)")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for all of them (3600)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        set_up(Path(options.out))
        MODES[options.one](Path(options.out), options.count)
        print("DONE", options.one)
        return 0
    Path(options.out).mkdir(parents=True, exist_ok=True)
    chosen = options.only.split(",") if options.only else list(MODES)
    if unknown := set(chosen) - set(MODES):
        parser.error(f"no mode {', '.join(sorted(unknown))}; there are {', '.join(MODES)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu rehearses without one")
    if not options.only:
        missing = {"fp8", "mamba", "tp2"} if options.device == "cpu" else {"tp2"}
        if torch.cuda.device_count() > 1:
            missing.discard("tp2")
        chosen = [name for name in chosen if name not in missing]
    return int(not run_all(chosen, options))


if __name__ == "__main__":
    raise SystemExit(main())
