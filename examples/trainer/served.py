# SPDX-License-Identifier: Apache-2.0
"""`shmconn serve` on SmolLM2, on the CPU, for as long as a `with` block."""

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))

from processes import ENVIRONMENT, ROOT, Child, shm_files, unlink_unused
from rich.console import Console
from rich.markup import escape

from reader.loopback import ask
from shmconn.directory import groups, remove_group, remove_rings, rings
from shmconn.errors import OptionError, RingMissing

MODEL = ROOT / ".cache" / "smollm2"
START_S = 600
STOP_S = 60


class Served:
    """A vLLM server with a ring of its own.

    Args:
        name: what the ring's name begins with.
        folder: for the server's log.
        options: of `shmconn serve`, before the flags of vLLM.
        flags: of vLLM.
        model: folder of the model.
    """

    def __init__(
        self, name: str, folder: Path, options: list[str], flags: list[str], model: Path = MODEL
    ) -> None:
        if not (model / "config.json").is_file():
            raise SystemExit(f"there is no model in {model}: `make model` makes it")
        self.ring = f"{name}-{os.getpid()}"
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._before = shm_files()
        command = [
            *(str(Path(sys.executable).with_name("shmconn")), "serve", str(model)),
            *("--ring", self.ring, *options, "--", "--host=127.0.0.1", f"--port={port}"),
            *("--served-model-name=model", "--enforce-eager", *flags),
        ]
        folder.mkdir(parents=True, exist_ok=True)
        self.process = Child("server", command, folder / "server.log", ENVIRONMENT)

    def __enter__(self) -> "Served":
        try:
            self._wait()
        except BaseException:
            self._end()
            raise
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        with Console().status("vLLM starts") as status:
            while not self._answers():
                if self.process.code is not None or time.monotonic() > deadline:
                    print("\n".join(self.process.tail(20)), file=sys.stderr)
                    raise SystemExit(f"vLLM does not serve: {self.process.log} says why")
                self.process.look()
                status.update(f"vLLM starts · {escape(self.process.last_line()[:80])}")
                time.sleep(0.5)
        self.process.look()

    def _answers(self) -> bool:
        try:
            ask(f"{self.url}/health", 5)
        except OSError:
            return False
        return True

    @property
    def published(self) -> int:
        """Samples that are in the ring, or were."""
        return sum(ring.published for ring in rings(self.ring))

    @property
    def full(self) -> float:
        """Which part of the ring is in use."""
        return max((1 - ring.free_pages / ring.pages for ring in rings(self.ring)), default=0.0)

    def stop(self) -> None:
        """A clean end: what was published can still be read, then readers' streams end."""
        self.process.terminate()
        if self.process.wait(STOP_S) != 0:
            raise SystemExit(f"vLLM did not end well: {self.process.log} says why")

    def _end(self) -> None:
        """Ends what still runs, and frees what a killed process could not."""
        self.process.end(STOP_S)
        with contextlib.suppress(RingMissing, OptionError):
            for group in groups(self.ring):
                if group.name and not group.alive:
                    remove_group(self.ring, group.name)
        with contextlib.suppress(RingMissing):
            remove_rings(self.ring, force=True)
        new = {name: inode for name, inode in shm_files().items() if name not in self._before}
        unlink_unused(name for name, inode in new.items() if inode in self.process.shm)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
