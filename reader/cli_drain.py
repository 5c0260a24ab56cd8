# SPDX-License-Identifier: Apache-2.0
"""The options of ``shmconn drain``."""

import contextlib
import dataclasses
import logging
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from reader.complete import formats as list_formats
from reader.complete import ring_names
from shmconn.errors import OptionError
from shmconn.handle import check_name, parse_size

if TYPE_CHECKING:
    from reader.service import Output
    from reader.sinks import SinkOptions

_DISK = "When the disk is in trouble"
_STOP = "Where to stop"
_SEE = "What to show"


def drain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="The ring; may be left out when there is only one.",
            autocompletion=ring_names,
        ),
    ] = None,
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="DIR", help="Folder to write to; repeat it for several outputs."),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Once for all outputs, or once for each. [safetensors]",
            autocompletion=list_formats,
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Group to join, one for each output. [files-HASH of DIR]"
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with the next generation when vLLM restarts.")
    ] = False,
    wait: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Wait for a ring that is not there yet.")
    ] = 0.0,
    writers: Annotated[
        int, typer.Option(min=1, max=64, metavar="N", help="Writer threads for each output.")
    ] = 2,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of the files of format shards.")
    ] = "1GiB",
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Apply its final norm (specforge, modelopt)."),
    ] = None,
    loss_masks: Annotated[
        str | None,
        typer.Option(metavar="FILE|all", help="Loss masks by tag (specforge, modelopt)."),
    ] = None,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="SpecForge's: eagle3, dflash, domino or dspark.")
    ] = "eagle3",
    fsync: Annotated[
        bool, typer.Option("--fsync", help="Release a sample only when the disk itself has it.")
    ] = False,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Put a SHA-256 of each sample into the manifest.")
    ] = False,
    skip_tags: Annotated[
        bool,
        typer.Option(
            "--skip-tags",
            help="Skip a sample whose tag and token ids the manifest already has (a rerun).",
        ),
    ] = False,
    give_up: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="Exit with 5 when a sample is refused for so long. [wait for ever]",
            rich_help_panel=_DISK,
        ),
    ] = None,
    stop_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="At SIGTERM or Ctrl-C, wait so long for samples that are being written.",
            rich_help_panel=_DISK,
        ),
    ] = 10.0,
    max_samples: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Stop after N samples.", rich_help_panel=_STOP),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Stop after about SIZE.", rich_help_panel=_STOP),
    ] = None,
    max_rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="At most SIZE per second.", rich_help_panel=_STOP),
    ] = None,
    log_format: Annotated[
        str,
        typer.Option(metavar="text|json", help="Of log lines.", rich_help_panel=_SEE),
    ] = "text",
    log_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Log there; SIGHUP opens it anew.", rich_help_panel=_SEE),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, metavar="PORT", help="Serve Prometheus metrics.", rich_help_panel=_SEE
        ),
    ] = None,
    metrics_host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Where to serve them.", rich_help_panel=_SEE),
    ] = "127.0.0.1",
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress.", rich_help_panel=_SEE)
    ] = False,
) -> None:
    """Write a ring's samples to files, and release each once it is there.

    Formats: `safetensors` (one file per sample, with its metadata in the header; a tag `hs_12`
    gives speculators' `hs_12.safetensors`), `shards` (many samples in one safetensors file;
    `shmconn.shards.ShardDataset` reads them), `vllm` (files and locks as vLLM's own connector
    leaves them), `specforge` (`.ckpt`), `modelopt` (`.pt`), `null`.

    Each output is a group of its own and gets every sample. A drain that ends before the stream
    does keeps its place: run the same command again and it goes on, writing nothing twice.

    Exit codes: 0 all was read; 2 bad input; 3 a sample was lost while we were joined (aborted
    requests do not count); 4 the producer died; 5 gave up on the disk, nothing lost; 130 Ctrl-C;
    143 SIGTERM; 129 its terminal was closed.

    Examples:

    - `shmconn drain qwen --to out/`
    - `shmconn drain qwen --to out/ --wait 300 --follow`
    - `shmconn drain qwen --to /scratch/a --to /nfs/b --writers 4`
    - `shmconn drain qwen --to a --to b --format shards --format modelopt`
    - `shmconn drain qwen --to out/ --follow --log-format json --metrics-port 9123`
    """
    from reader import service
    from reader.lane import Limits
    from reader.logs import Logs, stderr_console
    from reader.metrics import Metrics
    from reader.progress import Progress
    from reader.sinks import SinkOptions
    from shmconn.which import the_only_ring

    if log_format not in ("text", "json"):
        raise OptionError(f"--log-format {log_format!r} is unknown: use text or json")
    ring = check_name(name) if name is not None else the_only_ring()
    options = service.DrainOptions(
        ring=ring,
        outputs=_outputs(
            to or [],
            formats or [],
            group or [],
            SinkOptions(
                "",
                fsync=fsync,
                checksum=checksum,
                skip_tags=skip_tags,
                shard_size=parse_size(shard_size, "--shard-size"),
                model=model,
                loss_masks=loss_masks,
                strategy=strategy,
            ),
        ),
        follow=follow,
        wait_s=wait,
        writers=writers,
        limits=Limits(
            samples=max_samples,
            bytes=_size(max_bytes, "--max-bytes"),
            rate=_size(max_rate, "--max-rate"),
            give_up_s=give_up,
        ),
        stop_s=stop_timeout,
    )
    console = stderr_console()
    logs = Logs(console, as_json=log_format == "json", file=log_file)
    progress = Progress(console, live=log_format == "text", quiet=quiet)
    metrics = None
    try:
        if metrics_port is not None:
            metrics = Metrics(ring, metrics_host, metrics_port)
            logging.getLogger("shmconn").info(
                "metrics at http://%s:%d/metrics", metrics_host, metrics.port
            )
        outcome = service.run(
            options,
            progress,
            # A terminal that closes ends what runs in it; a service has no terminal.
            reopen_logs=None if console.is_terminal and log_file is None else logs.reopen,
            observe=metrics.observe if metrics is not None else None,
        )
        # Whoever read our output may be gone; the exit code still says how the drain ended.
        with contextlib.suppress(OSError):
            for line in outcome.lines:
                stream = sys.stderr if line.startswith("error: ") else sys.stdout
                print(line, file=stream, flush=True)
        # Leases that are left must end with this process: by its clean-up they would be given back
        # as read.
        os._exit(outcome.code)
    finally:
        if metrics is not None:
            metrics.close()
        logs.close()


