# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side: numbers, lengths, reasons, replies."""

import enum
import json
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmconn.handle import Handle
from shmconn.intake import Ask, Intake, RingIdentity

BLOCK = 16
GENERATION = "0123456789abcdef" * 2


class Status(enum.Enum):
    FINISHED_STOPPED = 1
    FINISHED_LENGTH_CAPPED = 2
    FINISHED_ABORTED = 3
    FINISHED_IGNORED = 4
    FINISHED_ERROR = 5
    FINISHED_REPETITION = 6


@dataclass
class Params:
    stop: list[str] = field(default_factory=list)


class Request:
    """vLLM's request, as far as the intake reads it."""

    def __init__(
        self,
        prompt: int = 40,
        output: int = 1,
        computed: int | None = None,
        status: Status = Status.FINISHED_STOPPED,
        params: Any = None,
        stop: list[str] | None = None,
        request_id: str = "cmpl-1",
    ) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = prompt
        self.prompt_token_ids: list[int] | None = list(range(100, 100 + prompt))
        self.all_token_ids = [*self.prompt_token_ids, *range(900, 900 + output)]
        self.num_computed_tokens = prompt + output - 1 if computed is None else computed
        self.status = status
        self.kv_transfer_params = params
        self.sampling_params = Params(stop or [])


@pytest.fixture
def intake() -> Intake:
    made = Intake(block_size=BLOCK, ring="qwen")
    made.identity = RingIdentity("qwen", GENERATION, (2, 18), 64, "bfloat16")
    return made


