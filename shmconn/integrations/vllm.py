# SPDX-License-Identifier: Apache-2.0
"""vLLM's own way of reading hidden states, over a ring: a script changes its imports.

    from shmconn.integrations.vllm import LLM, cleanup_hidden_states, load_hidden_states

``LLM`` is vLLM's, with a background drain; a script that asks a server needs the loader alone.
"""

import atexit
import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shmconn.checksum import check
from shmconn.errors import (
    FileCorrupt,
    NotReady,
    OptionError,
    ProducerDied,
    RingMissing,
    SampleGone,
    SampleLost,
)
from shmconn.handle import Handle
from shmconn.integrations.drain import BackgroundDrain, DrainFull, active, tensors_of
from shmconn.subscription import Subscription, subscribe

if TYPE_CHECKING:
    import torch

    from shmconn.integrations.offline import LLM

__all__ = [
    "LLM",
    "BackgroundDrain",
    "DrainFull",
    "cleanup_hidden_states",
    "load_hidden_states",
]

LOADER_GROUP = "load-hidden-states"
_TIMEOUT_S = 300.0
_LOOK_S = 0.01


def load_hidden_states(source: Any, timeout: float = _TIMEOUT_S) -> "dict[str, torch.Tensor]":
    """A request's hidden states, in memory of their own.

    Args:
        source: the reply's ``kv_transfer_params``; the output that has them; the handle in them;
            or the path of a file that a drain, or vLLM's example connector, has written.
        timeout: seconds to wait for the sample.

    Returns:
        ``hidden_states`` ``[tokens, layers, hidden]`` and ``token_ids`` int64 ``[tokens]``.

    Raises:
        OptionError: none of these, or there is no such file.
        SampleLost, SampleGone, NotReady, ProducerDied: the sample did not come; see the classes.
        FileCorrupt: the file is not what was written.
        DrainFull: the background drain of this process had no room for it.
    """
    wanted = _parse(source)
    if isinstance(wanted, Path):
        return _load_file(wanted, timeout)
    drain = active.get(wanted.ring)
    if drain is not None:
        kept = drain.wait_for(wanted, timeout)
        return _load_file(kept, timeout, wanted) if isinstance(kept, Path) else dict(kept)
    return _load_by_handle(wanted, timeout)


def cleanup_hidden_states(source: Any, keep_hidden_states: bool = False) -> None:
    """Frees what a request's sample takes; to be called once it was loaded, or is not wanted.

    Args:
        source: as for ``load_hidden_states``.
        keep_hidden_states: leave a file where it is.
    """
    wanted = _parse(source)
    if isinstance(wanted, Path):
        Path(f"{wanted}.lock").unlink(missing_ok=True)
        for drain in active.values():
            if drain.folder == wanted.parent:
                drain.forget_file(wanted)
        if not keep_hidden_states:
            wanted.unlink(missing_ok=True)
        return
    drain_of = active.get(wanted.ring)
    if drain_of is not None:
        drain_of.drop(wanted, keep_file=keep_hidden_states)
        return
    # Not loaded: so it would lie in the ring until it expires.
    with contextlib.suppress(SampleGone, SampleLost, NotReady, ProducerDied, RingMissing):
        _subscription_of(wanted.ring).get(wanted, timeout=0).release()


def _parse(source: Any) -> Handle | Path:
    params = getattr(source, "kv_transfer_params", source)
    if isinstance(params, Mapping):
        path = params.get("hidden_states_path")
        if params.get("handle") is None and path:
            params = path
    if params is None:
        raise OptionError(
            "the reply has no kv_transfer_params: was vLLM started with ShmHiddenStatesConnector?"
        )
    if isinstance(params, os.PathLike) or (
        isinstance(params, str) and not params.startswith("shmconn:")
    ):
        return Path(params)
    return Handle.parse(params)


def _load_file(
    path: Path, timeout: float, handle: Handle | None = None
) -> "dict[str, torch.Tensor]":
    from safetensors import SafetensorError, safe_open

    with contextlib.suppress(FileNotFoundError), open(f"{path}.lock") as lock:
        # vLLM's example connector holds it until the file is whole; anybody may who can read it.
        deadline = time.monotonic() + timeout
        while not _shared(lock):
            if time.monotonic() >= deadline:
                raise NotReady(
                    f"{str(path)!r} is still locked by its writer after {timeout:g} s, or by "
                    f"another process (`lslocks` names it): wait longer, or remove {lock.name!r} "
                    "if no writer is left"
                )
            time.sleep(_LOOK_S)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
    except FileNotFoundError:
        raise OptionError(f"there is no file {str(path)!r}, and it is no handle either") from None
    except SafetensorError as error:
        raise FileCorrupt(str(path), "header", str(error)) from None
    if {"token_ids", "hidden_states"} <= tensors.keys():
        check(str(path), metadata, tensors["token_ids"], tensors["hidden_states"])
    if handle is not None and metadata.get("handle") != str(handle):
        raise FileCorrupt(str(path), "handle", f"is {metadata.get('handle')}, not {handle}")
    return tensors


def _shared(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- asked of the ring itself -------------------------------------------------------------------

_subscriptions: dict[tuple[int, str], Subscription] = {}


def _subscription_of(ring: str) -> Subscription:
    """This process's membership of the group of all loaders."""
    key = (os.getpid(), ring)
    if key not in _subscriptions:
        ours = subscribe(ring, LOADER_GROUP, by_handle=True)
        # Of two threads that come first, one joins in vain.
        if _subscriptions.setdefault(key, ours) is ours:
            atexit.register(ours.close)
        else:
            ours.close()
    return _subscriptions[key]


def _load_by_handle(wanted: Handle, timeout: float) -> "dict[str, torch.Tensor]":
    known = (os.getpid(), wanted.ring) in _subscriptions
    try:
        return tensors_of(_subscription_of(wanted.ring).get(wanted, timeout))
    except SampleGone as error:
        if known:
            raise
        raise SampleGone(
            f"{error}; or it was published before this process asked for the first one, while "
            f"other groups read the ring. Name the group in the connector's options: "
            f'"groups": [{{"name": "{LOADER_GROUP}", "by_handle": true}}]'
        ) from None
    except SampleLost as error:
        if error.reason != "no_reader":
            raise
        raise SampleLost(
            f"{error}: the ring was full and nobody read. A script that generates first and reads "
            "then needs `from shmconn.integrations.vllm import LLM`, a BackgroundDrain, or a "
            "larger ring_size",
            reason=error.reason,
            retry=error.retry,
        ) from None


def __getattr__(name: str) -> Any:
    # A client of a server has no vLLM.
    if name == "LLM":
        from shmconn.integrations.offline import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
