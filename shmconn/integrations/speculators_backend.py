# SPDX-License-Identifier: Apache-2.0
"""speculators' hidden-states backend ``shm``: samples come out of a ring, by handle.

Importing this module registers it with hs_connectors. speculators collects the flags of backends
when it is imported, so this comes first: ``python -m shmconn.integrations.speculators`` does that.

The tensors that ``get_generated`` gives are views of the ring. speculators calls ``delete`` before
it uses them, so ``delete`` does not end them: the lease ends with the last tensor, when the batch
is collated. Beyond this process's share of the ring it gives copies, so that workers that hold half
a batch each can never fill the ring and wait for one another.
"""

import argparse
import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from hs_connectors import FileTransfer, HiddenStatesBackend
from safetensors import SafetensorError, safe_open

from shmconn import layout
from shmconn.checksum import check
from shmconn.config import ConnectorConfig
from shmconn.errors import (
    FileCorrupt,
    NotReady,
    OptionError,
    ProducerDied,
    RegistryFull,
    RingMissing,
    SampleGone,
    SampleLost,
)
from shmconn.handle import Handle, check_name
from shmconn.plugin import NAME
from shmconn.sample import Sample
from shmconn.subscription import Subscription, subscribe

DEFAULT_GROUP = "speculators"
DEFAULT_TIMEOUT_S = 60.0
# All members together hold at most this part of the ring as views.
_SHARE = 2
# Handles that were deleted before their sample was there, and how many of them are remembered.
_REMEMBERED = 4096


