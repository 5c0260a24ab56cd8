# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: what each finished request yields.

Every finished request gets the next number, whatever became of it. The worker learns of all of
them, each with the blocks to copy or with the reason for no sample; so the ring can account for
every number, and a handle in a reply is settled one way or the other.
"""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from shmconn.handle import Handle

logger = logging.getLogger("vllm.shmconn")

FIELDS = ("include_output_tokens", "tag")
MAX_TAG_BYTES = 1024
# Stands in the token ids where the prompt was an embedding: no vocabulary has it.
NO_TOKEN = -1
# vLLM keeps block 0 for positions that have no block of their own any more.
NULL_BLOCK = 0
ABORTED = "FINISHED_ABORTED"


class FinishedRequest(Protocol):
    """What is read of vLLM's ``Request``; the rest of it is looked up with a default."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    prompt_token_ids: Sequence[int] | None
    all_token_ids: Sequence[int]
    status: Any
    sampling_params: Any


@dataclass(slots=True)
class Work:
    """One finished request on its way to the worker; it is pickled when ranks are processes.

    Attributes:
        number: 1 for the first request of the engine's life.
        reason: why it yields no sample; ``None`` if it is to be copied.
        report: whether its blocks are held until the worker reports the request.
        token_ids: one per token that is copied.
        blocks: the scheduler's block ids that hold them, in order.
        metadata: goes into the sample as it is.
        handed_out: whether a reply with its handle goes out.
    """

    number: int
    request_id: str
    reason: str | None
    report: bool = False
    token_ids: Sequence[int] = ()
    blocks: list[int] = field(default_factory=list)
    tag: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    handed_out: bool = True


@dataclass(frozen=True, slots=True)
class RingIdentity:
    """What the scheduler knows of the ring, which it never maps."""

    ring: str
    generation: str
    layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: str


class Ask(NamedTuple):
    """What a request's own ``kv_transfer_params`` ask for.

    Attributes:
        include_output_tokens: capture generated tokens too, all but the last, which no forward
            pass ever saw.
        tag: the sender's name for the sample. Data, never a path.
        error: what was wrong with the parameters. A wrong field counts as absent: the request is
            served and its sample taken, and both the reply and the sample carry this text, so
            that neither side can mistake the sample for what was meant.
    """

    include_output_tokens: bool = False
    tag: str | None = None
    error: str | None = None

    @classmethod
    def parse(cls, params: object) -> "Ask":
        """Never raises; fields of other connectors are left alone."""
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            return cls(error=f"kv_transfer_params is {_show(params)}: it must be an object")
        errors = [error for key in list(params)[:64] if (error := _unknown(key))]
        include = params.get("include_output_tokens")
        if include is not None and not isinstance(include, bool):
            errors.append(f"include_output_tokens is {_show(include)}: it must be true or false")
            include = None
        tag = params.get("tag")
        if tag is not None and (error := _tag_error(tag)):
            errors.append(error)
            tag = None
        return cls(bool(include), tag, "; ".join(errors) or None)


