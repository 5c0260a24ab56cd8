# SPDX-License-Identifier: Apache-2.0
"""The HTTP server of a drain's metrics: whatever clients do, it takes little of the drain.

A drain lives on descriptors and threads, and each connection takes one of both. So there are few at
a time, none lasts long, and a new one is always let in: the oldest makes room for it.
"""

import contextlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from shmconn.errors import ShmConnError

MAX_CONNECTIONS = 16
_SILENCE_S = 10.0  # that a connection may keep, until it is closed
_ROOM_S = 1.0  # that a new connection waits for the oldest one's end
_NO_DESCRIPTOR_S = 0.5  # between two tries to accept where the process has no descriptor left

log = logging.getLogger("shmconn.drain")

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves an application until it is closed.

    Args:
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        app: what answers, a WSGI application.

    Raises:
        OSError: the port cannot be had.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: App) -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        self._changed = threading.Condition()
        self._open: dict[int, socket.socket] = {}  # the oldest first
        self._told = ""
        super().__init__(address[:2], _Handler)  # type: ignore[arg-type]
        self.set_app(self._guarded(app))
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return int(self.server_address[1])

    def stop(self) -> None:
        """Stop to listen."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def get_request(self) -> Any:
        """The next connection."""
        try:
            return super().get_request()
        except OSError:
            # It stays in line, and would be asked for again without a pause.
            time.sleep(_NO_DESCRIPTOR_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; the oldest connection goes where there are too many."""
        with self._changed:
            if len(self._open) >= MAX_CONNECTIONS:
                with contextlib.suppress(OSError):  # its client was quicker
                    next(iter(self._open.values())).shutdown(socket.SHUT_RDWR)
            # Its thread closes it: until then the next one would be one too many.
            if not self._changed.wait_for(lambda: len(self._open) < MAX_CONNECTIONS, _ROOM_S):
                super().shutdown_request(request)
                return
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(id(request), None)
            self._changed.notify_all()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away, or keeps silent, is no news; what else fails is said."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            log.warning("a connection of the metrics failed: %r", error)

    def _guarded(self, app: App) -> App:
        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            try:
                return app(environ, start_response)
            except (OSError, ShmConnError) as error:
                if str(error) != self._told:
                    log.warning("the metrics cannot be shown: %s", error)
                self._told = str(error)
                start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
                return [f"{error}\n".encode()]

        return answer


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are no news."""
