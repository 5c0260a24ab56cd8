# SPDX-License-Identifier: Apache-2.0
"""What a real server puts into the ring: the right rows, of the right tokens, once each."""

from pathlib import Path

import pytest
import torch
from server import BLOCK, HIDDEN, LAYERS, Server, params, prompt, take

import shmconn

pytestmark = pytest.mark.vllm
# Relative error of a row between two float32 runs; see docs/design.md for the noise measured.
NOISE = 1e-4


def error(got: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest relative error of a row, over the hidden axis."""
    return float(((got - reference).norm(dim=-1) / reference.norm(dim=-1)).max())


def same(first: shmconn.Sample, second: shmconn.Sample) -> bool:
    return first.token_ids.tolist() == second.token_ids.tolist() and (
        error(first.hidden_states, second.hidden_states) < NOISE
    )


def test_solo_batched_chunked_and_prefix_cached_requests_agree(
    server: Server, reader: shmconn.Subscription
) -> None:
    shared = prompt(2 * BLOCK, 1)
    prompts = [
        *(prompt(length, length) for length in (4, 40, 150, 300, 410)),
        shared + prompt(60, 2),
        shared + prompt(90, 3),
    ]
    solo = []
    for ids in prompts:
        reply = server.complete(ids)
        solo.append(take(reader, 1)[params(reply)["request_id"]])
    replies = server.complete_all(prompts)
    batched = take(reader, len(prompts))
    for ids, first, reply in zip(prompts, solo, replies, strict=True):
        second = batched[params(reply)["request_id"]]
        assert first.token_ids.tolist() == ids
        assert first.shape == (len(ids), len(LAYERS), HIDDEN)
        assert same(first, second)
    # The check sees what it is for: a row of a neighbour, or another layer.
    states = solo[1].hidden_states
    assert error(states.roll(1, 0), states) > NOISE
    assert error(states.roll(1, 1), states) > NOISE
    assert server.metric("vllm:prefix_cache_hits_total") >= 2 * BLOCK


def test_rows_that_came_from_the_prefix_cache_are_those_of_the_request_that_wrote_them(
    server: Server, reader: shmconn.Subscription
) -> None:
    ids = prompt(2 * BLOCK + 44, 11)
    samples = []
    for _ in range(2):
        server.complete(ids)
        samples += take(reader, 1).values()
    first, second = samples
    cached = first.hidden_states[: 2 * BLOCK]
    assert torch.equal(cached, second.hidden_states[: 2 * BLOCK])
    assert same(first, second)


def test_the_copy_is_bit_for_bit_what_the_cache_held(
    server: Server, reader: shmconn.Subscription, twins: Path
) -> None:
    prompts = [prompt(length, 100 + length) for length in (1, 31, BLOCK, BLOCK + 1, 333)]
    replies = server.complete_all(
        prompts, max_tokens=6, params={"include_output_tokens": True, "tag": "twin"}
    )
    samples = take(reader, len(prompts))
    for reply in replies:
        sample = samples[params(reply)["request_id"]]
        twin = torch.load(twins / f"{sample.handle.generation}-{sample.number}.pt")
        assert sample.hidden_states.shape == twin.shape
        assert sample.hidden_states.view(torch.int32).equal(twin.view(torch.int32))


def test_rows_are_those_that_transformers_computes(
    server: Server, reader: shmconn.Subscription
) -> None:
    from server import MODEL
    from transformers import AutoModelForCausalLM

    ids = prompt(70, 21)
    reply = server.complete(ids)
    sample = take(reader, 1)[params(reply)["request_id"]]
    model = AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32).model
    rows: list[torch.Tensor] = []
    for layer in LAYERS:
        # Layer k is the output of the k-th block; the last one is what the final norm gets.
        model.layers[layer - 1].register_forward_hook(
            lambda module, args, output: rows.append(
                (output[0] if isinstance(output, tuple) else output)[-len(ids) :].reshape(
                    len(ids), HIDDEN
                )
            )
        )
    with torch.inference_mode():
        model(torch.tensor([ids]), use_cache=False)
    assert sample.layer_ids == tuple(LAYERS)
    assert error(sample.hidden_states, torch.stack(rows, 1)) < NOISE


@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_token_ids_are_those_of_the_reply_and_output_is_all_but_the_last(
    server: Server, reader: shmconn.Subscription, tokens: int
) -> None:
    ids = prompt(37, 31)
    reply = server.complete(
        ids, max_tokens=tokens, params={"include_output_tokens": True, "tag": f"out {tokens}"}
    )
    sample = take(reader, 1)[params(reply)["request_id"]]
    (choice,) = reply.choices
    expected = choice.prompt_token_ids + choice.token_ids[:-1]
    assert len(choice.token_ids) == tokens or choice.finish_reason == "stop"
    assert sample.token_ids.tolist() == expected
    assert sample.shape == (len(expected), len(LAYERS), HIDDEN)
    assert sample.tag == f"out {tokens}" and sample.metadata["prompt_tokens"] == 37
    assert params(reply)["shape"] == list(sample.shape)


def test_without_output_tokens_a_sample_is_the_prompt(
    server: Server, reader: shmconn.Subscription
) -> None:
    ids = prompt(20, 41)
    reply = server.complete(ids, max_tokens=9)
    assert take(reader, 1)[params(reply)["request_id"]].token_ids.tolist() == ids


def test_a_chat_yields_the_tokens_of_its_template(
    server: Server, reader: shmconn.Subscription
) -> None:
    reply = server.client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Name three colours."}],
        max_tokens=5,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    sample = take(reader, 1)[params(reply)["request_id"]]
    assert sample.token_ids.tolist() == reply.prompt_token_ids  # type: ignore[attr-defined]


def test_a_reply_names_its_sample(server: Server, reader: shmconn.Subscription) -> None:
    reply = params(server.complete(prompt(12, 51)))
    (sample,) = take(reader, 1).values()
    assert set(reply) == {"handle", "ring", "request_id", "layer_ids", "shape", "dtype"}
    assert reply["ring"] == server.ring and reply["layer_ids"] == LAYERS
    assert reply["dtype"] == "float32" == sample.dtype
    assert str(sample.handle) == reply["handle"]


def test_a_reply_s_very_sample_can_be_asked_for(
    server: Server, reader: shmconn.Subscription
) -> None:
    with shmconn.subscribe(server.ring, "probe", by_handle=True) as probe:
        replies = server.complete_all([prompt(8 + index, 60 + index) for index in range(5)])
        for reply in reversed(replies):
            sample = probe.get(params(reply), timeout=30)
            assert sample.request_id == params(reply)["request_id"]
            assert sample.token_ids.tolist() == reply.choices[0].prompt_token_ids
            sample.release()
    take(reader, 5)


def test_prompt_lists_several_answers_and_streams_yield_one_sample_each(
    server: Server, reader: shmconn.Subscription
) -> None:
    lists = [prompt(10 + index, 70 + index) for index in range(3)]
    server.complete(lists)
    several = prompt(14, 80)
    server.complete(several, max_tokens=2, n=3, temperature=1, seed=1)
    streamed = [prompt(15 + index, 90 + index) for index in range(2)]
    for ids in streamed:
        for _ in server.complete(ids, max_tokens=4, stream=True):
            pass
    samples = take(reader, 3 + 3 + 2)
    seen = sorted(sample.token_ids.tolist() for sample in samples.values())
    assert seen == sorted([*lists, several, several, several, *streamed])


ODD_IDS = ["../x", "/etc/x", "a/b", "x" * 300, "zero\0byte", "é ☃ 名", "new\nline", " ", "same"]


def test_request_ids_are_data_whatever_is_in_them(
    server: Server, reader: shmconn.Subscription
) -> None:
    for index, odd in enumerate([*ODD_IDS, "same"]):
        ids = prompt(6, 200 + index)
        reply = server.complete(ids, body={"request_id": odd})
        (sample,) = take(reader, 1).values()
        assert odd in sample.request_id
        assert sample.request_id == params(reply)["request_id"]
        assert sample.token_ids.tolist() == ids


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"tag": 5}, "tag is 5"),
        ({"tag": ["../x"]}, "tag is list"),
        ({"tag": "x" * 100_000}, "more than 1024 bytes"),
        ({"include_output_tokens": "yes"}, "include_output_tokens is 'yes'"),
        ({"include_output_token": True}, "did you mean 'include_output_tokens'"),
        ({"tag": "ok", "do_remote_decode": False, "x": {"y": [None]}}, None),
    ],
)
def test_malformed_parameters_are_told_and_hurt_nobody(
    server: Server, reader: shmconn.Subscription, asked: dict[str, object], said: str | None
) -> None:
    reply = params(server.complete(prompt(9, 300), params=asked))
    (sample,) = take(reader, 1).values()
    assert sample.tokens == 9
    if said is None:
        assert "error" not in reply and sample.tag == "ok"
    else:
        assert said in reply["error"] and said in sample.metadata["error"]


def test_an_answer_that_a_stop_string_ended_is_a_sample(
    server: Server, reader: shmconn.Subscription
) -> None:
    ids = prompt(12, 400)
    whole = server.complete(ids, max_tokens=8)
    take(reader, 1)
    text = whole.choices[0].text
    reply = server.complete(ids, max_tokens=8, stop=[text[len(text) // 2]])
    assert reply.choices[0].finish_reason == "stop"
    (sample,) = take(reader, 1).values()
    assert sample.token_ids.tolist() == ids
