# SPDX-License-Identifier: Apache-2.0
"""A vLLM server of `python -m reader.bench.speculators`, as a person starts one."""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from reader.bench.crew import Run
from reader.bench.engine import kill_group, start_group
from reader.bench.verifier import LAYERS
from reader.loopback import ask
from shmconn.directory import groups, remove_group, remove_rings, rings
from shmconn.errors import RingMissing

START_S = 240.0
GROUP = "speculators"


class Server:
    """A vLLM server that fills a ring, or writes files to /dev/shm."""

    def __init__(self, run: Run, options: argparse.Namespace, backend: str, model: Path) -> None:
        self.backend = backend
        self.ring = f"bench-{secrets.token_hex(4)}"
        self.folder = Path(tempfile.mkdtemp(prefix="bench-", dir="/dev/shm"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        cpu = options.device == "cpu"
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CACHE_ROOT": str(run.work / f"vllm-{backend}"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        command = [options.server_python, *self._command(options, str(model))]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16"]
        command += ["--no-enable-prefix-caching", "--shutdown-timeout", "20"]
        if not options.graphs:
            command += ["--enforce-eager"]
        if cpu:
            command += ["--max-model-len", "512", "--max-num-seqs", "8"]
        else:
            # Both servers and the trainer share the card.
            command += ["--max-model-len", "4096", "--max-num-seqs", "64"]
            command += ["--max-num-batched-tokens", "8192", "--attention-backend", "FLASH_ATTN"]
            command += ["--gpu-memory-utilization", "0.1"]
            command += ["--kv-cache-memory-bytes", str(8 << 30)]
        with open(run.out / f"server-{backend}.log", "w") as log:
            self.process = start_group(command, log, environment)

    def _command(self, options: argparse.Namespace, model: str) -> list[str]:
        layers = ",".join(map(str, LAYERS))
        if self.backend == "shm":
            groups_ = json.dumps([{"name": GROUP, "by_handle": True}])
            call = "from reader.cli import main; main()"
            serve = ["-c", call, "serve", model, "--layers", layers, "--ring", self.ring]
            serve += ["--ring-size", options.ring_size, "--set", f"groups={groups_}"]
            return [*serve, "--"]
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
        }
        transfer = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
        }
        if options.device == "cpu":
            transfer |= {
                "kv_connector": "StockOnHost",
                "kv_connector_module_path": "reader.bench.stock",
            }
        serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
        serve += ["--speculative-config", json.dumps(speculative)]
        return [*serve, "--kv-transfer-config", json.dumps(transfer)]

    def wait(self) -> None:
        """Until it answers.

        Raises:
            RuntimeError: it ended, or does not in time.
        """
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                ask(f"http://127.0.0.1:{self.port}/health", 10)
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server for {self.backend} did not start: see its log")
            time.sleep(0.5)

    def state(self) -> dict[str, Any]:
        """What is left with it: of the ring, or files."""
        if self.backend == "file":
            return {"files": len(os.listdir(self.folder))}
        (info,) = rings(self.ring)
        lost = {why: count for why, count in info.lost_by_reason.items() if count}
        return {"accepted": info.accepted, "settled": info.settled, "lost": lost}

    def stop(self) -> None:
        """Ends it and removes what it left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(25)
        kill_group(self.process)
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(RingMissing):
            for group in groups(self.ring):
                if group.name and not group.alive:
                    remove_group(self.ring, group.name)
            remove_rings(self.ring, force=True)
