# SPDX-License-Identifier: Apache-2.0
"""The copy out of the paged cache is bit for bit what the cache holds, in either layout."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmconn.capture import CacheView, HostCapture, Place, find_cache, find_place
from shmconn.errors import OptionError
from shmconn.fill import Fill

LAYER = "model.cache_only_layers.4"
DTYPES = ["bfloat16", "float16", "float32"]


def random_bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> torch.Tensor:
    """Every bit pattern may occur: NaN with payload, -0.0, infinities."""
    kind = getattr(torch, dtype)
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=kind).element_size()
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(kind)


def make_cache(
    layout: str, blocks: int, block: int, layers: int, hidden: int, dtype: str, pad: int = 0
) -> tuple[torch.Tensor, bool]:
    """vLLM's cache in one of its forms, and whether its shape is token-major.

    ``pad`` elements lie between the pages of two blocks, as with other layers' pages between.
    """
    page = block * layers * hidden
    raw = random_bits((blocks, page + pad), dtype)[:, :page]
    if layout == "token-major":  # up to 0.28
        return raw.unflatten(1, (block, layers, hidden)), True
    if layout == "layer-major":  # 0.32 on the CPU: LBHNC
        return raw.unflatten(1, (layers, block, hidden)), False
    # 0.32 and later with LBNHC: the same shape as layer-major, tokens outermost in memory.
    return raw.unflatten(1, (block, layers, hidden)).transpose(1, 2), False


LAYOUTS = ["token-major", "layer-major", "layer-shaped, token-major"]


def make_fill(tokens: int, layers: int, hidden: int, dtype: str) -> Fill:
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    states = memoryview(bytearray(b"\xee" * (tokens * layers * hidden * size)))
    ids = memoryview(bytearray(8 * tokens))
    return Fill(1, "r", 0, 0, 1, tokens, layers, hidden, dtype, 0, 0, 0, states, ids)


def expected(
    cache: torch.Tensor, token_major: bool, blocks: list[int], tokens: int
) -> torch.Tensor:
    """The rows one by one, in the plainest way."""
    block = cache.shape[1 if token_major else 2]
    rows = []
    for token in range(tokens):
        page = cache[blocks[token // block]]
        rows.append(page[token % block] if token_major else page[:, token % block])
    return torch.stack(rows)


def find(cache: torch.Tensor, is_token_major: bool, **wish: Any) -> CacheView:
    states = cache if is_token_major else cache.transpose(1, 2)
    options = {
        "layers": states.shape[2],
        "hidden_size": states.shape[3],
        "token_major": is_token_major,
    } | wish
    place = Place(0, options.pop("block_size", states.shape[1]), LAYER)
    return find_cache({"model.layers.0.attn": torch.empty(2), LAYER: cache}, place, **options)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 6, 24])
@pytest.mark.parametrize("pad", [0, 2, 7])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 48])
def test_a_copy_is_bit_for_bit_what_the_cache_held(
    layout: str, dtype: str, hidden: int, pad: int, tokens: int
) -> None:
    cache, token_major = make_cache(layout, 9, 16, 3, hidden, dtype, pad)
    fill = make_fill(tokens, 3, hidden, dtype)
    HostCapture(find(cache, token_major)).copy(fill, [8, 1, 5], None)
    assert bytes(fill.states) == bits(expected(cache, token_major, [8, 1, 5], tokens))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_as_long_as_there_are_layers_are_not_confused(layout: str) -> None:
    cache, token_major = make_cache(layout, 5, 4, 4, 8, "float32")
    fill = make_fill(10, 4, 8, "float32")
    HostCapture(find(cache, token_major)).copy(fill, [3, 1, 2], None)
    assert bytes(fill.states) == bits(expected(cache, token_major, [3, 1, 2], 10))


@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(DTYPES),
    block=st.integers(1, 5),
    layers=st.integers(1, 4),
    hidden=st.integers(1, 9),
    pad=st.integers(0, 5),
    expand=st.integers(1, 3),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_any_shape_and_any_blocks_are_copied_exactly(
    layout: str,
    dtype: str,
    block: int,
    layers: int,
    hidden: int,
    pad: int,
    expand: int,
    data: st.DataObject,
) -> None:
    cache, token_major = make_cache(layout, 4 * expand, block, layers, hidden, dtype, pad)
    ids = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    tokens = data.draw(st.integers(1, len(ids) * block * expand))
    fill = make_fill(tokens, layers, hidden, dtype)
    view = find(cache, token_major, block_size=block * expand)
    HostCapture(view).copy(fill, ids, None)
    small = [one * expand + part for one in ids for part in range(expand)]
    assert bytes(fill.states) == bits(expected(cache, token_major, small, tokens))


def test_a_planted_wrong_layout_is_seen_by_these_tests() -> None:
    cache, _ = make_cache("layer-major", 5, 4, 4, 8, "float32")
    fill = make_fill(10, 4, 8, "float32")
    HostCapture(find(cache, True)).copy(fill, [3, 1, 2], None)
    assert bytes(fill.states) != bits(expected(cache, False, [3, 1, 2], 10))


@pytest.mark.parametrize("blocks", [[1, 9], [1, -1], [4], []])
def test_blocks_that_are_too_few_or_not_in_the_cache_write_nothing(blocks: list[int]) -> None:
    cache, token_major = make_cache("layer-major", 9, 16, 3, 8, "bfloat16")
    fill = make_fill(20, 3, 8, "bfloat16")
    before = bytes(fill.states)
    with pytest.raises(OptionError):
        HostCapture(find(cache, token_major)).copy(fill, blocks, None)
    assert bytes(fill.states) == before


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"layers": 2}, "no 2 layers of 8 in it"),
        ({"hidden_size": 16}, "no 3 layers of 16 in it"),
        ({"token_major": True}, "no 3 layers of 8 in it"),
        ({"block_size": 24}, "blocks of 16 tokens, which do not make up"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_at_start(wish: dict[str, Any], said: str) -> None:
    cache, _ = make_cache("layer-major", 9, 16, 3, 8, "bfloat16")
    with pytest.raises(OptionError) as caught:
        find(cache, False, **wish)
    assert said in str(caught.value) and LAYER in str(caught.value)


def test_a_cache_of_another_rank_is_refused_at_start() -> None:
    with pytest.raises(OptionError, match="not 4 axes"):
        find_cache(
            {LAYER: torch.empty(2, 3, 4)},
            Place(0, 2, LAYER),
            layers=3,
            hidden_size=4,
            token_major=False,
        )


def test_a_cache_that_was_not_registered_is_refused_at_start() -> None:
    with pytest.raises(OptionError, match=f"1 KV caches, but none of the layer {LAYER}: a.0"):
        find_cache(
            {"a.0": torch.empty(1, 1, 1, 1)},
            Place(0, 1, LAYER),
            layers=1,
            hidden_size=1,
            token_major=False,
        )


class AttentionSpec:
    def __init__(self, block_size: int) -> None:
        self.block_size = block_size


class HiddenStateCacheSpec(AttentionSpec):
    """Named as vLLM's own."""


