# SPDX-License-Identifier: Apache-2.0
"""What a start says: one line when it works, one clear error when it cannot."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine import HIDDEN_LAYER, fake_config, hidden_cache, transfer_config, vllm_config
from server import ROOT, make_model
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

import shmconn
from shmconn import directory, plugin, versions, worker
from shmconn.capture import Place
from shmconn.connector import ShmHiddenStatesConnector
from shmconn.errors import NoSpace, OptionError
from shmconn.worker import Target, open_writer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PLACE = Place(0, 16, HIDDEN_LAYER)


def test_the_connector_is_found_by_name_and_registering_twice_is_no_error() -> None:
    plugin.register()
    plugin.register()
    assert KVConnectorFactory.get_connector_class(transfer_config({})) is ShmHiddenStatesConnector


def test_the_connector_is_found_by_its_module_path() -> None:
    config = transfer_config({}, kv_connector_module_path="shmconn.connector")
    assert KVConnectorFactory.get_connector_class(config) is ShmHiddenStatesConnector
    assert supports_hma(KVConnectorFactory.get_connector_class(config))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"speculative_config": None},
            "needs the speculative method 'extract_hidden_states', but speculative_config is not",
        ),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "has 'eagle3'"),
        (
            {
                "parallel_config": SimpleNamespace(
                    tensor_parallel_size=2, distributed_executor_backend="external_launcher"
                )
            },
            "tensor_parallel_size is 2 with distributed_executor_backend 'external_launcher'",
        ),
        (
            {"parallel_config": SimpleNamespace(pipeline_parallel_size=2)},
            "pipeline_parallel_size is 2",
        ),
        (
            {
                "parallel_config": SimpleNamespace(
                    pipeline_parallel_size=1, decode_context_parallel_size=4
                )
            },
            "decode_context_parallel_size is 4",
        ),
        (
            {"kv_transfer_config": SimpleNamespace(kv_role="kv_consumer")},
            "kv_role is 'kv_consumer': the connector produces, use 'kv_producer'",
        ),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_in_one_line(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError) as caught:
        Target.of(fake_config(**changes))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("layer_ids", "said"),
    [
        ([], "give it layer numbers"),
        (None, "give it layer numbers"),
        ([1, 1], "each once"),
        ([1, 5], "names [5], but the model has layers 0 (the embeddings) to 4"),
        ([-1, 2], "names [-1]"),
    ],
)
def test_layers_that_are_not_there_are_named(layer_ids: Any, said: str) -> None:
    config = fake_config()
    hf = config.speculative_config.draft_model_config.hf_config
    hf.eagle_aux_hidden_state_layer_ids = layer_ids
    with pytest.raises(OptionError) as caught:
        Target.of(config)
    assert said in str(caught.value)


def test_layers_are_ascending_as_the_cache_holds_them() -> None:
    config = fake_config()
    hf = config.speculative_config.draft_model_config.hf_config
    hf.eagle_aux_hidden_state_layer_ids = [4, 0, 2]
    assert Target.of(config).layer_ids == (0, 2, 4)


def caches(layer: str = HIDDEN_LAYER) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=4, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec([layer], spec)]
    )


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_an_unknown_option_is_named_with_the_nearest_known_one(role: KVConnectorRole) -> None:
    config = vllm_config(str(make_model()), transfer_config({"ringsize": "1GiB"}))
    with pytest.raises(OptionError, match="'ringsize' .did you mean 'ring_size'"):
        KVConnectorFactory.create_connector(config, role, caches())


def test_caches_without_hidden_states_are_named() -> None:
    config = vllm_config(str(make_model()), transfer_config({}))
    with pytest.raises(OptionError, match=r"groups \(model.layers.0.attn\), found none"):
        KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, caches("model.layers.0.attn")
        )


@pytest.mark.parametrize(
    ("version", "device", "said"),
    [
        (versions.RUN["cpu"][-1], "cpu", None),
        (versions.RUN["cpu"][0] + "+cpu", "cpu", None),
        (versions.RUN["cuda"][0], "cuda", None),
        ("9.9.9", "cpu", "never run with vLLM 9.9.9 on cpu (run were 0.22.1,"),
        (versions.RUN["cpu"][0] + ".dev1", "cpu", "on cpu (run were"),
        ("0.32.0", "xpu", "never run with vLLM 0.32.0 on xpu (with none there)"),
    ],
)
def test_a_version_that_was_not_run_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    device: str,
    said: str | None,
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    config = SimpleNamespace(device_config=SimpleNamespace(device_type=device))
    versions.check_vllm(config, tell=False)
    assert caplog.text == ""
    versions.check_vllm(config, tell=True)
    assert said in caplog.text if said else caplog.text == ""


def test_each_version_that_counts_as_run_has_a_row_in_the_documents() -> None:
    rows = [
        line
        for line in (ROOT / "docs" / "vllm.md").read_text().splitlines()
        if line.startswith("| 0.") and "| run" in line
    ]
    for device, run in versions.RUN.items():
        for version in run:
            wanted = "CUDA" if device == "cuda" else "CPU"
            assert any(version in row[:30] and wanted in row for row in rows), (device, version)


def test_a_vllm_without_the_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        __import__("sys").modules, "vllm.model_executor.models.extract_hidden_states", None
    )
    with pytest.raises(OptionError, match="this vLLM has no extract_hidden_states"):
        worker._token_major()


def writer(ring: str, hidden: int = 8, **extra: Any) -> worker.Writer:
    config = shmconn_config(ring=ring, **extra)
    cache = hidden_cache(4, hidden)[0]
    return open_writer({HIDDEN_LAYER: cache}, Target((1, 2), 8, 64), config, ring, "engine", PLACE)


def shmconn_config(**extra: Any) -> Any:
    from shmconn.config import ConnectorConfig

    return ConnectorConfig.parse(extra)


@pytest.fixture
def ring() -> Iterator[str]:
    name = f"t-{secrets.token_hex(6)}"
    yield name
    left = [path.name for path in Path("/dev/shm").glob(f"*shmconn.{name}*")]
    assert left == []


def test_a_start_says_in_one_line_what_there_is_and_how_to_read_it(
    ring: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.shmconn")
    writer(ring, ring_size="1MiB").close()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"shmconn: ring {ring!r} of 1.0 MiB holds {11 * 65536 // 64} tokens of layers 1,2, "
        f"64 B a token in float32; read it with `shmconn drain {ring} --to DIR`"
    )


def test_a_ring_too_small_for_the_longest_request_is_warned_of_with_the_size_it_needs(
    ring: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache = hidden_cache(4, 8)[0]
    target = Target((1, 2), 8, 100_000)
    config = shmconn_config(ring=ring, ring_size="1MiB")
    open_writer({HIDDEN_LAYER: cache}, target, config, ring, "engine", PLACE).close()
    assert "max_model_len 100000 tokens does not fit a third" in caplog.text
    need = caplog.text.split("a ring_size of ")[1].split(" takes")[0]
    caplog.clear()
    config = shmconn_config(ring=ring, ring_size=need)
    open_writer({HIDDEN_LAYER: cache}, target, config, ring, "engine", PLACE).close()
    assert "does not fit" not in caplog.text


def test_a_second_engine_under_an_explicit_name_is_told_of_and_a_rank_is_not(
    ring: str, caplog: pytest.LogCaptureFixture
) -> None:
    def start(engine_id: str) -> worker.Writer:
        cache = hidden_cache(4, 8)[0]
        config = shmconn_config(ring=ring, ring_size="1MiB")
        target = Target((1, 2), 8, 64)
        return open_writer({HIDDEN_LAYER: cache}, target, config, ring, engine_id, PLACE)

    started = [start("a_dp0"), start("a_dp1")]
    assert "another engine" not in caplog.text
    started.append(start("b"))
    assert "another engine" in caplog.text
    assert len(directory.rings(ring)) == 3
    for one in started:
        one.close()


@pytest.mark.parametrize(
    ("extra", "error", "said"),
    [
        ({"ring_size": "100TiB"}, NoSpace, "100.0 TiB"),
        ({"ring_size": "64KiB"}, OptionError, "too small"),
        ({"hidden": 16}, OptionError, "no 2 layers of 8 in it"),
    ],
)
def test_a_ring_that_cannot_be_made_is_one_error_and_leaves_nothing(
    ring: str, extra: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        writer(ring, **extra)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_capture_that_cannot_be_made_leaves_no_ring(
    ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(worker, "make_capture", fail)
    with pytest.raises(RuntimeError, match="planted"):
        writer(ring, ring_size="1MiB")


def test_groups_named_in_the_options_see_the_first_sample(ring: str) -> None:
    made = writer(ring, ring_size="1MiB", groups=["a", {"name": "b", "by_handle": True}])
    assert {(group.name, group.by_handle) for group in directory.groups(ring)} == {
        ("a", False),
        ("b", True),
    }
    made.close()
    for group in ("a", "b"):
        directory.remove_group(ring, group)


def test_dead_rings_that_a_group_waits_for_are_named_at_the_next_start(
    ring: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = writer(ring, ring_size="1MiB", groups=["asleep"])
    made._producer.try_put(torch.zeros(3, 2, 8), [1, 2, 3], request_id="r")
    made.close()
    (left,) = directory.rings(ring)
    second = writer(ring, ring_size="1MiB")
    assert left.file in caplog.text
    second.close()
    with shmconn.subscribe(ring, "asleep") as subscription:
        for sample in subscription:
            sample.release()


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra": {"rings": "a"}}, "unknown option 'rings' (did you mean 'ring'?)"),
        ({"extra": {"ring_size": "100TiB"}}, "100.0 TiB"),
        ({"flags": ["--speculative-config", "null"]}, "needs the speculative method"),
    ],
)
def test_a_real_server_that_cannot_start_says_why_and_ends(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    from server import Server

    server = Server(tmp_path, changes.pop("extra", {}), **changes)
    try:
        assert server.process.wait(240) != 0
        assert said in server.log()
    finally:
        server.kill()
