# SPDX-License-Identifier: Apache-2.0
"""speculators 0.9 with the backend ``shm``: its own flags, dataset, checks, collation and loader.

speculators asks for another torch than vLLM for the CPU brings, so it lives in an environment of
its own: `.ci/speculators.sh` makes it and runs this file there; the server runs in .venv.
"""

import argparse
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("speculators", reason="speculators is not installed: run .ci/speculators.sh")

from hs_connectors import HiddenStatesBackend
from safetensors.torch import save_file
from speculators.data_generation.offline import check_hidden_states
from trainer_tools import group_names, ids, put, states, until

import shmconn
from shmconn import FileCorrupt, NotReady, OptionError, Producer, SampleGone, SampleLost
from shmconn.checksum import KEY, checksum
from shmconn.directory import groups, rings
from shmconn.integrations.speculators_backend import ShmBackend, ShmTransfer

GROUP = {"name": "speculators", "by_handle": True}


def reply(handle: Any) -> dict[str, Any]:
    """What stands in a reply of vLLM."""
    return {"handle": str(handle), "ring": handle.ring, "request_id": "x", "layer_ids": [2, 18, 30]}


def run(*words: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "shmconn.integrations.speculators", *words]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )


@pytest.fixture
def transfer(make: Callable[..., Producer], tmp_path: Path) -> Any:
    """A transfer for this test's ring; it leaves its group at the end."""
    made = ShmTransfer(tmp_path, timeout_s=30)
    yield made
    if made._subscription is not None:
        made._subscription.close()


# --- flags --------------------------------------------------------------------------------------


def test_the_runner_makes_the_flags_known_to_train() -> None:
    done = run(
        *("train", "--hidden-states-backend", "shm", "--shm-ring", "qwen", "--shm-timeout", "7"),
        *("--verifier-name-or-path", "x", "--data-path", "/tmp/x", "--dump-config"),
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"hidden_states_backend: shm$", done.stdout, re.M)
    assert re.search(r"shm_ring: qwen$", done.stdout, re.M)
    assert re.search(r"shm_timeout: 7\.0$", done.stdout, re.M)


def test_the_runner_serves_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    words = ["-m", "shmconn.integrations.speculators", "train", "--hidden-states-backend", "shm"]
    options = ["--verifier-name-or-path", "x", "--data-path", "/tmp/x", "--dump-config"]
    done = subprocess.run([*command, *words, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "hidden_states_backend: shm" in done.stdout


def test_the_runner_launches_a_script_that_knows_the_backend(tmp_path: Path) -> None:
    script = tmp_path / "launch_vllm.py"
    script.write_text(
        "import sys\nfrom hs_connectors import HiddenStatesBackend\n"
        "print(sorted(HiddenStatesBackend.registry), sys.argv[1:])\n"
    )
    done = run("launch", str(script), "MODEL")
    assert "['file', 'fp8', 'mooncake', 'shm'] ['MODEL']" in done.stdout
    done = run("launch", "nowhere.py")
    assert done.returncode == 2
    assert "there is no file 'nowhere.py'" in done.stderr
    assert "Traceback" not in done.stderr


def test_flags_come_before_the_environment_and_that_before_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parser = argparse.ArgumentParser()
    for backend in HiddenStatesBackend.registry.values():
        backend.add_train_args(parser)
    made = ShmBackend.from_train_args(parser.parse_args([]), "data")
    assert (made.ring, made.group, made.timeout_s) == (None, "speculators", 60)
    assert made.hidden_states_path == Path("data/hidden_states")
    for name, value in (("RING", "from-env"), ("GROUP", "env"), ("TIMEOUT", "5")):
        monkeypatch.setenv(f"SHMCONN_{name}", value)
    args = parser.parse_args(["--shm-group", "flag", "--hidden-states-path", "elsewhere"])
    made = ShmBackend.from_train_args(args, "data")
    assert (made.ring, made.group, made.timeout_s) == ("from-env", "flag", 5)
    assert made.hidden_states_path == Path("elsewhere")
    # As when speculators was imported first and never saw our flags.
    assert ShmBackend.from_train_args(argparse.Namespace(), "data").ring == "from-env"


def test_launch_flags_make_a_configuration_that_the_connector_takes() -> None:
    parser = argparse.ArgumentParser()
    ShmBackend.add_launch_args(parser)
    args = parser.parse_args(["--shm-ring", "qwen", "--shm-ring-size", "2GiB"])
    assert ShmBackend.build_kv_transfer_config(args) == {
        "kv_connector": "ShmHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_module_path": "shmconn.connector",
        "kv_connector_extra_config": {
            "ring": "qwen",
            "ring_size": "2GiB",
            "groups": [GROUP],
        },
    }


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("shm_ring", "a b", "ring name 'a b'"),
        ("shm_group", "", "group name ''"),
        ("shm_timeout", -1.0, "shm-timeout -1.0 must be more than 0"),
    ],
)
def test_a_wrong_train_flag_is_named(option: str, value: Any, text: str) -> None:
    if value == "":
        with pytest.raises(OptionError, match=text):
            ShmTransfer(Path("x"), group=value)
        return
    with pytest.raises(OptionError, match=re.escape(text)):
        ShmBackend.from_train_args(argparse.Namespace(**{option: value}), "data")


