# SPDX-License-Identifier: Apache-2.0
"""Tells systemd how a service is, by the datagram that ``sd_notify(3)`` describes."""

import contextlib
import os
import socket


def notify(state: str) -> bool:
    """Send a state such as ``READY=1``; false where no service manager listens."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    # A manager that went away must not stop the drain.
    with (
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
    ):
        sender.sendto(state.encode(), address)
        return True
    return False
