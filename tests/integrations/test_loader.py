# SPDX-License-Identifier: Apache-2.0
"""vLLM's loader over a ring, and the background drain: no vLLM needed here."""

import fcntl
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from trainer_tools import HIDDEN, LAYERS, group_names, ids, put, states, until

import shmconn
from shmconn import OptionError, Producer, SampleGone, SampleLost
from shmconn.integrations.drain import GROUP, BackgroundDrain
from shmconn.integrations.vllm import DrainFull, cleanup_hidden_states, load_hidden_states

SAMPLE = 16 * len(LAYERS) * HIDDEN * 4 + 16 * 8


def check(data: dict[str, torch.Tensor], number: int) -> None:
    assert set(data) == {"hidden_states", "token_ids"}
    assert torch.equal(data["hidden_states"], states(number))
    assert data["token_ids"].dtype == torch.int64
    assert data["token_ids"].tolist() == ids(number)


def reply(handle: Any) -> dict[str, Any]:
    return {"handle": str(handle), "ring": handle.ring, "shape": [16, len(LAYERS), HIDDEN]}


def test_a_reply_gives_vllms_dictionary_in_memory_of_its_own(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    handle = put(producer, 1)
    data = load_hidden_states(reply(handle))
    check(data, 1)
    assert producer.reclaim() == 1
    for number in range(2, 80):
        handle = put(producer, number)
        check(load_hidden_states(SimpleNamespace(kv_transfer_params=reply(handle))), number)
        cleanup_hidden_states(reply(handle))
    check(data, 1)


def test_a_cleaned_up_sample_that_nobody_loaded_leaves_the_ring(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    handle = put(producer, 1)
    cleanup_hidden_states(str(handle))
    cleanup_hidden_states(str(handle))
    assert producer.reclaim() == 1
    with pytest.raises(SampleGone, match="already delivered"):
        load_hidden_states(str(handle))


def test_files_of_vllms_own_connector_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "request.safetensors"
    lock = open(f"{path}.lock", "w")  # noqa: SIM115
    fcntl.flock(lock, fcntl.LOCK_EX)
    got: list[dict[str, torch.Tensor]] = []
    params = {"hidden_states_path": str(path)}
    reader = threading.Thread(target=lambda: got.append(load_hidden_states(params)))
    reader.start()
    tensors = {"hidden_states": states(3), "token_ids": torch.tensor(ids(3))}
    save_file(tensors, path)
    lock.close()
    reader.join()
    check(got[0], 3)
    cleanup_hidden_states(str(path), keep_hidden_states=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["request.safetensors"]
    cleanup_hidden_states(str(path))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_stays_locked_is_not_waited_for_longer_than_asked(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"hidden_states": states(1), "token_ids": torch.tensor(ids(1))}, path)
    Path(f"{path}.lock").touch()
    with open(f"{path}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(shmconn.NotReady, match=r"still locked .* after 0.05 s"):
            load_hidden_states(path, timeout=0.05)
    check(load_hidden_states(path), 1)


def test_what_is_neither_handle_nor_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no file 'nothing', and it is no handle"):
        load_hidden_states("nothing")
    with pytest.raises(OptionError, match="no kv_transfer_params: was vLLM started with Shm"):
        load_hidden_states(SimpleNamespace(kv_transfer_params=None))
    with pytest.raises(OptionError, match=r"names no handle: no sample \(short\)"):
        load_hidden_states({"error": "no sample (short)"})
    with pytest.raises(shmconn.RingMissing, match="no ring 'gone'"):
        load_hidden_states("shmconn:gone:" + "a" * 32 + ":1:" + "b" * 32)


def test_a_first_load_that_comes_too_late_says_how_to_be_in_time(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=["trainer"])
    handle = put(producer, 1)
    with pytest.raises(SampleGone, match=r'"groups": \[\{"name": "load-hidden-states"'):
        load_hidden_states(reply(handle))
    with shmconn.subscribe(producer.name, "trainer") as subscription:
        next(subscription).release()


def test_a_request_that_was_lost_for_want_of_a_reader_says_what_to_change(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    producer.accept(1)
    producer.bury(1, "r1", "no_reader")
    handle = shmconn.Handle.make(producer.name, producer.generation, 1, "r1")
    with pytest.raises(SampleLost, match=r"import LLM`, a BackgroundDrain, or a larger ring_size"):
        load_hidden_states(handle)


@pytest.mark.parametrize("where", ["memory", "folder"])
def test_a_ring_smaller_than_the_data_is_emptied_in_the_background(
    make: Callable[..., Producer], tmp_path: Path, where: str
) -> None:
    producer = make(size="1MiB", slots=4, groups=[GROUP])
    options = {"folder": tmp_path / "new" / "states"} if where == "folder" else {}
    with BackgroundDrain(producer.name, **options) as drain:  # type: ignore[arg-type]
        # All first, as LLM.generate does, and only then the reading.
        handles = [put(producer, number) for number in range(60)]
        for number, handle in enumerate(handles):
            check(load_hidden_states(reply(handle), timeout=30), number)
            check(load_hidden_states(str(handle)), number)
            if where == "folder":
                check(load_hidden_states(drain.path_of(handle)), number)
            cleanup_hidden_states(reply(handle))
        assert drain.held == 0
        drain.check()
        assert not list(tmp_path.glob("**/*.*"))
        with pytest.raises(SampleGone):
            load_hidden_states(reply(handles[0]))
    producer.close()
    until(lambda: not group_names(producer.name), "the drain to leave")


def test_the_bound_is_kept_and_nothing_hangs_behind_it(
    make: Callable[..., Producer], caplog: pytest.LogCaptureFixture
) -> None:
    producer = make(size="1MiB", slots=4, groups=[GROUP])
    with BackgroundDrain(producer.name, memory=5 * SAMPLE) as drain:
        with caplog.at_level(logging.ERROR, "shmconn"):
            handles = [put(producer, number) for number in range(40)]
            with pytest.raises(DrainFull):
                load_hidden_states(handles[5], timeout=30)
        assert drain.held == 5 * SAMPLE
        assert len(caplog.records) == 1
        text = "over the bound of .* cleanup_hidden_states, raise the bound .* or give a folder"
        with pytest.raises(DrainFull, match=text):
            drain.check()
        for number in range(5):
            check(load_hidden_states(handles[number], timeout=30), number)
        for handle in handles[5:]:
            with pytest.raises(DrainFull, match=text):
                load_hidden_states(handle, timeout=30)
        for handle in handles[:5]:
            cleanup_hidden_states(handle)
        drain.try_again()
        check(load_hidden_states(put(producer, 40), timeout=30), 40)
        with pytest.raises(DrainFull, match=text):
            load_hidden_states(handles[9], timeout=30)


def test_a_folder_that_takes_no_more_is_an_error_not_a_hang(
    make: Callable[..., Producer], tmp_path: Path
) -> None:
    producer = make(size="1MiB", slots=4, groups=[GROUP])
    folder = tmp_path / "states"
    with BackgroundDrain(producer.name, folder=folder) as drain:
        first = put(producer, 1)
        check(load_hidden_states(first, timeout=30), 1)
        # The folder is gone, as a full or lost disk is.
        drain.path_of(first).unlink()
        folder.rmdir()
        handles = [put(producer, number) for number in range(2, 12)]
        with pytest.raises(DrainFull, match="states' takes no more"):
            load_hidden_states(handles[-1], timeout=30)
        with pytest.raises(DrainFull):
            drain.check()
    with pytest.raises(OptionError, match="folder .*conftest.py/x"):
        BackgroundDrain(producer.name, folder=Path(__file__).with_name("conftest.py") / "x")


def test_lost_and_late_samples_are_told_apart(make: Callable[..., Producer]) -> None:
    producer = make(groups=[GROUP])
    with BackgroundDrain(producer.name):
        handle = shmconn.Handle.make(producer.name, producer.generation, 1, "r1")
        with pytest.raises(shmconn.NotReady, match="did not come in time"):
            load_hidden_states(handle, timeout=0.2)
        producer.accept(1)
        producer.bury(1, "r1", "short")
        with pytest.raises(SampleLost, match="short"):
            load_hidden_states(handle, timeout=30)
        late = handle._replace(number=2)
        waiting = threading.Timer(0.2, producer.close)
        waiting.start()
        with pytest.raises((SampleGone, shmconn.ProducerDied)):
            load_hidden_states(late, timeout=30)
        waiting.join()


def test_a_second_drain_takes_the_place_of_the_first_and_what_it_kept(
    make: Callable[..., Producer],
) -> None:
    producer = make(groups=[GROUP])
    before = BackgroundDrain(producer.name)
    handles = [put(producer, number) for number in range(5)]
    check(load_hidden_states(handles[4], timeout=30), 4)
    # As when the cell of a notebook runs again.
    with BackgroundDrain(producer.name) as drain:
        assert not before._thread.is_alive()
        handles += [put(producer, number) for number in range(5, 20)]
        for number, handle in enumerate(handles):
            check(load_hidden_states(handle, timeout=30), number)
            cleanup_hidden_states(handle)
        assert drain.held == 0


def test_cleaning_up_after_the_ring_has_gone_is_no_error(make: Callable[..., Producer]) -> None:
    producer = make()
    handle = put(producer, 1)
    producer.close()
    cleanup_hidden_states(handle)


def test_two_threads_may_load_while_the_drain_reads(make: Callable[..., Producer]) -> None:
    producer = make(groups=[GROUP])
    with BackgroundDrain(producer.name) as drain:
        handles = [
            shmconn.Handle.make(producer.name, producer.generation, number + 1, f"r{number}")
            for number in range(100)
        ]
        failures: list[BaseException] = []

        def load(part: slice) -> None:
            try:
                for handle in handles[part]:
                    check(load_hidden_states(handle, timeout=60), handle.number - 1)
                    cleanup_hidden_states(handle)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=load, args=(slice(i, None, 2),)) for i in range(2)]
        for thread in threads:
            thread.start()
        for number in range(100):
            put(producer, number)
        for thread in threads:
            thread.join()
        assert failures == []
        assert drain.held == 0
