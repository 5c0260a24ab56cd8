# SPDX-License-Identifier: Apache-2.0
"""What the service says while it runs: text for people, or one JSON object a line."""

import contextlib
import json
import logging
import logging.handlers
import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from shmconn.errors import OptionError

_STYLES = {"WARNING": "yellow", "ERROR": "red", "CRITICAL": "red"}


class LastingStream:
    """A stream whose other end may go away: then what is written to it is lost, and no more.

    A closed pipe or terminal must not end a drain, whose samples would be taken for delivered.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        """Write, if there is still somebody to read."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, likewise."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The descriptor, by which the width of a terminal is asked for."""
        return self._stream.fileno()


def stderr_console() -> Console:
    """A console on stderr that outlives whoever reads it."""
    if sys.stderr is None:
        return Console(stderr=True, highlight=False)
    stream: Any = LastingStream(sys.stderr)
    return Console(file=stream, highlight=False)


class _LogFile(logging.handlers.WatchedFileHandler):
    """A log file; one that cannot be opened anew or written to costs lines, not the drain."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        with contextlib.suppress(OSError):
            super().emit(record)

    def reopen(self) -> None:
        """Open the file anew, after a rotation."""
        with contextlib.suppress(OSError):
            self.reopenIfNeeded()

    def handleError(self, record: logging.LogRecord) -> None:
        """A disk without room would have a traceback for each line on stderr."""


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
    """Sends the log where the user wants it.

    Raises:
        OptionError: the log file cannot be opened.
    """

    def __init__(self, console: Console, *, as_json: bool, file: str | None) -> None:
        handler: logging.Handler
        if file is not None:
            try:
                handler = _LogFile(file, encoding="utf-8")
            except OSError as error:
                raise OptionError(
                    f"cannot write to --log-file {file!r}: {error.strerror or error}"
                ) from None
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
        if isinstance(self._handler, _LogFile):
            self._handler.reopen()

    def close(self) -> None:
        """Take the handler off again."""
        self._logger.removeHandler(self._handler)
        self._logger.propagate = True
        self._handler.close()
