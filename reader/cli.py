# SPDX-License-Identifier: Apache-2.0
"""The command line. Each command only reads its options; the work is in other modules.

Modules of one command are imported by that command, so that ``shmconn ls`` loads neither torch nor
vLLM.
"""

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import shmconn
from reader.cli_drain import drain
from reader.complete import ring_names
from shmconn.errors import OptionError, ShmConnError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
# What a part of the commands needs, and the extra of pyproject.toml that brings it.
_EXTRAS = {"torch": "torch", "transformers": "verify"}

app = typer.Typer(
    name="shmconn",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="The ring; may be left out when there is only one.",
        autocompletion=ring_names,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def main() -> NoReturn:
    """Run a command; a user's mistake is one line on stderr, never a traceback."""
    _open_standard_streams()
    try:
        app()
    except ShmConnError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        print(
            f"error: this needs {error.name}, which is not installed: pip install "
            f"'shmconn[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(EXIT_BAD_INPUT)
    except BrokenPipeError:
        # The reader of our output went away; nothing more can be said, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_FAILED)
    sys.exit(0)


def _open_standard_streams() -> None:
    """Give 0, 1 and 2 something to lead to, or the next file takes the number, and what a library
    prints goes into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"shmconn {shmconn.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Show the version and stop."
        ),
    ] = False,
) -> None:
    """Hidden states of a running vLLM, through a ring in shared memory, into files or a trainer.

    Start a server with `shmconn serve`, read it with `shmconn drain`, and look at what is there
    with `shmconn ls`.

    Each command has examples in its own help: `shmconn drain --help`.
    """


app.command("drain")(drain)


@app.command("ls")
def list_rings(as_json: JsonOption = False) -> None:
    """List the rings of this host: live ones, and what dead ones left behind.

    Examples:

    - `shmconn ls`
    - `shmconn ls --json | jq -r '.[].name'`
    """
    from reader import show

    show.list_rings(as_json=as_json)


@app.command()
def stat(name: NameArgument = None, as_json: JsonOption = False) -> None:
    """Show one ring in full: sizes, counters, losses by reason, groups and who stalls.

    Examples:

    - `shmconn stat qwen`
    - `shmconn stat qwen --json | jq '.rings[0].free_pages'`
    """
    from reader import show

    show.stat(name, as_json=as_json)


@app.command()
def groups(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME | rm NAME GROUP",
            help="The ring; or what to remove.",
            autocompletion=ring_names,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the groups of a ring and their members, or remove a group that nobody will come back to.

    A group whose members crashed keeps its place and its unread samples, and so stops vLLM once the
    ring is full. `rm` gives them up. A group with a live member is never removed.

    Examples:

    - `shmconn groups qwen`
    - `shmconn groups rm qwen old-trainer`
    """
    from reader import show

    words = words or []
    if len(words) == 3 and words[0] == "rm":
        show.remove_group(words[1], words[2])
    elif len(words) > 1:
        raise OptionError(
            f"groups {' '.join(words)}: write `shmconn groups NAME` or "
            "`shmconn groups rm NAME GROUP`"
        )
    else:
        show.list_groups(words[0] if words else None, as_json=as_json)


@app.command("rm")
def remove_rings(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The ring.", autocompletion=ring_names)
    ],
    force: Annotated[
        bool,
        typer.Option("--force", help="Also dead rings whose samples a group still waits for."),
    ] = False,
) -> None:
    """Remove what dead producers left in /dev/shm under a name. A live ring always stays.

    Examples:

    - `shmconn rm qwen`
    - `shmconn rm qwen --force`
    """
    from reader import show

    show.remove_rings(name, force=force)


@app.command()
def top(
    name: NameArgument = None,
    interval: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Between two looks.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look after one interval.")] = False,
) -> None:
    """Watch rings and groups live: fill, samples and GB per second, lag, leases, who stalls.

    It only looks, and joins nothing. Ctrl-C ends it.

    Examples:

    - `shmconn top`
    - `shmconn top qwen --interval 0.5`
    - `shmconn top --once`
    """
    from reader import top as screen
    from shmconn.handle import check_name

    screen.run(check_name(name) if name else None, interval_s=interval, once=once)


@app.command()
def inspect(
    source: Annotated[
        str, typer.Argument(metavar="FILE|RING", help="A file of a sample, a shard, or a ring.")
    ],
    index: Annotated[int, typer.Option(min=0, help="Which sample of a shard.")] = 0,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a heat map of the norms there.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a sample: its metadata, and the length of its hidden states by layer.

    Of a ring it copies the newest sample and takes it from no reader.

    Examples:

    - `shmconn inspect out/hs_12.safetensors`
    - `shmconn inspect shards/shard-00000.safetensors --index 17 --png sample.png`
    - `shmconn inspect qwen`
    """
    from reader import inspect as look

    look.run(source, index=index, png=png, as_json=as_json)


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Look for what would get in the way on this host, and say what to change.

    Exit code 1 if something is bad.

    Examples:

    - `shmconn doctor`
    - `shmconn doctor --json | jq '.[] | select(.state != "ok")'`
    """
    from reader import doctor as checks

    raise typer.Exit(checks.run(as_json=as_json))


@app.command()
def bench(
    what: Annotated[
        str,
        typer.Argument(
            metavar="ring|files|input|growth", help="Hand-over, drain, batches, or scans."
        ),
    ] = "ring",
    sample_mib: Annotated[int, typer.Option(min=1, help="MiB of a sample.")] = 64,
    samples: Annotated[int, typer.Option(min=4, help="Samples of one measurement.")] = 24,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Measurements; the median counts. [ring 11, others 5]"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure speed beside plain copies and files, in one run. Exit code 1 if a goal is missed.

    Examples:

    - `shmconn bench`
    - `shmconn bench files --samples 12`
    - `shmconn bench input`
    - `shmconn bench ring --sample-mib 16 --json`
    - `shmconn bench growth`
    """
    if what not in ("ring", "files", "input", "growth"):
        raise OptionError(f"bench {what!r} is unknown: use ring, files, input or growth")
    import torch  # noqa: F401  # the processes of a bench would only say that they failed

    if what == "growth":
        from reader.bench.growth import run as growth

        raise typer.Exit(growth(json_out=as_json))
    if what == "ring":
        from reader.bench.ring import run
    elif what == "files":
        from reader.bench.files import run
    else:
        from reader.bench.input import run
    given = {} if repeats is None else {"repeats": repeats}
    raise typer.Exit(run(sample_mib=sample_mib, samples=samples, json_out=as_json, **given))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": False},
)
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a model, or its name.")],
    layers: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="Layers to hand over, e.g. 2,18,33,36. [2, n/2, n-3, n]"),
    ] = None,
    ring: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the ring; made up if left out.")
    ] = None,
    ring_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="E.g. 8GiB. [least of 8GiB, 1/4 of free memory]",
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(help="A group that is owed every sample from the first on; may be repeated."),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A further option of the connector."),
    ] = None,
    print_only: Annotated[
        bool, typer.Option("--print", help="Show vLLM's command line and stop.")
    ] = False,
) -> None:
    """Start vLLM's server so that it hands over hidden states. Flags after `--` go to vLLM.

    Examples:

    - `shmconn serve Qwen/Qwen3-8B --layers 2,18,33,36 --ring qwen --ring-size 8GiB`
    - `shmconn serve Qwen/Qwen3-8B --ring qwen -- --port 8123 --max-model-len 8192`
    - `shmconn serve Qwen/Qwen3-8B --print`
    """
    from reader.serve import ServeOptions, run

    options = ServeOptions(
        model=model,
        layers=layers,
        ring=ring,
        ring_size=ring_size,
        groups=tuple(group or ()),
        settings=tuple(setting or ()),
        print_only=print_only,
        vllm_flags=tuple(context.args),
    )
    raise typer.Exit(run(options))


@app.command()
def verify(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that `shmconn drain` wrote.")
    ],
    model: Annotated[str, typer.Option(metavar="PATH", help="The model that was served.")],
    sends: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The sender's log; without it missing samples go unseen."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the reference runs: cpu or cuda.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Check drained files against transformers running the same weights.

    Examples:

    - `shmconn verify out/ --model .cache/smollm2 --sends sends.jsonl`
    """
    from reader.verify import VerifyOptions, run

    options = VerifyOptions(
        directory=directory, model=model, sends=sends, json=as_json, device=device
    )
    raise typer.Exit(run(options))