def test_wrong_launch_flags_and_environments_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="ring_size 'big'"):
        ShmBackend.build_kv_transfer_config(argparse.Namespace(shm_ring_size="big"))
    monkeypatch.setenv("SHMCONN_TIMEOUT", "soon")
    with pytest.raises(OptionError, match="SHMCONN_TIMEOUT 'soon': is no number of seconds"):
        ShmBackend.from_train_args(argparse.Namespace(), "data")


# --- samples ------------------------------------------------------------------------------------


def test_a_sample_passes_speculators_checks_and_outlives_delete(
    make: Callable[..., Producer], transfer: ShmTransfer
) -> None:
    producer = make(groups=[GROUP])
    handle = put(producer, 1)
    data = transfer.get_generated(reply(handle))
    check_hidden_states(data, ids(1))
    transfer.delete(str(handle))
    transfer.delete(str(handle))
    # Used after delete, as speculators does; the ring may not touch it before it is dropped.
    assert producer.reclaim() == 0
    part = data["hidden_states"][:, -1]
    del data
    assert producer.reclaim() == 0
    for number in range(2, 40):
        put(producer, number)
        transfer.delete(
            str(shmconn.Handle.make(producer.name, producer.generation, number, f"r{number}"))
        )
    assert torch.equal(part, states(1)[:, -1])
    del part
    assert producer.reclaim() > 0


def test_views_take_a_share_of_the_ring_and_the_rest_are_copies(
    make: Callable[..., Producer], transfer: ShmTransfer
) -> None:
    producer = make(size="1MiB", page_size="64KiB", groups=[GROUP])
    held = []
    for number in range(200):
        handle = put(producer, number, 64)
        held.append(transfer.get_generated(reply(handle)))
        transfer.delete(str(handle))
    producer.reclaim()
    views = transfer._subscription.leases  # type: ignore[union-attr]
    assert 0 < views <= producer.shape.slots // 2
    for number, data in enumerate(held):
        assert torch.equal(data["hidden_states"], states(number, 64))
        assert data["token_ids"].tolist() == ids(number, 64)
    held.clear()


def test_while_vllm_holds_requests_there_are_no_views(
    make: Callable[..., Producer], transfer: ShmTransfer
) -> None:
    producer = make(groups=[GROUP])
    first = transfer.get_generated(reply(put(producer, 1)))
    assert transfer._subscription.leases == 1  # type: ignore[union-attr]
    producer.set_held_since(1)
    second = transfer.get_generated(reply(put(producer, 2)))
    assert transfer._subscription.leases == 1  # type: ignore[union-attr]
    assert torch.equal(second["hidden_states"], states(2))
    del first, second


def test_delete_of_a_sample_that_was_not_read_frees_it_also_when_it_comes_later(
    make: Callable[..., Producer], transfer: ShmTransfer
) -> None:
    producer = make(groups=[GROUP])
    early = put(producer, 1)
    transfer.delete(str(early))
    assert producer.reclaim() == 1
    late = shmconn.Handle.make(producer.name, producer.generation, 2, "r2")
    transfer.delete(str(late))
    put(producer, 2)
    third = put(producer, 3)
    data = transfer.get_generated(reply(third))
    assert producer.reclaim() == 1
    assert torch.equal(data["hidden_states"], states(3))
    transfer.delete("not-one-of-ours")