class ShmTransfer(FileTransfer):  # type: ignore[misc]
    """What speculators' dataset reads samples with. Picklable; opens nothing before it is used.

    Files ``hs_{row}.safetensors`` in ``hidden_states_path``, as ``shmconn drain`` writes them, are
    served first.

    Args:
        hidden_states_path: folder of such files; it need not be there.
        ring: name of the ring; ``None``: the one that the first reply names.
        group: the by-handle group of all ranks and workers of this training.
        timeout_s: how long a reply's sample is waited for.

    Raises:
        OptionError: an argument is wrong.
    """

    def __init__(
        self,
        hidden_states_path: Path,
        *,
        ring: str | None = None,
        group: str = DEFAULT_GROUP,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(hidden_states_path)
        self.ring = None if ring is None else check_name(ring)
        self.group = check_name(group, "group")
        if not timeout_s > 0:
            raise OptionError(f"shm-timeout {timeout_s} must be more than 0 seconds")
        self.timeout_s = timeout_s
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._subscription: Subscription | None = None
        self._given: deque[str] = deque(maxlen=_REMEMBERED)
        self._unwanted: deque[Handle] = deque(maxlen=_REMEMBERED)
        self._views: list[tuple[weakref.ref[Any], int]] = []

    def __getstate__(self) -> dict[str, Any]:
        own = ("_pid", "_subscription", "_given", "_unwanted", "_views")
        return {key: value for key, value in self.__dict__.items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()

    # --- what speculators calls -----------------------------------------------------------------

    def setup(self) -> None:
        """Joins the group, if the ring's name is known; may be called again."""
        if self.ring is not None:
            self._open(self.ring)

    def get_cached(self, file_idx: int) -> dict[str, Any] | None:
        """The sample of a row out of its file; None if there is no file.

        Raises:
            FileCorrupt: the file is not what a drain wrote, or another row's.
        """
        path = self.hidden_states_path / f"hs_{file_idx}.safetensors"
        try:
            cached: dict[str, Any] | None = super().get_cached(file_idx)
            if cached is None:
                return None
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
        except SafetensorError as error:
            raise FileCorrupt(str(path), "header", str(error)) from None
        check(str(path), metadata, cached["token_ids"], cached["hidden_states"])
        tag = metadata.get("tag")
        if tag and tag != path.stem:
            raise FileCorrupt(str(path), "tag", f"is {tag!r}: it is another row's")
        return cached

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Any]:
        """The sample of a reply: ``hidden_states`` ``[tokens, layers, hidden]`` and ``token_ids``.

        Raises:
            OptionError: the reply is of another connector, or of another ring.
            SampleLost, SampleGone, NotReady, ProducerDied: there is no sample; see the classes.
        """
        wanted = _parse(hs_transfer_params)
        if self.ring not in (None, wanted.ring):
            raise OptionError(
                f"the reply is of ring {wanted.ring!r} and --shm-ring is {self.ring!r}: is "
                "--vllm-endpoint the vLLM that fills it?"
            )
        subscription = self._open(wanted.ring)
        self._drop_unwanted(subscription)
        sample = subscription.get(wanted, self.timeout_s)
        if not self._may_view(subscription, sample):
            copy = sample.clone()
            sample.release()
            sample = copy
        self._given.append(str(wanted))
        return {"hidden_states": sample.hidden_states, "token_ids": sample.token_ids}

    def delete(self, handle: str) -> None:
        """Gives a sample up that was not read; of one that was, only its tensors are left."""
        with contextlib.suppress(ValueError):
            self._given.remove(handle)
            return
        if not handle.startswith("shmconn:"):
            return
        unwanted = Handle.parse(handle)
        self._unwanted.append(unwanted)
        self._drop_unwanted(self._open(unwanted.ring))

    # --- how ------------------------------------------------------------------------------------

    def _open(self, ring: str) -> Subscription:
        if self._pid != os.getpid():
            self._begin()
        if self._subscription is None:
            try:
                self._subscription = subscribe(ring, self.group, by_handle=True)
            except RegistryFull as error:
                raise RegistryFull(
                    f"{error}. Each DataLoader worker is one, in the loaders for training and for "
                    "validation, on each rank: lower --num-workers"
                ) from None
            except RingMissing as error:
                raise RingMissing(
                    f"{error}. vLLM with the ring is started before the training"
                ) from None
            # The end of a worker is no death; and a worker of torch ends by os._exit.
            Finalize(None, self._subscription.close, exitpriority=1)
        if self._subscription.name != ring:
            raise OptionError(
                f"the reply is of ring {ring!r}, an earlier one was of "
                f"{self._subscription.name!r}: one training reads one ring"
            )
        return self._subscription

    def _drop_unwanted(self, subscription: Subscription) -> None:
        for _ in range(len(self._unwanted)):
            unwanted = self._unwanted.popleft()
            try:
                subscription.get(unwanted, timeout=0).release()
            except NotReady:
                self._unwanted.append(unwanted)
            except (SampleLost, SampleGone, ProducerDied):
                continue

    def _may_view(self, subscription: Subscription, sample: Sample) -> bool:
        """Whether this process's share of the ring allows one more view."""
        self._views = [(ref, pages) for ref, pages in self._views if ref() is not None]
        member = subscription._member
        view = subscription._views.live.get(sample.handle.generation)
        if view is None or view.ring.words.load(layout.HELD_SINCE):
            return False
        shape = view.ring.shape
        parts = _SHARE * max(1, len(member.registry.joined(member.group)))
        buffer = sample._live()
        pages = -(-len(buffer) // shape.page_size)
        if (
            sum(held for _, held in self._views) + pages > shape.pages // parts
            or len(self._views) + 1 > shape.slots // parts
        ):
            return False
        self._views.append((weakref.ref(buffer), pages))
        return True


@HiddenStatesBackend.register("shm")
class ShmBackend(HiddenStatesBackend):  # type: ignore[misc]
    """The backend ``shm`` of ``--hidden-states-backend``.

    Flags that are not given are taken from SHMCONN_RING, SHMCONN_GROUP, SHMCONN_TIMEOUT and
    SHMCONN_RING_SIZE.
    """

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """Flags of ``train``."""
        _add(parser, "--hidden-states-path", type=str, help=_PATH_HELP)
        _add(parser, "--shm-ring", type=str, help="Ring to read; default: what vLLM's reply names.")
        _add(parser, "--shm-group", type=str, help=f"Reader group; default {DEFAULT_GROUP}.")
        _add(
            parser,
            "--shm-timeout",
            type=float,
            help=f"Seconds to wait for a reply's sample; default {DEFAULT_TIMEOUT_S:g}.",
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """Flags of ``launch_vllm.py``."""
        _add(parser, "--shm-ring", type=str, help="Name of the ring; default: of vLLM's making.")
        _add(parser, "--shm-ring-size", type=str, help="Size of the ring, like 8GiB.")
        _add(parser, "--shm-group", type=str, help=f"Reader group; default {DEFAULT_GROUP}.")

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> ShmTransfer:
        """The transfer that these flags ask for.

        Raises:
            OptionError: a flag has a value that it cannot have.
        """
        files = getattr(args, "hidden_states_path", None)
        return ShmTransfer(
            Path(files) if files else Path(data_path) / "hidden_states",
            ring=_value(args, "shm_ring"),
            group=_value(args, "shm_group") or DEFAULT_GROUP,
            timeout_s=_value(args, "shm_timeout", _seconds) or DEFAULT_TIMEOUT_S,
        )

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config``.

        Raises:
            OptionError: a flag has a value that it cannot have.
        """
        group = _value(args, "shm_group") or DEFAULT_GROUP
        # There from the first request on: so nothing is missed, and nothing waits for ever.
        extra: dict[str, Any] = {"groups": [{"name": group, "by_handle": True}]}
        for option in ("ring", "ring_size"):
            value = _value(args, f"shm_{option}")
            if value is not None:
                extra[option] = value
        ConnectorConfig.parse(extra)
        return {
            "kv_connector": NAME,
            "kv_role": "kv_producer",
            "kv_connector_module_path": "shmconn.connector",
            "kv_connector_extra_config": extra,
        }


_PATH_HELP = (
    "The path where cached hidden states files are stored. "
    "(Default: args.data_path / 'hidden_states')"
)


def _add(parser: argparse.ArgumentParser, flag: str, **options: Any) -> None:
    """Adds a flag, unless another backend has one with its name."""
    dest = flag.lstrip("-").replace("-", "_")
    if not any(action.dest == dest for action in parser._actions):
        parser.add_argument(flag, default=None, **options)


def _value(args: argparse.Namespace, name: str, kind: Callable[[str], Any] = str) -> Any:
    """A flag's value, or that of its environment variable, or None."""
    value = getattr(args, name, None)
    if value is not None:
        return value
    variable = f"SHMCONN_{name.removeprefix('shm_').upper()}"
    text = os.environ.get(variable)
    try:
        return kind(text) if text else None
    except ValueError as error:
        raise OptionError(f"{variable} {text!r}: {error}") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise OptionError("is no number of seconds") from None


def _parse(params: dict[str, Any]) -> Handle:
    if not params.get("handle") and params.get("hidden_states_path"):
        raise OptionError(
            f"the reply names a file, {params['hidden_states_path']!r}, not a handle: vLLM runs "
            f"with another connector. Start it with {NAME}, or train with "
            "--hidden-states-backend file"
        )
    return Handle.parse(params)
