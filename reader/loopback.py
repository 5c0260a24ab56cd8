# SPDX-License-Identifier: Apache-2.0
"""Requests to a server of this host, whatever proxy the environment names.

On clusters ``http_proxy`` and ``ALL_PROXY`` are often set, and a proxy cannot reach our loopback.
"""

import urllib.request

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
# For a child that asks this host alone. With a star also httpx looks at no proxy at all, not even
# at one of SOCKS, for which it would want another package.
NO_PROXY = {"no_proxy": "*", "NO_PROXY": "*"}


def ask(url: str, timeout_s: float) -> str:
    """The body of a reply.

    Raises:
        OSError: nobody answers, or not with success.
    """
    with _DIRECT.open(url, timeout=timeout_s) as reply:
        text: bytes = reply.read()
    return text.decode()
