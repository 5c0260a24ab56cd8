# SPDX-License-Identifier: Apache-2.0
"""vLLM's LLM, with a ring and a background drain in place of files per request."""

import logging
import secrets
import time
from collections.abc import Mapping
from typing import Any

import vllm

from shmconn.config import ConnectorConfig
from shmconn.errors import NotReady, OptionError, ProducerDied, SampleGone, SampleLost
from shmconn.handle import Handle
from shmconn.integrations.drain import DEFAULT_MEMORY, GROUP, BackgroundDrain
from shmconn.plugin import NAME

_log = logging.getLogger("shmconn")

_REPLACED = "ExampleHiddenStatesConnector"
_FOLDER = "shared_storage_path"
_OF_EXAMPLE = {_FOLDER, "allow_custom_save_path", "use_synchronization_lock", "num_writer_threads"}
_RING_WAIT_S = 60.0
_SAMPLE_WAIT_S = 300.0
# How long to step at most for blocks to come back, and the pause between two steps.
_SETTLE_S = 1.0
_STEP_S = 0.001


class LLM(vllm.LLM):  # type: ignore[misc]
    """vLLM's ``LLM`` whose hidden states come through a ring, however small.

    Each output's ``kv_transfer_params`` has ``hidden_states_path``, for ``load_hidden_states``: a
    file if there is a folder for them, else a handle, with the states in memory.

    Args:
        hidden_states_memory: bound of what lies in memory until ``cleanup_hidden_states``.
        kv_transfer_config: as for vLLM; of ShmHiddenStatesConnector, or of vLLM's example
            connector, in whose place ours is put. ``shared_storage_path`` in its extra
            configuration is the folder for files.

    Raises:
        OptionError: another connector, or an option is wrong.
        DrainFull: from ``generate`` and ``chat``: more than the bound; says what to change.
    """

    def __init__(
        self,
        model: str,
        *,
        kv_transfer_config: Any = None,
        hidden_states_memory: "int | str" = DEFAULT_MEMORY,
        **options: Any,
    ) -> None:
        extra, folder = _options_of(kv_transfer_config)
        super().__init__(
            model=model,
            kv_transfer_config={
                "kv_connector": NAME,
                "kv_role": "kv_producer",
                "kv_connector_extra_config": extra,
            },
            **options,
        )
        self.hidden_states_drain = BackgroundDrain(
            extra["ring"], memory=hidden_states_memory, folder=folder, wait_s=_RING_WAIT_S
        )
        self._step = self.llm_engine.step

        def checked_step() -> Any:
            self.hidden_states_drain.check()
            return self._step()

        # So generate() ends at once when there is no room, not when all prompts are done.
        self.llm_engine.step = checked_step

    def generate(self, *args: Any, **options: Any) -> Any:
        """vLLM's ``generate``; returns when the samples are in memory, or in their files."""
        return self._with_samples(super().generate, args, options)

    def chat(self, *args: Any, **options: Any) -> Any:
        """vLLM's ``chat``; returns when the samples are in memory, or in their files."""
        return self._with_samples(super().chat, args, options)

    def _with_samples(self, run: Any, args: Any, options: Any) -> Any:
        drain = self.hidden_states_drain
        drain.try_again()
        try:
            outputs = run(*args, **options)
        except BaseException:
            # What is unfinished must not come out of the next call.
            self.llm_engine.abort_request(
                list(self.llm_engine.output_processor.request_states), internal=True
            )
            raise
        for output in outputs:
            params = output.kv_transfer_params
            if not params or not params.get("handle"):
                continue
            handle = Handle.parse(params)
            path = str(handle) if drain.folder is None else str(drain.path_of(handle))
            params["hidden_states_path"] = path
            try:
                drain.wait_for(handle, _SAMPLE_WAIT_S)
            except (SampleLost, SampleGone, NotReady, ProducerDied) as error:
                # load_hidden_states says it again to whoever wants this one.
                _log.warning("request %s: %s", output.request_id, error)
        drain.check()
        self._give_blocks_back()
        return outputs

    def _give_blocks_back(self) -> None:
        """Takes the steps that vLLM's own process would, so that no block has an owner any more.

        Else ``sleep`` and ``reset_prefix_cache`` right after this would fail. What is held because
        the drain is full stays so.
        """
        core = getattr(self.llm_engine.engine_core, "engine_core", None)
        deadline = time.monotonic() + _SETTLE_S
        while core is not None and core.scheduler.has_requests() and time.monotonic() < deadline:
            self._step()
            time.sleep(_STEP_S)


def _options_of(config: Any) -> tuple[dict[str, Any], str | None]:
    """The connector's options for an offline run, and the folder for files, if there is one."""
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        config = {
            "kv_connector": config.kv_connector,
            "kv_connector_extra_config": config.kv_connector_extra_config,
        }
    connector = config.get("kv_connector", NAME)
    if connector not in (NAME, _REPLACED):
        raise OptionError(f"kv_connector {connector!r}: this LLM works with {NAME} only")
    extra = dict(config.get("kv_connector_extra_config") or {})
    folder = extra.get(_FOLDER)
    for option in _OF_EXAMPLE & set(extra):
        del extra[option]
    extra.setdefault("ring", f"offline-{secrets.token_hex(6)}")
    groups = list(extra.get("groups") or [])
    extra["groups"] = groups if GROUP in groups else [*groups, GROUP]
    # Refused before the engine starts, which takes a minute.
    ConnectorConfig.parse(extra)
    return extra, None if folder is None else str(folder)
