# SPDX-License-Identifier: Apache-2.0
"""speculators' real dataset, collation and loader (spawned workers) against a real vLLM server.

The server is started with the configuration that the backend's launch flags make.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("speculators", reason="speculators is not installed: run .ci/speculators.sh")

from datasets import Dataset
from speculators.train.data import ArrowDataset
from speculators.train.dataloader import _setup_dataloader
from speculators.train.recovery import RECOVERY_METADATA_KEY
from torch.utils.data._utils import signal_handling
from trainer_tools import until

from shmconn.directory import groups, remove_group, remove_rings, rings
from shmconn.errors import RingMissing
from shmconn.integrations.speculators_backend import ShmBackend

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv" / "bin" / "python"
MODEL = ROOT / ".cache" / "smollm2"
LAYERS = [8, 15, 22, 30]
HIDDEN = 576
STATES = ("hidden_states", "verifier_last_hidden_states")
ROWS = 40
START_S = 300
TTL_S = 5
REQUESTS = 500
KILLS = 4
# Relative error of a row between two runs in float32; 10 times what vLLM's kernels make of batches.
NOISE = 1e-3
RNG = random.Random(7)

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning"),
]


class Server:
    """vLLM's server in .venv, as `launch_vllm.py` starts it."""

    def __init__(self, folder: Path) -> None:
        self.ring = f"t-{secrets.token_hex(6)}"
        self.log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        parser = argparse.ArgumentParser()
        ShmBackend.add_launch_args(parser)
        flags = ["--shm-ring", self.ring, "--shm-ring-size", "8MiB"]
        transfer = ShmBackend.build_kv_transfer_config(parser.parse_args(flags))
        transfer["kv_connector_extra_config"]["unclaimed_ttl_s"] = TTL_S
        speculative = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": LAYERS}},
        }
        command = [
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32"),
            *("--max-model-len", "512", "--max-num-seqs", "8", "--enforce-eager"),
            *("--no-enable-prefix-caching", "--shutdown-timeout", "20"),
            *("--speculative-config", json.dumps(speculative)),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(ROOT / ".cache" / "vllm"),
        }
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=environment
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10)
                return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-5000:]}")
            time.sleep(0.5)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(RingMissing):
            for group in groups(self.ring):
                if group.name and not group.alive:
                    remove_group(self.ring, group.name)
            remove_rings(self.ring, force=True)


@pytest.fixture(scope="module", autouse=True)
def no_interruptions() -> Iterator[None]:
    """torch raises for a dead worker out of a signal, anywhere, in pytest too; its loader notices
    by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signal_handling, "_SIGCHLD_handler_set", True)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not PYTHON.exists():
        pytest.skip("there is no .venv with vLLM: run `make venv`")
    maker = ROOT / "examples" / "demo" / "make_model.py"
    subprocess.run([str(PYTHON), str(maker), str(MODEL)], check=True, stdout=subprocess.DEVNULL)
    made = Server(tmp_path_factory.mktemp("server"))
    try:
        made.wait()
        yield made
    finally:
        made.stop()
    left = [entry for entry in os.listdir("/dev/shm") if made.ring in entry]
    assert left == []


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset as `speculators prepare-data` leaves it."""
    rng = random.Random(5)
    prompts = [
        [rng.randrange(100, 40_000) for _ in range(rng.randrange(8, 40))] for _ in range(ROWS)
    ]
    made = Dataset.from_dict(
        {
            "input_ids": prompts,
            "loss_mask": [[1] * len(prompt) for prompt in prompts],
            "seq_len": [len(prompt) for prompt in prompts],
        }
    )
    made.set_format("torch", columns=["input_ids", "loss_mask"], output_all_columns=True)
    path = tmp_path_factory.mktemp("data") / "prepared"
    made.save_to_disk(path)
    return path


def loader(server: Server, data: Path, seed: int) -> Any:
    """What `speculators train` reads with."""
    args = argparse.Namespace(shm_ring=server.ring)
    dataset = ArrowDataset(
        max_len=256,
        datapath=data,
        transfer=ShmBackend.from_train_args(args, str(data)),
        vllm_endpoint=f"http://127.0.0.1:{server.port}/v1",
        hidden_states_dtype=torch.float32,
    )
    return _setup_dataloader(
        dataset, total_seq_len=256, hidden_size=HIDDEN, num_workers=2, prefetch_factor=2, seed=seed
    )


