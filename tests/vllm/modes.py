# SPDX-License-Identifier: Apache-2.0
"""Ways of running vLLM, each one engine of `offline`: `python modes.py NAME FOLDER`.

What a mode must show is asserted here; where vLLM itself refuses, its own words end the script.
"""

import faulthandler
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from offline import (
    NOISE,
    Apart,
    Offline,
    agree,
    error,
    planted,
    prompt,
    random_model,
    reference,
    set_up,
)
from server import make_model

CUDA = torch.cuda.is_available()
PROMPTS = [prompt(length, length) for length in (1, 5, 40, 127, 128, 129, 300)]
SHARED = prompt(280, 1)
PROMPTS += [SHARED + prompt(20, 2), SHARED + prompt(70, 3)]


def batched_and_alone(engine: Offline, prompts: list[list[int]] = PROMPTS, **options: Any) -> None:
    """All at once, and then one after the other without a prefix cache, give the same rows."""
    batched = engine.round(prompts, **options)
    assert [one.tokens for one in batched] == [len(ids) + 2 for ids in prompts]
    assert engine.llm.reset_prefix_cache()
    alone = []
    for ids in prompts:
        alone += engine.round([ids], **options)
        assert engine.llm.reset_prefix_cache()
    noise = agree(batched, alone)
    # Now from the prefix cache.
    again = engine.round(prompts[-2:], **options) + engine.round(prompts[-2:], **options)
    noise = max(noise, agree(again, batched[-2:] * 2))
    print("SAMPLES", f"{engine.seen}, batched, alone and cached within {noise:.4f}")


def tiny(folder: Path) -> Path:
    """A small Llama."""
    return random_model(
        folder / "tiny",
        "llama",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )


def like_transformers(engine: Offline, model: Path, tokens: int = 200) -> None:
    """One prompt's rows beside those that transformers computes."""
    ids = prompt(tokens, 51)
    (sample,) = engine.round([ids], max_tokens=1)
    noise = NOISE[sample.hidden_states.dtype]
    rows = reference(model, ids, engine.layers)
    print("TRANSFORMERS", f"within {error(sample.hidden_states, rows):.4f}")
    assert error(sample.hidden_states, rows) < noise
    assert error(sample.hidden_states.roll(1, 1), rows) > noise


def abort_one(
    engine: Offline, tokens: int = 400, max_tokens: int = 2, *, answering: bool = False
) -> None:
    """One of two requests is aborted: amid its prefill, or amid its answer."""
    from vllm import SamplingParams

    wish = {"tag": "twin"}
    for name, seed in (("stays", 71), ("goes", 72)):
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": wish}
        )
        engine.engine.add_request(name, {"prompt_token_ids": prompt(tokens, seed)}, sampling)
    engine.engine.step()
    engine.engine.step()
    deadline = time.monotonic() + 30
    while engine.usage == 0:
        # One in a process of its own may not have begun: its first words were of earlier ones.
        assert time.monotonic() < deadline
        time.sleep(0.001)
    while answering:
        assert time.monotonic() < deadline
        answering = "goes" not in [one.request_id for one in engine.engine.step()]
    engine.engine.abort_request(["goes"])
    (left,) = engine.take(1)
    assert left.token_ids.tolist() == prompt(tokens, 71)


def plain(folder: Path) -> None:
    """Chunks, a shared prefix, several answers, an abort, and a prefix cache that is reset."""
    engine = Offline(tiny(folder))
    batched_and_alone(engine)
    several = engine.round([prompt(33, 61), prompt(34, 62)], n=3)
    assert [one.tokens for one in several] == [35] * 3 + [36] * 3
    abort_one(engine)
    engine.close(lost=1)


def smollm(folder: Path) -> None:
    """The demo's model: rows are those that transformers computes."""
    engine = Offline(make_model(), layers=[8, 15, 22, 30])
    batched_and_alone(engine)
    like_transformers(engine, make_model())
    abort_one(engine)
    engine.close(lost=1)


def apart(folder: Path) -> None:
    """An engine in a process of its own, and ours as the only child of a MultiConnector."""
    engine = Apart(tiny(folder), transfer=beside())
    batched_and_alone(engine)
    # It goes on by itself: long answers, so that the abort still meets its request.
    abort_one(engine, max_tokens=100)
    engine.close(lost=1)


def runner_v2(folder: Path) -> None:
    """The second model runner."""
    engine = Offline(tiny(folder))
    print("RUNNER", type(engine.core.model_executor.driver_worker.worker.model_runner).__module__)
    batched_and_alone(engine)
    abort_one(engine)
    engine.close(lost=1)