def blocks(tokens: int) -> list[int]:
    return list(range(7, 7 + -(-tokens // BLOCK)))


def test_a_request_yields_the_rows_of_its_prompt(intake: Intake) -> None:
    held, reply = intake.finish(Request(40, 5), blocks(44))
    (work,) = intake.take()
    assert held and work.report and work.reason is None
    assert list(work.token_ids) == list(range(100, 140))
    assert work.blocks == [7, 8, 9]
    assert reply == {
        "ring": "qwen",
        "request_id": "cmpl-1",
        "handle": str(Handle.make("qwen", GENERATION, 1, "cmpl-1")),
        "layer_ids": [2, 18],
        "dtype": "bfloat16",
        "shape": [40, 2, 64],
    }
    assert json.loads(json.dumps(reply)) == reply


@pytest.mark.parametrize("surplus", [0, 1])
def test_output_tokens_are_all_but_the_last(intake: Intake, surplus: int) -> None:
    # The draft repeats the last token, so vLLM may count one more as computed than there is.
    request = Request(40, 8, computed=47 + surplus, params={"include_output_tokens": True})
    held, reply = intake.finish(request, blocks(48))
    (work,) = intake.take()
    assert held and reply is not None and reply["shape"] == [47, 2, 64]
    assert list(work.token_ids) == request.all_token_ids[:47]
    assert work.metadata == {"prompt_tokens": 40}


def test_one_generated_token_adds_nothing_to_the_prompt(intake: Intake) -> None:
    intake.finish(Request(40, 1, params={"include_output_tokens": True}), blocks(40))
    assert len(intake.take()[0].token_ids) == 40


@pytest.mark.parametrize(
    ("request_", "given_blocks"),
    [
        (Request(40, computed=39), blocks(40)),
        (Request(40), blocks(32)),
        (Request(40), []),
        (Request(40, computed=0), []),
        (Request(40), [7, 0, 9]),
        (Request(0, 0), []),
        (Request(40, 8, computed=46, params={"include_output_tokens": True}), blocks(48)),
        (Request(40, 8, params={"include_output_tokens": True}), blocks(32)),
        (Request(40, 0, computed=40, params={"include_output_tokens": True}), blocks(40)),
        (Request(40, computed=0, status=Status.FINISHED_IGNORED), []),
    ],
)
def test_too_few_tokens_or_blocks_yield_no_sample(
    intake: Intake, request_: Request, given_blocks: list[int]
) -> None:
    held, reply = intake.finish(request_, given_blocks)
    (work,) = intake.take()
    assert not held and not work.report and work.reason == "short"
    assert reply is not None and "short" in reply["error"] and "shape" not in reply


@pytest.mark.parametrize("status", [Status.FINISHED_ABORTED, Status.FINISHED_ERROR])
@pytest.mark.parametrize(("computed", "given_blocks"), [(640, 40), (0, 0), (1000, 63)])
def test_an_aborted_request_yields_no_sample_and_holds_no_block(
    intake: Intake, status: Status, computed: int, given_blocks: int
) -> None:
    request = Request(1000, 0, computed=computed, status=status)
    held, _ = intake.finish(request, list(range(1, given_blocks + 1)))
    (work,) = intake.take()
    assert not held and work.reason == "aborted" and work.number == 1


def test_a_request_that_a_stop_string_ended_is_not_lost(intake: Intake) -> None:
    request = Request(40, 3, status=Status.FINISHED_ABORTED, stop=["\n"])
    held, _ = intake.finish(request, blocks(42))
    assert held and intake.take()[0].reason is None


def test_an_abort_before_the_first_output_is_no_stop_string(intake: Intake) -> None:
    intake.finish(Request(40, 0, status=Status.FINISHED_ABORTED, stop=["\n"]), blocks(40))
    assert intake.take()[0].reason == "aborted"


def test_numbers_count_every_finished_request_from_one(intake: Intake) -> None:
    for index in range(3):
        intake.finish(Request(40, request_id=f"r{index}"), blocks(40) if index != 1 else [])
    assert [work.number for work in intake.take()] == [1, 2, 3]
    assert intake.take() == []
    _, reply = intake.finish(Request(40), blocks(40))
    assert reply is not None and Handle.parse(reply).number == 4


def test_ids_of_embedded_prompts_are_marked_unknown(intake: Intake) -> None:
    request = Request(40, 3, params={"include_output_tokens": True})
    request.prompt_token_ids = None
    intake.finish(request, blocks(42))
    (work,) = intake.take()
    assert list(work.token_ids) == [-1] * 40 + [900, 901]
    assert work.metadata["no_token_ids"] is True


def test_a_prompt_of_tokens_and_embeddings_marks_only_the_embeddings(intake: Intake) -> None:
    request = Request(4, 1)
    request.prompt_is_token_ids = [True, False, False, True]  # type: ignore[attr-defined]
    intake.finish(request, blocks(4))
    assert list(intake.take()[0].token_ids) == [100, -1, -1, 103]


def test_without_a_known_ring_the_reply_says_so_and_the_sample_is_taken() -> None:
    intake = Intake(block_size=BLOCK, ring="qwen")
    held, reply = intake.finish(Request(40), blocks(40))
    assert held and reply is not None
    assert "handle" not in reply and "not known" in reply["error"]


def test_a_fault_costs_one_sample_and_holds_nothing(intake: Intake) -> None:
    broken = Request(40)
    broken.all_token_ids = None  # type: ignore[assignment]
    broken.num_prompt_tokens = "x"  # type: ignore[assignment]
    assert intake.finish(broken, blocks(40)) == (False, None)
    held, _ = intake.finish(Request(40), blocks(40))
    fault, good = intake.take()
    assert (fault.number, fault.reason, fault.report) == (1, "fault", False)
    assert held and good.number == 2


def test_work_survives_the_way_to_another_process(intake: Intake) -> None:
    intake.finish(Request(40, params={"tag": "a"}), blocks(40))
    (work,) = intake.take()
    assert pickle.loads(pickle.dumps(work)) == work


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"tag": 12}, "tag is 12: it must be text"),
        ({"tag": ["a"]}, "tag is list: it must be text"),
        ({"tag": "x" * 5000}, "it has more than 1024 bytes"),
        ({"tag": "é" * 600}, "it has more than 1024 bytes"),
        ({"tag": "\ud800"}, "it is not Unicode text"),
        ({"include_output_tokens": "yes"}, "include_output_tokens is 'yes': it must be true or"),
        ({"include_output_tokens": 1}, "include_output_tokens is 1: it must be"),
        ({"include_output_token": True}, "did you mean 'include_output_tokens'?"),
        ("tag", "kv_transfer_params is 'tag': it must be an object"),
        ([], "kv_transfer_params is list: it must be an object"),
    ],
)
def test_malformed_parameters_are_named_and_the_request_is_served(
    intake: Intake, params: Any, said: str
) -> None:
    held, reply = intake.finish(Request(40, 8, params=params), blocks(47))
    (work,) = intake.take()
    assert held and reply is not None
    assert said in reply["error"] and work.metadata["error"] == reply["error"]
    assert len(reply["error"]) < 400 and reply["error"].isascii()
    assert work.tag is None and len(work.token_ids) == 40


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_decode": True, 5: 6}, {"tag": None}, {"tag": "../x\0é"}]
)
def test_other_connectors_fields_and_odd_tags_are_no_error(intake: Intake, params: Any) -> None:
    _, reply = intake.finish(Request(40, params=params), blocks(40))
    assert reply is not None and "error" not in reply
    assert intake.take()[0].tag == (params or {}).get("tag")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(JSON | st.dictionaries(st.sampled_from(["tag", "include_output_tokens"]), JSON))
def test_no_parameters_whatever_raise(params: Any) -> None:
    ask = Ask.parse(params)
    assert isinstance(ask.include_output_tokens, bool)
    assert ask.tag is None or len(ask.tag.encode()) <= 1024


@pytest.mark.parametrize(
    ("computed", "session", "reason"),
    [(42, True, None), (40, True, None), (39, True, "aborted"), (42, False, "aborted")],
)
def test_an_aborted_session_that_had_computed_its_input_is_a_sample(
    intake: Intake, computed: int, session: bool, reason: str | None
) -> None:
    request = Request(40, 3, computed=computed, status=Status.FINISHED_ABORTED)
    if session:
        request.streaming_queue = []  # type: ignore[attr-defined]
    intake.finish(request, blocks(43))
    (work,) = intake.take()
    assert work.reason == reason
    assert work.metadata == ({"prompt_tokens": 40, "aborted": True} if reason is None else {})
    assert work.handed_out is (reason is not None)
