# SPDX-License-Identifier: Apache-2.0
"""A real vLLM server on the CPU, in a process group of its own."""

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
from rings import remove_ring

import shmconn
from shmconn import directory

ROOT = Path(__file__).parents[2]
# Other versions of vLLM get the model that this one's environment made.
GIVEN = os.environ.get("SHMCONN_TEST_MODEL")
MODEL = Path(GIVEN) if GIVEN else ROOT / ".cache" / "smollm2"
LAYERS = [8, 15, 22, 30]
HIDDEN = 576
BLOCK = 128
START_S = 240
WATCHDOG_S = 60


def make_model() -> Path:
    """The servable model that the demo uses; made on first use."""
    if GIVEN:
        return MODEL
    maker = ROOT / "examples" / "demo" / "make_model.py"
    subprocess.run([sys.executable, str(maker), str(MODEL)], check=True, stdout=subprocess.DEVNULL)
    return MODEL


def make_tiny_model(folder: Path) -> Path:
    """A Llama without weights whose heads two ranks can share, with SmolLM2's tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(make_model() / name, folder / name)
    config = json.loads((MODEL / "config.json").read_text()) | {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def prompt(tokens: int, seed: int) -> list[int]:
    """Token ids that look like nothing else."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(tokens)]


class Server:
    """vLLM's OpenAI server with the connector.

    Args:
        folder: for its log.
        extra: options of the connector; a ring name of its own is given if none is there.
        connector: fields of the KV transfer configuration that differ.
        flags: further flags of vLLM.
        environment: further variables.
        model: folder of the model; SmolLM2 if none is given.
        layers: that are captured.
    """

    def __init__(
        self,
        folder: Path,
        extra: dict[str, Any],
        connector: dict[str, Any] | None = None,
        flags: list[str] | None = None,
        environment: dict[str, str] | None = None,
        model: Path | None = None,
        layers: list[int] | None = None,
    ) -> None:
        self.ring = str(extra.get("ring", f"t-{secrets.token_hex(6)}"))
        self.log_path = folder / f"{self.ring}.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        transfer = {
            "kv_connector": "ShmHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"ring": self.ring, **extra},
            **(connector or {}),
        }
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": layers or LAYERS}
            },
        }
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model or make_model()), "--served-model-name", "smollm2"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
            *("--max-model-len", "1024", "--max-num-batched-tokens", "128"),
            *("--max-num-seqs", "8", "--enforce-eager", "--shutdown-timeout", "20"),
            *("--speculative-config", json.dumps(speculative)),
            *("--kv-transfer-config", json.dumps(transfer)),
            *(flags or []),
        ]
        settings = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
            "VLLM_LOG_STATS_INTERVAL": "1",
        }
        with open(self.log_path, "w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **settings, **(environment or {})},
            )
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0, timeout=120
        )

    def wait_healthy(self) -> None:
        """Waits until it serves; the end of the log goes into the error."""
        deadline = time.monotonic() + START_S
        while not self.healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log()[-6000:]}")
            time.sleep(0.5)

    def healthy(self) -> bool:
        """Whether /health answers, which asks the engine."""
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{self.port}/health"
            return bool(urllib.request.urlopen(url, timeout=10).status == 200)
        return False

    def log(self) -> str:
        """All that it has printed."""
        return self.log_path.read_text(errors="replace")

    def stop(self) -> int:
        """SIGTERM, as an operator would; its exit code."""
        left = self.vllm_segments()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(WATCHDOG_S)
        for path in left:
            # Two tensor-parallel ranks on the CPU leave some behind even so.
            path.unlink(missing_ok=True)
        return code

    def kill(self) -> None:
        """Kills whatever is left of it; what a killed vLLM leaves in /dev/shm goes, too."""
        left = self.vllm_segments()
        # Python's own trackers then see that all are gone, and unlink what those had made.
        trackers = set(self.processes("resource_tracker"))
        for pid in self.processes():
            if pid not in trackers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + WATCHDOG_S
        while self.processes():
            if time.monotonic() > deadline:
                os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(0.02)
        for path in left:
            path.unlink(missing_ok=True)

    def clear(self) -> None:
        """Ends it, kindly if it is still well, and removes the ring's rests."""
        if self.process.poll() is None and self.healthy():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.stop()
        self.kill()
        remove_ring(self.ring)

    def vllm_segments(self) -> list[Path]:
        """vLLM's own segments: those that its processes have mapped."""
        found = set()
        for pid in self.processes():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/maps").read_text()
                found |= set(re.findall(r"/dev/shm/(?:psm_\w+|vllm_dist_\S+|sem\.mp-\w+)", text))
        return [Path(path) for path in found]

    def processes(self, title: str = "") -> list[int]:
        """Its processes; those of a role by a part of their title."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(stat[2]) == self.process.pid and stat[0] != "Z":
                    command = (folder / "cmdline").read_text()
                    found += [int(folder.name)] if title in command else []
        return found

    # --- requests -------------------------------------------------------------------------------

    def complete(self, ids: Any, max_tokens: int = 1, **options: Any) -> Any:
        """One completion of token ids; its reply."""
        body: dict[str, Any] = {"return_token_ids": True}
        if "params" in options:
            body["kv_transfer_params"] = options.pop("params")
        body.update(options.pop("body", {}))
        return self.client.completions.create(
            **{
                "model": "smollm2",
                "prompt": ids,
                "max_tokens": max_tokens,
                "temperature": 0,
                "extra_body": body,
                **options,
            }
        )

    def complete_all(self, prompts: list[list[int]], **options: Any) -> list[Any]:
        """Several at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda ids: self.complete(ids, **options), prompts))

    # --- what it says of itself -----------------------------------------------------------------

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        want = [f'{key}="{value}"' for key, value in labels.items()]
        for line in text.splitlines():
            match = re.fullmatch(rf"{re.escape(name)}\{{(.*)\}} (\S+)", line)
            if match and all(label in match[1] for label in want):
                return float(match[2])
        raise LookupError(f"{name} {labels} is not on /metrics")

    def info(self) -> directory.RingInfo:
        """The ring as `shmconn stat` sees it."""
        (info,) = directory.rings(self.ring)
        return info

    def wait_settled(self, number: int | None = None) -> directory.RingInfo:
        """Waits until every request taken in was published or has a tombstone."""
        deadline = time.monotonic() + WATCHDOG_S
        while True:
            info = self.info()
            if info.settled == info.accepted and info.accepted >= (number or 0):
                return info
            if time.monotonic() > deadline:
                raise TimeoutError(f"not settled: {info}")
            time.sleep(0.02)


def params(reply: Any) -> dict[str, Any]:
    """What the reply says of its sample."""
    return dict(reply.kv_transfer_params)


def take(subscription: shmconn.Subscription, count: int) -> dict[str, shmconn.Sample]:
    """The next samples, copied out, by request id."""
    taken: dict[str, shmconn.Sample] = {}
    for _ in range(count):
        sample = subscription.next(timeout=WATCHDOG_S)
        if sample is None:
            raise TimeoutError(f"{len(taken)} of {count} samples came")
        taken[sample.request_id] = sample.clone()
        sample.release()
    return taken