def lora(folder: Path) -> None:
    """A random adapter: its requests' rows are not those of the model alone."""
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    torch.manual_seed(7)
    model = tiny(folder)
    config = json.loads((model / "config.json").read_text())
    adapter = folder / "adapter"
    adapter.mkdir()
    hidden, rank = config["hidden_size"], 8
    head = hidden // config["num_attention_heads"]
    outputs = {"q_proj": hidden, "v_proj": head * config["num_key_value_heads"]}
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, hidden) / hidden**0.5
            tensors[f"{stem}.lora_B.weight"] = torch.randn(size, rank) / rank**0.5
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "bias": "none"}
    settings |= {"target_modules": list(outputs), "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    engine = Offline(model, enable_lora=True, max_lora_rank=rank)
    request = LoRARequest("random", 1, str(adapter))
    batched_and_alone(engine, lora_request=request)
    with_it = engine.round(PROMPTS[2:4], lora_request=request)
    without = engine.round(PROMPTS[2:4])
    for one, other in zip(with_it, without, strict=True):
        assert error(one.hidden_states[:40], other.hidden_states[:40]) > 0.05
    engine.close()


def prompt_embeds(folder: Path) -> None:
    """A prompt of embeddings beside one of tokens; the rows are those of the tokens meant."""
    engine = Offline(tiny(folder), enable_prompt_embeds=True)
    ids = prompt(150, 81)
    (reference,) = engine.round([ids])
    table = engine.core.model_executor.driver_worker.worker.model_runner.model.model.embed_tokens
    place = next(table.parameters()).device
    embeds = table(torch.tensor(ids, device=place)).detach().cpu()
    mixed = engine.round([{"prompt_embeds": embeds}, PROMPTS[2]])
    assert mixed[0].token_ids.tolist()[:150] == [-1] * 150
    assert mixed[0].metadata["no_token_ids"] is True
    assert "no_token_ids" not in mixed[1].metadata
    a, b = mixed[0].hidden_states[:150], reference.hidden_states[:150]
    assert error(a, b) < NOISE[a.dtype]
    engine.close()


def pooling(folder: Path) -> None:
    """A pooling request to an engine that generates is refused by vLLM, and all goes on."""
    engine = Offline(tiny(folder))
    try:
        engine.llm.embed([{"prompt_token_ids": prompt(9, 1)}])
    except ValueError as refusal:
        print("REFUSED", refusal)
    else:
        raise AssertionError("vLLM embeds with a model that generates")
    engine.round(PROMPTS[:3])
    engine.close()


def sleep(folder: Path) -> None:
    """To sleep and awake between requests; a second level forgets the weights where it works."""
    engine = Offline(tiny(folder), enable_sleep_mode=CUDA)
    first = engine.round(PROMPTS[:3])
    for level in (1, 1) if CUDA else (1, 2):
        engine.llm.sleep(level)
        engine.llm.wake_up()
        agree(engine.round(PROMPTS[:3]), first)
    engine.close()


def hold_some(engine: Offline, count: int = 20) -> None:
    """Answers that are all there, of which some samples find no room in the ring."""
    from vllm import SamplingParams

    wish = {"kv_transfer_params": {"tag": "twin"}}
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=wish)
    asked = [{"prompt_token_ids": prompt(40, 300 + index)} for index in range(count)]
    outputs = engine.llm.generate(asked, sampling, use_tqdm=False)
    assert len(outputs) == count and engine.usage > 0


def held(folder: Path) -> None:
    """What is held is not lost: whoever would take its blocks away is refused until it is read."""
    engine = Offline(tiny(folder), transfer=lambda ring: planted(ring, "1MiB"))
    # Nothing is held here but the last request's blocks, which the next step gives back.
    engine.round(PROMPTS[:1])
    hold_some(engine)
    used = engine.usage
    assert not engine.llm.reset_prefix_cache() and engine.usage == used
    for forced in (True, False):
        try:
            if forced:
                engine.core.reset_prefix_cache(reset_running_requests=True)
            else:
                engine.llm.sleep(1)
        except RuntimeError as refusal:
            print("REFUSED", refusal)
        else:
            raise AssertionError(f"blocks of held requests were taken away (forced: {forced})")
        assert engine.usage == used
    engine.llm.wake_up()
    samples: list[Any] = []
    deadline = time.monotonic() + 60
    while engine.core.scheduler.has_requests():
        assert time.monotonic() < deadline
        engine.engine.step()
        samples += engine.read()
    samples += engine.read()
    assert len(samples) == 20 and engine.idle
    engine.seen += len(samples)
    engine.check_twins(samples)
    # Now none has blocks any more, and all of it works.
    assert engine.llm.reset_prefix_cache()
    engine.llm.sleep(1)
    engine.llm.wake_up()
    agree(engine.round(PROMPTS[:2]), engine.round(PROMPTS[:2]))
    engine.close()


def held_apart(folder: Path) -> None:
    """An engine in a process of its own sleeps once held samples are read, and says so."""
    engine = Apart(tiny(folder), transfer=lambda ring: planted(ring, "1MiB"))
    hold_some(engine)
    asleep = threading.Event()

    def sleep() -> None:
        engine.llm.sleep(1)
        asleep.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    # As long as it takes the first word of a stall to come.
    assert not asleep.wait(12)
    print("WAITS", flush=True)
    samples: list[Any] = []
    while sleeper.is_alive() or engine.reader.unread():
        samples += engine.read()
        time.sleep(0.01)
    assert asleep.is_set()
    engine.llm.wake_up()
    samples += engine.read()
    assert len(samples) == 20
    engine.seen += len(samples)
    engine.check_twins(samples)
    engine.round(PROMPTS[:2])
    engine.close()