class Intake:
    """Numbers finished requests and decides what is copied of each.

    Args:
        block_size: tokens in one block of the scheduler's group that holds the hidden states.
        ring: the ring's name, for replies until the ring itself is known.
    """

    def __init__(self, *, block_size: int, ring: str) -> None:
        self.identity: RingIdentity | None = None
        self._block_size = block_size
        self._ring = ring
        self._number = 0
        self._pending: list[Work] = []

    def finish(
        self, request: FinishedRequest, blocks: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Takes a finished request in.

        Args:
            blocks: its block ids in the group of the hidden states; empty if it never ran.

        Returns:
            Whether its blocks must be held until the worker reports it, and the reply's
            parameters. A fault costs this request its sample, nothing else.
        """
        self._number += 1
        try:
            work, reply = self._decide(request, blocks)
        except Exception:
            logger.exception("shmconn lost the sample of request %r", request.request_id)
            work, reply = Work(self._number, str(request.request_id), "fault"), None
        self._pending.append(work)
        return work.report, reply

    def sure(self) -> list[Work]:
        """The last request to finish, if all its rows are on their way to the device.

        An abort may come amid a step, before the last ones are.
        """
        last = self._pending[-1:]
        return last if last and last[0].handed_out else []

    def take(self) -> list[Work]:
        """What finished since the last call."""
        work, self._pending = self._pending, []
        return work

    def _decide(
        self, request: FinishedRequest, blocks: Sequence[int]
    ) -> tuple[Work, dict[str, Any]]:
        ask = Ask.parse(getattr(request, "kv_transfer_params", None))
        prompt = request.num_prompt_tokens
        tokens = len(request.all_token_ids) - 1 if ask.include_output_tokens else prompt
        reason = _no_sample(request)
        needed = list(blocks[: -(-tokens // self._block_size)])
        if reason is None and not (
            prompt <= tokens <= request.num_computed_tokens
            and 0 < tokens <= len(needed) * self._block_size
            and NULL_BLOCK not in needed
        ):
            reason = "short"
        reply = self._reply(request.request_id, tokens, reason, ask.error)
        if reason is not None:
            return Work(self._number, request.request_id, reason), reply
        metadata: dict[str, Any] = {"prompt_tokens": prompt}
        aborted = request.status.name == ABORTED
        if aborted:
            metadata["aborted"] = True
        if ask.error:
            metadata["error"] = ask.error
        token_ids, all_known = _token_ids(request, tokens)
        if not all_known:
            metadata["no_token_ids"] = True
        work = Work(
            number=self._number,
            request_id=request.request_id,
            reason=None,
            report=True,
            token_ids=token_ids,
            blocks=needed,
            tag=ask.tag,
            metadata=metadata,
            # vLLM's last word on an aborted request carries no parameters.
            handed_out=not aborted,
        )
        return work, reply

    def _reply(
        self, request_id: str, tokens: int, reason: str | None, error: str | None
    ) -> dict[str, Any]:
        ring = self.identity
        reply: dict[str, Any] = {"ring": self._ring, "request_id": request_id}
        errors = [error] if error else []
        if ring is None:
            errors.append("the ring is not known to the scheduler, so there is no handle")
        else:
            handle = Handle.make(ring.ring, ring.generation, self._number, request_id)
            reply["handle"] = str(handle)
            reply["layer_ids"] = list(ring.layer_ids)
            reply["dtype"] = ring.dtype
            reply["shape"] = [tokens, len(ring.layer_ids), ring.hidden_size]
        if reason is not None:
            reply.pop("shape", None)
            errors.append(f"no sample ({reason})")
        if errors:
            reply["error"] = "; ".join(errors)
        return reply


def _no_sample(request: FinishedRequest) -> str | None:
    """Why an unfinished request yields nothing; vLLM's other ends all have an answer.

    Two ends that are none to the sender come as aborts, and the engine cannot tell them from a
    client that hangs up: a stop string, which vLLM finds outside the engine, and the end of a
    session of streamed inputs that waits for its next one.
    """
    status = request.status.name
    if status not in (ABORTED, "FINISHED_ERROR"):
        return None
    if status == ABORTED:
        answered = len(request.all_token_ids) > request.num_prompt_tokens
        if getattr(request.sampling_params, "stop", None) and answered:
            return None
        # A session that waits has computed all that it was given.
        session = getattr(request, "streaming_queue", None) is not None
        if session and request.num_computed_tokens >= request.num_prompt_tokens:
            return None
    return "aborted"


def _token_ids(request: FinishedRequest, tokens: int) -> tuple[Sequence[int], bool]:
    """The ids of the first tokens, and whether all are known; those of embeddings are not."""
    known = request.prompt_token_ids
    is_token = getattr(request, "prompt_is_token_ids", None)
    if known is not None and is_token is None:
        # The prompt's own list is never changed by vLLM: no copy in the engine's main thread.
        return known if tokens == len(known) else request.all_token_ids[:tokens], True
    prompt = request.num_prompt_tokens
    ids = [NO_TOKEN] * prompt if known is None else list(known)
    if known is not None and is_token is not None:
        ids = [one if real else NO_TOKEN for one, real in zip(ids, is_token, strict=True)]
    return ids + list(request.all_token_ids[prompt:tokens]), False


def _unknown(key: object) -> str | None:
    """Whether a field's name is one of ours, misspelt."""
    if key in FIELDS or not isinstance(key, str) or len(key) > 64:
        return None
    near = difflib.get_close_matches(key, FIELDS, n=1, cutoff=0.8)
    return f"unknown field {key!r}: did you mean {near[0]!r}?" if near else None


def _tag_error(tag: object) -> str | None:
    if not isinstance(tag, str):
        return f"tag is {_show(tag)}: it must be text"
    if len(tag) > MAX_TAG_BYTES or len(tag.encode("utf-8", "replace")) > MAX_TAG_BYTES:
        return f"tag is {_show(tag)}: it has more than {MAX_TAG_BYTES} bytes"
    try:
        tag.encode("utf-8")
    except UnicodeEncodeError:
        return f"tag is {_show(tag)}: it is not Unicode text"
    return None


def _show(value: object) -> str:
    """A value of unknown size and type, short enough for a reply."""
    if isinstance(value, str | bytes | bytearray):
        text = repr(value[:80])
    elif isinstance(value, int | float | bool | None):
        text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a large int"
    else:
        text = type(value).__name__
    return text.encode("ascii", "backslashreplace").decode()