class DerivedSpec(HiddenStateCacheSpec):
    """As a later vLLM might have it."""


class UniformSpecs(AttentionSpec):
    """Of layers that differ, as a worker's single group has it."""

    def __init__(self, block_size: int, **by_layer: AttentionSpec) -> None:
        super().__init__(block_size)
        self.kv_cache_specs = by_layer


def groups(*layer_names: list[str], **specs: AttentionSpec) -> Any:
    made = [(names, AttentionSpec(16 + index)) for index, names in enumerate(layer_names)]
    made += [([name], spec) for name, spec in specs.items()]
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in made
        ]
    )


def test_the_layer_is_found_by_its_name_and_never_by_its_place() -> None:
    assert find_place(groups(["a.0", LAYER])) == (0, 16, LAYER)
    assert find_place(groups(["a.0"], ["mamba.1"], [LAYER])) == (2, 18, LAYER)


@pytest.mark.parametrize("spec", [HiddenStateCacheSpec(32), DerivedSpec(32)])
def test_the_layer_is_found_by_the_type_of_its_specification_whatever_its_name(spec: Any) -> None:
    assert find_place(groups(["a.0"], renamed=spec)) == (1, 32, "renamed")
    assert find_place(groups([LAYER], renamed=spec)) == (1, 32, "renamed")
    both = groups(["a.0"], b=UniformSpecs(64, other=AttentionSpec(1), renamed=spec))
    assert find_place(both) == (1, 64, "renamed")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (groups(["a.0"], ["mamba.1"]), "(a.0; mamba.1), found none"),
        (groups([LAYER], ["draft.cache_only_layers.5"]), f"{LAYER} and draft.cache_only_layers.5"),
        (groups(x=HiddenStateCacheSpec(1), y=DerivedSpec(1)), "found x and y"),
    ],
)
def test_no_or_two_layers_of_hidden_states_are_refused_by_name(found: Any, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        find_place(found)
    assert said in str(caught.value)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
