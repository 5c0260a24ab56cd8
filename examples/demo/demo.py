# SPDX-License-Identifier: Apache-2.0
"""The main job on real input: vLLM serves, a ring carries, a drain writes, verify checks.

    make demo                   # float32, so that verify can be sharp
    make demo DTYPE=bfloat16    # as people run it

It exits 0 when every sample is there and right, 1 when something is not, 130 after Ctrl-C, and
leaves no process and nothing in /dev/shm in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from processes import ENVIRONMENT, ROOT, Child, shm_files, unlink_unused
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from send import AT_ONCE, TIMES, Prompt, read_prompts, send_all

from reader.loopback import ask
from shmconn.directory import remove_group, remove_rings, rings
from shmconn.errors import OptionError, RingMissing

HERE = Path(__file__).resolve().parent
MODEL = ROOT / ".cache" / "smollm2"
LAYERS = "8,15,22,30"
# Small on purpose: 48 samples go through it, so it wraps around several times.
RING_SIZE = "16MiB"
GROUP = "demo"
DTYPES = ("float32", "bfloat16")
SERVER_FLAGS = [
    "--served-model-name=smollm2",
    "--host=127.0.0.1",
    # The longest sample that a third of the ring holds is a little longer.
    "--max-model-len=512",
    # A step of 256 tokens, so that the long prompts take several.
    "--max-num-batched-tokens=256",
    "--max-num-seqs=8",
    # Compiling takes more than a minute and gains nothing here.
    "--enforce-eager",
    "--enable-chunked-prefill",
    "--enable-prefix-caching",
]
# A busy machine takes several times the minute that this takes alone.
START_TIMEOUT_S = 600.0
SHUTDOWN_TIMEOUT_S = 60.0
DRAIN_TIMEOUT_S = 60.0
# vLLM unlinks its own shared memory when it is given the time.
CLEANUP_GRACE_S = 40.0
FREE_TIMEOUT_S = 20.0

console = Console(highlight=False)


class DemoError(Exception):
    """The demo cannot go on; `child` is the process whose log says why."""

    def __init__(self, message: str, child: Child | None = None) -> None:
        super().__init__(message)
        self.child = child


class Demo:
    """One run: a ring name, a folder and a port of its own, so that several may run at once."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.ring = f"demo-{os.getpid()}-{secrets.token_hex(3)}"
        self.folder = ROOT / "out" / self.ring
        self.files = self.folder / "files"
        self.sends = self.folder / "sends.jsonl"
        self.port = _free_port()
        self.children: list[Child] = []
        self.shm_before = shm_files()

    def start(self, name: str, arguments: list[str]) -> Child:
        """Run `shmconn ARGUMENTS` in the background, with a log."""
        command = [str(Path(sys.executable).with_name("shmconn")), *arguments]
        console.print(f"  [dim]$ shmconn {escape(_shown(arguments))}[/]", soft_wrap=True)
        environment = {**ENVIRONMENT, "NO_COLOR": "1"}
        child = Child(name, command, self.folder / f"{name}.log", environment)
        self.children.append(child)
        return child

    def start_server(self) -> Child:
        """vLLM, with the ring."""
        flags = [*SERVER_FLAGS, f"--dtype={self.dtype}", f"--port={self.port}"]
        options = ["--layers", LAYERS, "--ring", self.ring, "--ring-size", RING_SIZE]
        return self.start("server", ["serve", str(MODEL), *options, "--group", GROUP, "--", *flags])

    def start_drain(self) -> Child:
        """The reader: another process, which waits for the ring."""
        wait = str(int(START_TIMEOUT_S))
        options = ["--to", str(self.files), "--group", GROUP, "--wait", wait]
        return self.start("drain", ["drain", self.ring, *options])

    def wait_until_served(self, server: Child, drain: Child, status: Status) -> None:
        """Until the server answers; its last log line is shown meanwhile."""
        started = time.monotonic()
        while not _answers(f"http://127.0.0.1:{self.port}/health"):
            waited = time.monotonic() - started
            self.check_alive(server, drain)
            if waited > START_TIMEOUT_S:
                raise DemoError(f"the server does not answer after {waited:.0f} s", server)
            line = server.last_line()[: max(20, console.width - 30)]
            _line(status, f"vLLM starts, {waited:3.0f} s  [dim]{escape(line)}[/]")
            server.look()
            time.sleep(0.5)
        server.look()

    def check_alive(self, *children: Child) -> None:
        """Raise if a process that must run has ended."""
        for child in children:
            if child.code is not None:
                raise DemoError(f"the {child.name} ended early with code {child.code}", child)

    async def send(self, prompts: list[Prompt], server: Child, drain: Child, status: Status) -> int:
        """All prompts; meanwhile the line shows answers, files and the ring."""
        total = TIMES * len(prompts)
        count = 0

        def answered(number: int) -> None:
            nonlocal count
            count = number

        url = f"http://127.0.0.1:{self.port}/v1"
        sending = asyncio.create_task(send_all(url, prompts, self.sends, answered))
        try:
            while not sending.done():
                _line(status, f"answered {count}/{total} · {self.progress()}")
                self.check_alive(server, drain)
                server.look()
                await asyncio.wait({sending}, timeout=0.3)
            return len(await sending)
        except BaseExceptionGroup as errors:
            # A dead server is the better explanation of a broken connection.
            server.wait(2)
            self.check_alive(server, drain)
            raise DemoError(f"a request failed: {errors.exceptions[0]}", server) from errors
        finally:
            sending.cancel()

    def progress(self) -> str:
        """Files written, and how full the ring is."""
        files = sum(1 for _ in self.files.glob("*.safetensors"))
        states = [
            f"ring {100 * (ring.pages - ring.free_pages) // max(1, ring.pages)} % full"
            for ring in rings(self.ring)
            if ring.live
        ]
        return " · ".join([f"{files} files", *states])

    def stop(self, server: Child, drain: Child, status: Status) -> None:
        """SIGTERM to vLLM; the drain ends by itself when it has read everything."""
        server.terminate()
        for child, limit in ((server, SHUTDOWN_TIMEOUT_S), (drain, DRAIN_TIMEOUT_S)):
            until = time.monotonic() + limit
            while (code := child.wait(0.3)) is None:
                _line(status, f"the {child.name} ends · {self.progress()}")
                if time.monotonic() > until:
                    raise DemoError(f"the {child.name} still runs {limit:.0f} s later", child)
            if code != 0:
                raise DemoError(f"the {child.name} ended with code {code}", child)

    def verify(self) -> bool:
        """`shmconn verify` over all files, in this terminal."""
        options = ["--model", str(MODEL), "--sends", str(self.sends)]
        arguments = ["verify", str(self.files), *options]
        console.print(f"  [dim]$ shmconn {escape(_shown(arguments))}[/]", soft_wrap=True)
        command = [str(Path(sys.executable).with_name("shmconn")), *arguments]
        environment = {**os.environ, **ENVIRONMENT}
        return subprocess.run(command, env=environment, check=False).returncode == 0

    def prefix_hits(self) -> tuple[int, int]:
        """Prompt tokens that came from vLLM's prefix cache, and all of them."""
        text = ask(f"http://127.0.0.1:{self.port}/metrics", 10)

        def total(name: str) -> int:
            found = re.findall(rf"^vllm:{name}_total\{{.*\}} ([0-9.e+]+)$", text, re.MULTILINE)
            return int(sum(float(value) for value in found))

        return total("prefix_cache_hits"), total("prefix_cache_queries")

    def leftovers(self) -> list[str]:
        """What this run left behind: processes, and files in /dev/shm."""
        members = [(child.name, child.members()) for child in self.children]
        processes = [f"process {pid} of the {name}" for name, pids in members for pid in pids]
        return [f"/dev/shm/{name}" for name in self.own_shm()] + processes

    def own_shm(self) -> list[str]:
        """New files in /dev/shm that are this run's; other programs come and go meanwhile."""
        ours = set().union(*(child.shm for child in self.children))
        new = {name: inode for name, inode in shm_files().items() if name not in self.shm_before}
        return sorted(name for name, inode in new.items() if inode in ours or self.ring in name)

    def clean_up(self) -> None:
        """End every process that is left, then free what a killed one could not."""
        # The server first: a drain ends by itself when its ring does.
        for child in reversed(self.children):
            if child.members():
                console.print(f"  the {child.name} is told to end, up to {CLEANUP_GRACE_S:.0f} s")
                child.end(CLEANUP_GRACE_S)
        # The kernel needs a moment to take down a killed process, and with it what it held.
        until = time.monotonic() + FREE_TIMEOUT_S
        while self.leftovers() and time.monotonic() < until:
            self._free()
            time.sleep(0.2)
        if left := self.leftovers():
            console.print(f"[red]left behind: {escape(', '.join(left))}[/]")

    def _free(self) -> None:
        """Remove this run's group and ring, and what a killed vLLM leaves."""
        # Mostly both are gone by now, or have just gone.
        with contextlib.suppress(RingMissing, OptionError):
            remove_group(self.ring, GROUP)
        with contextlib.suppress(RingMissing):
            remove_rings(self.ring, force=True)
        vllms = [name for name in self.own_shm() if name.startswith(("psm_", "sem.mp-"))]
        for name in unlink_unused(vllms):
            console.print(f"  removed /dev/shm/{name}, which the killed vLLM had left")