def _size(text: str | None, what: str) -> int | None:
    return None if text is None else parse_size(text.removesuffix("/s"), what)


def _outputs(
    folders: list[str], formats: list[str], groups: list[str], common: "SinkOptions"
) -> "list[Output]":
    """One output for each ``--to``, with the format and group given in the same place."""
    from reader import service

    if not folders and formats == ["null"]:
        folders, groups = ["null"], groups or ["null"]
    if not folders:
        raise OptionError("say where to write: --to DIR")
    if len(formats) not in (0, 1, len(folders)):
        raise OptionError(
            f"--format was given {len(formats)} times for {len(folders)} outputs: give it once, or "
            "once for each --to"
        )
    if groups and len(groups) != len(folders):
        raise OptionError(
            f"--group was given {len(groups)} times for {len(folders)} outputs: give one for each "
            "--to, since a group gets every sample only once"
        )
    if len(set(groups)) != len(groups):
        raise OptionError("each --to needs a --group of its own: a group gets every sample once")
    formats = formats or ["safetensors"]
    if len(formats) == 1:
        formats = formats * len(folders)
    return [
        service.Output(
            dataclasses.replace(common, path=folder),
            form,
            check_name(groups[index], "group") if groups else None,
        )
        for index, (folder, form) in enumerate(zip(folders, formats, strict=True))
    ]
