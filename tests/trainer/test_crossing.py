# SPDX-License-Identifier: Apache-2.0
"""What crosses from one process to another: errors, and copies of samples."""

import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from trainer_tools import check, put

import shmconn
from shmconn import Producer, subscribe

ERRORS = [
    shmconn.ProducerDied("died", accepted=7, settled=5),
    shmconn.SampleLost("lost", reason="short", retry=True),
    shmconn.SegmentCorrupt("segment", "pages", "is out of bounds"),
    shmconn.NoSpace("no room"),
    shmconn.NotReady("not yet"),
    shmconn.OptionError("wrong"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_comes_whole_through_a_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_an_error_can_be_made_of_its_message_as_a_data_loader_does() -> None:
    assert str(shmconn.ProducerDied("text")) == "text"
    assert shmconn.ProducerDied("text").unpublished == 0
    assert not shmconn.SampleLost("text").retry


@pytest.mark.parametrize("pickler", [pickle.dumps, ForkingPickler.dumps])
def test_a_pickled_sample_is_a_copy_without_a_lease(
    make: Callable[..., Producer], pickler: Callable[[Any], bytes]
) -> None:
    producer = make()
    with subscribe(producer.name, "copies") as subscription:
        put(producer, 1, tag="name", metadata={"a": [1]})
        sample = next(subscription)
        copy = pickle.loads(pickler(sample))
        assert copy.facts == sample.facts
        sample.release()
        assert subscription.leases == 0
        # The producer writes over the page; the copy does not see it.
        put(producer, 2)
        next(subscription).release()
        check(copy, 1)
        producer.close()


def test_a_released_sample_cannot_be_pickled(make: Callable[..., Producer]) -> None:
    producer = make()
    with subscribe(producer.name, "copies") as subscription:
        put(producer, 1)
        sample = next(subscription)
        sample.release()
        with pytest.raises(shmconn.Closed, match="clone"):
            pickle.dumps(sample)
        producer.close()


def test_a_tensor_of_a_sample_crosses_as_a_copy_and_its_lease_ends(
    make: Callable[..., Producer],
) -> None:
    producer = make()
    with subscribe(producer.name, "copies") as subscription:
        put(producer, 1)
        sample = next(subscription)
        states = sample.hidden_states
        sample.release()
        copy = pickle.loads(ForkingPickler.dumps(states))
        assert torch.equal(copy, states)
        del states
        assert subscription.leases == 0
        producer.close()
