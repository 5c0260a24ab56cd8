# SPDX-License-Identifier: Apache-2.0
"""`python -m reader.bench.speculators_train STEPS DEVICE train ...`: speculators' own train, whose
steps are written down.

Each record of speculators' metric logger becomes one line of JSON in the file STEPS, with the time
of day. speculators takes any accelerator and no CPU: DEVICE cpu stands in for one, to rehearse.
"""

import json
import logging
import sys
import time
from typing import Any, TextIO


class _Steps(logging.Handler):
    """Writes speculators' metrics to a file."""

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        """One step, or one validation."""
        if isinstance(record.msg, dict):
            line = json.dumps({"at": time.time(), **record.msg}, default=str)
            print(line, file=self._file, flush=True)


def _record(file: TextIO) -> None:
    """Adds the handler after speculators' own set-up, which removes what was there."""
    from speculators.train import cli

    set_up = cli.setup_metric_logger

    def set_up_and_record(*args: Any, **kwargs: Any) -> None:
        set_up(*args, **kwargs)
        logging.getLogger("speculators.metrics").addHandler(_Steps(file))

    cli.setup_metric_logger = set_up_and_record


def _stand_in() -> None:
    """Lets the CPU be the accelerator."""
    import torch
    from speculators.train import trainer

    def nothing(*_: Any) -> None:
        pass

    torch.accelerator.synchronize = nothing
    trainer.get_local_rank = lambda: torch.device("cpu")


def main() -> None:
    """Runs `python -m shmconn.integrations.speculators` with the rest of the words."""
    steps, device, *words = sys.argv[1:]
    # The backend must be known before speculators is imported.
    from shmconn.integrations import speculators, speculators_backend  # noqa: F401

    with open(steps, "w") as file:
        _record(file)
        if device == "cpu":
            _stand_in()
        sys.argv = ["shmconn.integrations.speculators", *words]
        speculators.main()


if __name__ == "__main__":
    main()