def test_errors_say_what_is_wrong(make: Callable[..., Producer], tmp_path: Path) -> None:
    producer = make(groups=[GROUP])
    transfer = ShmTransfer(tmp_path, ring=producer.name, timeout_s=0.05)
    transfer.setup()
    transfer.setup()
    handle = put(producer, 1)
    with pytest.raises(OptionError, match="names a file, '/x', not a handle: .*backend file"):
        transfer.get_generated({"hidden_states_path": "/x"})
    other = ShmTransfer(tmp_path, ring="other")
    with pytest.raises(OptionError, match="--shm-ring is 'other': is --vllm-endpoint"):
        other.get_generated(reply(handle))
    with pytest.raises(shmconn.RingMissing, match="no ring 'other'.*started before the training"):
        other.setup()
    with pytest.raises(NotReady, match=r"within 0\.05 s, vLLM has not published"):
        transfer.get_generated(reply(handle._replace(number=2)))
    producer.accept(2)
    producer.bury(2, "r2", "oversized")
    with pytest.raises(SampleLost, match="oversized"):
        transfer.get_generated(
            reply(shmconn.Handle.make(producer.name, producer.generation, 2, "r2"))
        )
    transfer.get_generated(reply(handle))
    with pytest.raises(SampleGone, match="already delivered"):
        transfer.get_generated(reply(handle))
    transfer._subscription.close()  # type: ignore[union-attr]


def test_files_that_a_drain_wrote_are_served_without_a_ring(tmp_path: Path) -> None:
    tensors = {"hidden_states": states(5), "token_ids": torch.tensor(ids(5))}
    save_file(tensors, tmp_path / "hs_5.safetensors")
    transfer = pickle.loads(pickle.dumps(ShmTransfer(tmp_path)))
    cached = transfer.get_cached(5)
    assert cached is not None
    check_hidden_states(cached, ids(5))
    assert transfer.get_cached(6) is None
    assert transfer._subscription is None


def test_a_drain_s_file_of_another_row_or_with_other_bytes_is_refused(tmp_path: Path) -> None:
    for row in (5, 6):
        tensors = {"hidden_states": states(row), "token_ids": torch.tensor(ids(row))}
        texts = {"tag": f"hs_{row}"}
        parts = (tensors["token_ids"].numpy(), tensors["hidden_states"].numpy())
        texts[KEY] = checksum(texts, *parts)
        save_file(tensors, tmp_path / f"hs_{row}.safetensors", texts)
    transfer = ShmTransfer(tmp_path)
    assert torch.equal(transfer.get_cached(6)["hidden_states"], states(6))
    path = tmp_path / "hs_5.safetensors"
    data = path.read_bytes()
    for damaged in (data[:-100] + bytes(100), data[:-100], data + b"?"):
        path.write_bytes(damaged)
        with pytest.raises(FileCorrupt, match="hs_5.safetensors is damaged"):
            transfer.get_cached(5)
    (tmp_path / "hs_6.safetensors").rename(path)
    with pytest.raises(FileCorrupt, match="tag is 'hs_6': it is another row's"):
        transfer.get_cached(5)


def test_a_transfer_is_pickled_without_its_membership(
    make: Callable[..., Producer], transfer: ShmTransfer
) -> None:
    producer = make(groups=[GROUP])
    transfer.get_generated(reply(put(producer, 1)))
    copy = pickle.loads(pickle.dumps(transfer))
    assert copy._subscription is None
    data = copy.get_generated(reply(put(producer, 2)))
    assert torch.equal(data["hidden_states"], states(2))
    assert sum(member.alive for group in groups(producer.name) for member in group.members) == 2
    copy._subscription.close()
    del data


def test_more_members_than_fit_are_an_error_that_says_what_to_lower(
    make: Callable[..., Producer], tmp_path: Path
) -> None:
    producer = make(groups=[GROUP])
    transfers = [ShmTransfer(tmp_path, ring=producer.name) for _ in range(200)]
    with pytest.raises(shmconn.RegistryFull, match="lower --num-workers"):
        for one in transfers:
            one.setup()
    for one in transfers:
        if one._subscription is not None:
            one._subscription.close()
    until(lambda: not group_names(producer.name), "all to leave")
    assert rings(producer.name)


def test_the_bench_restates_speculators_collation(tmp_path: Path) -> None:
    from speculators.train.data import CollateFn

    from reader.bench import input as bench

    items = []
    for number, tokens in enumerate((5, 16, 40, 9)):
        token_ids = torch.tensor(ids(number, tokens))
        loaded = {"hidden_states": states(number, tokens), "token_ids": token_ids}
        items.append(bench._item(loaded, torch.ones(tokens, dtype=torch.bool)))
    want = CollateFn(64, 8, 2)(items)
    got = bench.collate(items, 64)
    assert want.pop("error_records") == 0
    assert set(want) == set(got)
    for name, part in got.items():
        assert torch.equal(part, want[name]), name