class Checked:
    """Batches whose samples are all there and, for equal prompts, equal each time."""

    def __init__(self) -> None:
        self.samples = 0
        self._seen: dict[tuple[int, ...], torch.Tensor] = {}

    def look(self, batch: dict[str, Any]) -> None:
        assert batch["error_records"] == 0
        assert RECOVERY_METADATA_KEY not in batch
        documents = batch["document_ids"][0]
        for document in range(int(documents.max()) + 1):
            rows = documents == document
            aux, last = (batch[name][0, rows] for name in STATES)
            states = torch.cat([aux, last], 1).view(-1, len(LAYERS), HIDDEN)
            prompt = tuple(batch["input_ids"][0, rows].tolist())
            known = self._seen.setdefault(prompt, states)
            # Requests share steps with others, so sums are taken in another order.
            error = (known - states).norm(dim=-1) / known.norm(dim=-1)
            assert float(error.max()) < NOISE, (prompt, float(error.max()))
            self.samples += 1


def nothing_is_left(server: Server) -> None:
    """No sample is needed, claimed or unread, and the ring is empty."""

    def empty() -> bool:
        (info,) = rings(server.ring)
        # When all workers have left, the group is gone, and there is one without a name.
        needed = sum(sum(group.needed.values()) for group in groups(server.ring))
        leases = sum(member.leases for group in groups(server.ring) for member in group.members)
        return needed == leases == 0 and info.settled == info.accepted

    until(empty, "every sample to be read or to expire", 60)


def test_every_sample_passes_speculators_own_checks(server: Server, data: Path) -> None:
    checked = Checked()
    batches = loader(server, data, seed=1)
    for batch in batches:
        checked.look(batch)
    del batches
    assert checked.samples == ROWS
    nothing_is_left(server)
    (info,) = rings(server.ring)
    assert info.lost == 0
    assert info.published == ROWS


def endless(loading: Any) -> Iterator[dict[str, Any]]:
    """Epoch after epoch, of the same workers."""
    while True:
        yield from loading


def kill_one_worker(loading: Any, batches: Iterator[dict[str, Any]], checked: Checked) -> None:
    """Kills a worker at any moment; what it had handed over is still right."""
    victim = RNG.choice(loading._iterator._workers)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid.*(killed|exited)"):
        os.kill(victim.pid, signal.SIGKILL)
        while True:
            checked.look(next(batches))


def test_workers_killed_at_random_leak_nothing(server: Server, data: Path) -> None:
    # It takes five minutes.
    faulthandler.cancel_dump_traceback_later()
    checked = Checked()
    (before,) = rings(server.ring)
    kills = 0
    while kills < KILLS or rings(server.ring)[0].accepted - before.accepted < REQUESTS:
        loading = loader(server, data, seed=kills)
        batches = endless(loading)
        for _ in range(RNG.randrange(10, 18)):
            checked.look(next(batches))
        time.sleep(RNG.random() / 5)
        kill_one_worker(loading, batches, checked)
        kills += 1
        del batches, loading
        gc.collect()
    nothing_is_left(server)
    (info,) = rings(server.ring)
    assert info.live
    lost = {why: count for why, count in info.lost_by_reason.items() if count}
    # Requests that a killed worker had under way, and samples that it did not fetch any more.
    assert set(lost) <= {"aborted", "expired"}
    counts = f"{info.accepted - before.accepted} requests, {kills} kills, "
    print(f"{counts}{checked.samples} samples checked, lost: {lost}")


def test_workers_again_get_everything_after_all_the_kills(server: Server, data: Path) -> None:
    checked = Checked()
    (before,) = rings(server.ring)
    for batch in loader(server, data, seed=99):
        checked.look(batch)
    assert checked.samples == ROWS
    nothing_is_left(server)
    (after,) = rings(server.ring)
    assert after.lost == before.lost
