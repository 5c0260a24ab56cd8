# SPDX-License-Identifier: Apache-2.0
"""What the service says while it runs: text for people, or one JSON object a line."""

import json
import logging
import logging.handlers
import time
from typing import Any

from rich.console import Console
from rich.text import Text

_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


class ConsoleHandler(logging.Handler):
    """Prints through the console that shows the progress, so that the two do not mix."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        style = _STYLES.get(record.levelname, "")
        self._console.print(Text(self.format(record), style=style), soft_wrap=True)


class JsonFormatter(logging.Formatter):
    """One JSON object a line; what was passed as ``extra={"fields": {...}}`` is beside the text."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """UTC, ISO 8601, with milliseconds."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        return f"{stamp}.{int(record.msecs):03d}Z"


class Logs:
    """Sends the log where the user wants it."""

    def __init__(self, console: Console, *, as_json: bool, file: str | None) -> None:
        handler: logging.Handler
        if file is not None:
            handler = logging.handlers.WatchedFileHandler(file, encoding="utf-8")
        elif as_json:
            handler = logging.StreamHandler(console.file)
        else:
            handler = ConsoleHandler(console)
        if as_json:
            handler.setFormatter(JsonFormatter())
        elif file is not None:
            handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        self._handler = handler
        self._logger = logging.getLogger("shmconn")
        self._logger.setLevel(logging.INFO)
        self._logger.addHandler(handler)
        self._logger.propagate = False

    def reopen(self) -> None:
        """Open the log file anew, after a rotation."""
        if isinstance(self._handler, logging.handlers.WatchedFileHandler):
            self._handler.reopenIfNeeded()

    def close(self) -> None:
        """Take the handler off again."""
        self._logger.removeHandler(self._handler)
        self._logger.propagate = True
        self._handler.close()