def mla(folder: Path) -> None:
    """DeepSeek-V2's latent attention; on a CPU vLLM cuts no prompt into chunks with it.

    Its attention on a CPU gives other numbers in a batch than alone, and than transformers does, so
    only what does not pass through it is compared: first tokens, and which row is whose.
    """
    model = random_model(
        folder / "mla",
        "deepseek_v2",
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=4,
        first_k_dense_replace=2,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        hidden_act="silu",
    )
    engine = Offline(model, layers=[1, 2], max_num_batched_tokens=512)
    engine.round([prompt(length, length) for length in (1, 9, 16, 40)])
    engine.round([SHARED[:40], SHARED[:50]], n=2)
    if CUDA:
        batched_and_alone(engine)
        like_transformers(engine, model)
    ids = prompt(40, 51)
    (sample,) = engine.round([ids], max_tokens=1)
    rows = reference(model, ids, engine.layers)
    assert error(sample.hidden_states[:1], rows[:1]) < NOISE[sample.hidden_states.dtype]
    for layer in range(2):
        distances = torch.cdist(sample.hidden_states[:, layer].float(), rows[:, layer])
        assert distances.argmin(1).tolist() == list(range(len(ids)))
    abort_one(engine, tokens=70, max_tokens=30)
    engine.close(lost=1)


def hybrid(folder: Path) -> None:
    """Qwen3-Next: three layers of linear attention to one of full attention."""
    model = random_model(
        folder / "hybrid",
        "qwen3_next",
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        mlp_only_layers=[0, 1, 2],
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        partial_rotary_factor=0.25,
        tie_word_embeddings=True,
    )
    several_groups(model)


def mamba(folder: Path) -> None:
    """Nemotron-H: Mamba-2 layers, two of attention, and perceptrons of their own."""
    model = random_model(
        folder / "mamba",
        "nemotron_h",
        layers_block_type=["linear_attention", "mlp", "full_attention"] * 2,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=2,
        ssm_state_size=64,
        conv_kernel=4,
        chunk_size=128,
        max_position_embeddings=2048,
        initializer_range=0.05,
    )
    # vLLM's own name for the order of the layers.
    config = json.loads((model / "config.json").read_text())
    config |= {"hybrid_override_pattern": "M-*" * 2, "num_hidden_layers": 6}
    (model / "config.json").write_text(json.dumps(config))
    several_groups(model)


def several_groups(model: Path) -> None:
    """A model whose layers keep different things in the cache."""
    # With a prefix cache vLLM needs Triton for the states of linear attention.
    engine = Offline(model, dtype="bfloat16", enable_prefix_caching=False)
    groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
    print("GROUPS", [(type(one.kv_cache_spec).__name__, len(one.layer_names)) for one in groups])
    batched_and_alone(engine)
    like_transformers(engine, model)
    abort_one(engine)
    engine.close(lost=1)


def beside(*others: dict[str, Any]) -> Callable[[str], dict[str, Any]]:
    """A MultiConnector of ours and these."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # The MultiConnector looks the class of a child's metrics up by name alone.
    KVConnectorFactory.register_connector("PlantedConnector", "planted", "PlantedConnector")

    def transfer(ring: str) -> dict[str, Any]:
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [planted(ring), *others]},
        }

    return transfer


def offloading(folder: Path) -> None:
    """Beside vLLM's own offloading of KV blocks to the host."""
    other = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    other["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 28}  # type: ignore[assignment]
    # In the caller's process vLLM up to 0.28 cannot show its figures as a MultiConnector's child.
    engine = Apart(tiny(folder), transfer=beside(other))
    batched_and_alone(engine)
    # Amid a prefill an abort ends the engine of vLLM up to 0.26 by this connector's own fault
    # (vllm-project/vllm, issue 49118).
    abort_one(engine, max_tokens=100, answering=True)
    engine.close(lost=1)


def example(folder: Path) -> None:
    """Beside vLLM's example that stores KV blocks in files; on a CPU it cannot load them."""
    store = folder / "kv"
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    other["kv_connector_extra_config"] = {"shared_storage_path": str(store)}  # type: ignore[assignment]
    engine = Offline(tiny(folder), transfer=beside(other))
    engine.round(PROMPTS)
    abort_one(engine)
    assert len(list(store.iterdir())) >= 4
    engine.close(lost=1)


MODES = {
    one.__name__: one
    for one in (
        *(plain, smollm, apart, runner_v2, lora, prompt_embeds, pooling, sleep, held, mla),
        *(held_apart, hybrid),
        *(mamba, offloading, example),
    )
}


if __name__ == "__main__":
    faulthandler.dump_traceback_later(450, exit=True)
    name, place = sys.argv[1], Path(sys.argv[2])
    set_up(place)
    MODES[name](place)
    print("DONE", name)
