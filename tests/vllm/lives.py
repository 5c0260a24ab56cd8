# SPDX-License-Identifier: Apache-2.0
"""Lives of real servers under one ring name, and a reader that follows through all of them."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import openai
import torch
from offline import NOISE, error
from server import WATCHDOG_S, Server, params, prompt

import shmconn
from shmconn.handle import Handle
from shmconn.views import RingEnd

PROMPTS = [prompt(tokens, tokens) for tokens in (2, 3, 20, 90, 127, 128, 129, 200)]
CLIENTS = 6


class Given(NamedTuple):
    """What a sample that was handed out says of itself."""

    seq: int
    number: int
    request_id: str


class Rows:
    """The rows of each prompt: all samples have those of the first, but for the kernels' noise."""

    def __init__(self) -> None:
        self._known: dict[int, torch.Tensor] = {}

    def check(self, index: int, token_ids: list[int], states: torch.Tensor) -> list[str]:
        """What is wrong with a sample of one of ``PROMPTS``."""
        if token_ids != PROMPTS[index]:
            return [f"a sample of prompt {index} has other token ids"]
        known = self._known.setdefault(index, states.clone())
        off = error(states, known)
        if not off < NOISE[known.dtype]:
            return [f"a sample of prompt {index} is torn: rows differ by {off}"]
        return []


class Follower:
    """A reader, in a thread, that checks each sample and goes on with the next server's ring.

    A sample's tag is the place of its prompt in ``PROMPTS``.
    """

    def __init__(self, ring: str, seed: int) -> None:
        self.given: dict[str, list[Given]] = {}
        self.problems: list[str] = []
        self.told_at: list[float] = []
        self._rows = Rows()
        self._dice = random.Random(seed)
        self._stop = threading.Event()
        self._subscription = shmconn.subscribe(ring, "trainer", wait_s=600, follow=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                sample = self._subscription.next(timeout=0.005)
                self.told_at += [time.monotonic()] * (len(self.ends) - len(self.told_at))
                if sample is not None:
                    self._take(sample)
        except Exception as fault:
            self.problems.append(f"the reader ended: {type(fault).__name__}: {fault}")

    def _take(self, sample: shmconn.Sample) -> None:
        ids = sample.token_ids.tolist()
        self.problems += self._rows.check(int(sample.tag or 0), ids, sample.hidden_states)
        given = Given(sample.seq, sample.number, sample.request_id)
        self.given.setdefault(sample.handle.generation, []).append(given)
        # Slow at times, so that a server also ends with samples that nobody has read yet.
        time.sleep(self._dice.choice((0, 0, 0, 0.02)))
        sample.release()

    @property
    def ends(self) -> list[RingEnd]:
        """Ends of rings that were told so far."""
        return list(self._subscription.ends)

    def wait_end(self, count: int) -> RingEnd:
        """Waits until so many ends were told; the last of them."""
        deadline = time.monotonic() + WATCHDOG_S
        while len(self.told_at) < count:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise TimeoutError(f"{len(self.ends)} of {count} ends were told; {self.problems}")
            time.sleep(0.001)
        return self.ends[-1]

    def close(self) -> None:
        """Leaves, as a reader does that has seen enough."""
        self._stop.set()
        self._thread.join()
        self._subscription.close()


class Load:
    """Clients that ask one server for one prompt after the other, until they are refused."""

    def __init__(self, server: Server, seed: int) -> None:
        self.replies: list[Handle] = []
        self.refused: list[str] = []
        self._server = server
        self._no_more = False
        self._asked = [0] * CLIENTS
        self._answered = [0] * CLIENTS
        self._threads = [
            threading.Thread(target=self._ask, args=(client, seed)) for client in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, client: int, seed: int) -> None:
        dice = random.Random(seed * CLIENTS + client)
        while not self._no_more:
            index = dice.randrange(len(PROMPTS))
            self._asked[client] += 1
            try:
                reply = self._server.complete(
                    PROMPTS[index], dice.choice((1, 1, 40)), params={"tag": str(index)}
                )
            except openai.OpenAIError as refusal:
                self.refused.append(f"{type(refusal).__name__}: {refusal}")
                return
            self._answered[client] += 1
            self.replies.append(Handle.parse(params(reply)))

    def ask_no_more(self) -> None:
        """What is under way is still answered; vLLM never answers what comes after its drain."""
        self._no_more = True
        # What a client was about to send is on its way by then.
        time.sleep(0.02)

    @property
    def under_way(self) -> int:
        """Requests that were sent and have no answer yet."""
        return sum(self._asked) - sum(self._answered)

    @property
    def answered(self) -> int:
        """Requests that were answered."""
        return sum(self._answered)

    def finish(self) -> None:
        """Waits until every client has been told that the server is gone."""
        for thread in self._threads:
            thread.join(WATCHDOG_S)
            if thread.is_alive():
                raise TimeoutError("a client still waits for an answer")


def account(
    given: Sequence[Given], end: RingEnd, replies: Sequence[Handle], *, killed: bool | None
) -> list[str]:
    """What is wrong with what a reader was given of a life, and was told of its end.

    Args:
        given: what was handed out.
        end: as it was told.
        replies: handles that clients were given.
        killed: whether the process that made the ring was killed; None = vLLM may do either.
    """
    problems = []
    seqs = sorted(one.seq for one in given)
    if seqs != list(range(1, end.published + 1)):
        problems.append(f"{end.published} were published, given were {seqs}")
    twice = [name for name, times in Counter(one.request_id for one in given).items() if times > 1]
    if twice:
        problems.append(f"given twice: {twice}")
    numbers = {one.number for one in given}
    missing = [
        handle.number
        for handle in replies
        if handle.generation == end.generation
        and handle.number <= end.settled
        and handle.number not in numbers
    ]
    if missing:
        problems.append(f"answered, settled and never given: {missing}")
    strange = {handle.generation for handle in replies} - {end.generation}
    if strange:
        problems.append(f"replies name generations {strange}, not {end.generation}")
    if killed is not None and end.died != killed:
        problems.append(f"the end says died={end.died}, killed={killed}")
    if not end.died and end.settled != end.accepted:
        problems.append(f"a clean end left {end.accepted - end.settled} requests unsettled")
    return problems


def terminate(server: Server) -> float:
    """SIGTERM, as an operator would, and its end; when that was."""
    began = time.monotonic()
    server.stop()
    return began


def kill(server: Server, title: str = "") -> float:
    """SIGKILL of the process whose title has this in it, or of all; when that was."""
    # Python's own trackers see that all are gone, and unlink what those had made.
    trackers = set(server.processes("resource_tracker"))
    # The youngest first: a worker that outlives its engine would still end by itself.
    pids = [pid for pid in sorted(server.processes(title), reverse=True) if pid not in trackers]
    if title:
        (pids,) = [pids] if len(pids) == 1 else []
    began = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return began