def main() -> int:
    """Every stage in order. Returns the exit code."""
    dtype = os.environ.get("DTYPE") or "float32"
    if dtype not in DTYPES:
        console.print(f"[red]DTYPE={escape(dtype)} is unknown: use one of {', '.join(DTYPES)}[/]")
        return 2
    # A shell without job control starts background commands deaf to Ctrl-C; its children need it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _interrupt)
    demo = Demo(dtype)
    ok = False
    try:
        ok = run(demo)
    except DemoError as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}")
        if error.child is not None:
            console.print(f"the end of {error.child.log}:", style="red")
            console.print("\n".join(error.child.tail(40)), markup=False, style="dim")
    except KeyboardInterrupt:
        console.print("\n[yellow]interrupted: cleaning up[/]")
        _clean_up(demo)
        return 130
    _clean_up(demo)
    return 0 if ok else 1


def run(demo: Demo) -> bool:
    """The stages; whether every sample is there and right, and nothing is left behind."""
    prompts = read_prompts(HERE / "prompts")
    demo.files.mkdir(parents=True)
    began = time.monotonic()
    with stage(1, f"vLLM serves SmolLM2-135M in {demo.dtype}; a drain waits beside it") as status:
        drain = demo.start_drain()
        server = demo.start_server()
        demo.wait_until_served(server, drain, status)
    with stage(2, f"{len(prompts)} prompts are sent {TIMES} times, {AT_ONCE} at once") as status:
        sent = asyncio.run(demo.send(prompts, server, drain, status))
        hits, tokens = demo.prefix_hits()
        console.print(
            f"  {sent} replies; {hits:,} of {tokens:,} prompt tokens from the prefix cache"
        )
    with stage(3, "vLLM is told to end (SIGTERM); the drain reads the rest and ends") as status:
        demo.stop(server, drain, status)
        console.print(f"  drain: {escape(_relative(drain.last_line()))}", soft_wrap=True)
    with stage(4, "every file is checked against transformers in float32"):
        ok = demo.verify()
    with stage(5, "what is left behind?"):
        left = demo.leftovers()
        console.print(f"  [red]{escape(', '.join(left))}[/]" if left else "  nothing")
    size = sum(file.stat().st_size for file in demo.files.iterdir())
    console.print(
        f"{'[bold green]done' if ok and not left else '[bold red]failed'}[/] after "
        f"{time.monotonic() - began:.0f} s; {size / 2**20:.0f} MiB of files and the logs are in "
        f"{demo.folder.relative_to(ROOT)}"
    )
    return ok and not left


@contextlib.contextmanager
def stage(number: int, title: str) -> Iterator[Status]:
    """Announce a stage, show a live line while it runs, and say how long it took."""
    console.print(f"[bold cyan]{number}/5[/] [bold]{title}[/]")
    began = time.monotonic()
    # Nothing is drawn until somebody updates it: a stage may leave the terminal to a child.
    status = console.status("")
    try:
        yield status
    finally:
        status.stop()
    console.print(f"  [dim]{time.monotonic() - began:.0f} s[/]")


def _line(status: Status, text: str) -> None:
    status.update(text)
    status.start()


def _clean_up(demo: Demo) -> None:
    # An impatient second Ctrl-C would leave a killed vLLM's memory behind.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    demo.clean_up()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _shown(arguments: list[str]) -> str:
    """A command as one would type it in the project's folder."""
    return _relative(shlex.join(arguments))


def _relative(text: str) -> str:
    return text.replace(f"{ROOT}/", "")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    try:
        ask(url, 2)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
