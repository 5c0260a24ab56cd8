# SPDX-License-Identifier: Apache-2.0
"""A producer in a process of its own, told what to do by JSON lines on stdin.

Every sample follows from its number, so that whoever reads one can tell it from all others.
"""

import json
import sys
import time

import numpy as np

from shmconn import Producer

LAYERS = (2, 18)
HIDDEN = 64


def tokens_of(number: int) -> int:
    """Tokens of the sample of a number, where nothing else is asked: few, and at times many."""
    return 600 if number % 97 == 0 else 1 + number * 7 % 50


def states_of(number: int, tokens: int) -> np.ndarray:
    """float32 states of a number."""
    return np.random.default_rng(number).random((tokens, len(LAYERS), HIDDEN), np.float32)


def ids_of(number: int, tokens: int) -> np.ndarray:
    """Token ids of a number."""
    return np.arange(tokens, dtype=np.int64) + number


def main() -> None:
    options = json.loads(sys.argv[1])
    producer = Producer.create(
        options.pop("name"), layer_ids=LAYERS, hidden_size=HIDDEN, dtype="float32", **options
    )
    say(generation=producer.generation)
    for line in sys.stdin:
        told = json.loads(line)
        if told["do"] == "put":
            for number in range(told["first"], told["first"] + told["count"]):
                put(producer, number, told)
            say(published=producer.published)
        elif told["do"] == "bury":
            producer.accept(told["number"])
            producer.bury(told["number"], f"r{told['number']}", told["reason"])
            say(lost=True)
        elif told["do"] == "close":
            producer.close()
            say(closed=True)


def put(producer: Producer, number: int, told: dict[str, object]) -> None:
    """Like ``Producer.put``, but without torch, which takes seconds to import."""
    tokens = told.get("tokens") or tokens_of(number)
    request = producer.accepted + 1
    deadline = time.monotonic() + 60
    while True:
        fill = producer.allocate(
            number=request,
            request_id=told.get("request_id") or f"r{number}",
            token_ids=ids_of(number, tokens),
            tag=told.get("tag", f"t{number}"),
        )
        if fill is not None:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(producer.stall_text())
        producer.wait(0.1)
    producer.accept(request)
    fill.states[:] = states_of(number, tokens).tobytes()
    producer.publish(fill)


def say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
