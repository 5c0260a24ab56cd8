# SPDX-License-Identifier: Apache-2.0
"""Runs speculators with the backend ``shm``.

    python -m shmconn.integrations.speculators train --hidden-states-backend shm ...
    torchrun --nproc-per-node 4 -m shmconn.integrations.speculators train ...
    python -m shmconn.integrations.speculators launch scripts/launch_vllm.py MODEL ...

The backend must be known before speculators is imported: so this comes first, then speculators'
own command line, or its script that starts vLLM.
"""

import runpy
import sys
from pathlib import Path

from shmconn.errors import OptionError


def main() -> None:
    """The command line. Exit codes are those of what it runs; 2 is bad input."""
    try:
        from shmconn.integrations import speculators_backend
    except ImportError as error:
        _fail(f"{error}: install speculators and hs-connectors 0.9 (pip install speculators)")
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        if command == "launch":
            _launch(sys.argv[2:])
        elif command == "train":
            from speculators.train.cli import main as train
            from speculators.train.config import TrainConfig

            sys.argv = ["speculators train", *sys.argv[2:]]
            train(TrainConfig.resolve(sys.argv[1:]))
        else:
            from speculators.cli import app

            app(prog_name=f"python -m {speculators_backend.__package__}.speculators")
    except OptionError as error:
        _fail(str(error))


def _launch(words: list[str]) -> None:
    if not words or not Path(words[0]).is_file():
        _fail(
            "launch takes speculators' script that starts vLLM, of its repository: "
            "launch scripts/launch_vllm.py MODEL --hidden-states-backend shm"
            + (f"; there is no file {words[0]!r}" if words else "")
        )
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _fail(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
