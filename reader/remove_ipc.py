# SPDX-License-Identifier: Apache-2.0
"""Whether systemd-logind removes a user's shared memory when the user's last session ends."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Earlier ones win, also over a drop-in of the same name (logind.conf(5)).
_FOLDERS = ("etc", "run", "usr/local/lib", "usr/lib", "lib")
_YES, _NO = {"1", "yes", "y", "true", "t", "on"}, {"0", "no", "n", "false", "f", "off"}
_SYSTEM_UID_MAX = 999  # where /etc/login.defs does not say


@dataclass(frozen=True)
class RemoveIpc:
    """``removes``: whether the user's shared memory goes at logout. ``why``: what says so."""

    removes: bool
    why: str


def remove_ipc(uid: int, user: str, root: Path = Path("/")) -> RemoveIpc | None:
    """What logind does with a user's shared memory; None where no logind runs.

    Args:
        uid: number of the user.
        user: name of the user.
        root: the folder to look in, for tests.
    """
    if not (root / "run/systemd/seats").is_dir():
        return None
    most = _system_uid_max(root / "etc/login.defs")
    if uid <= most:
        return RemoveIpc(False, f"uid {uid} is a system user (up to {most})")
    if (root / "var/lib/systemd/linger" / user).exists():
        return RemoveIpc(False, f"{user} lingers")
    # What logind was built with, unless the comments of its shipped file say otherwise.
    removes, why = True, "RemoveIPC=yes is logind's default"
    for path in _files(root):
        for line in path.read_text(errors="replace").splitlines():
            key, _, value = line.strip().partition("=")
            shipped = key == "#RemoveIPC" and path.name == "logind.conf"
            value = value.strip().lower()
            if (key.strip() == "RemoveIPC" or shipped) and value in _YES | _NO:
                removes, why = value in _YES, f"{line.strip()} in {path}"
    return RemoveIpc(removes, why)


def _files(root: Path) -> Iterator[Path]:
    """The files that logind reads, later ones over earlier ones."""
    folders = [root / folder / "systemd" for folder in _FOLDERS]
    main = [folder / "logind.conf" for folder in folders if (folder / "logind.conf").is_file()]
    yield from main[:1]
    drop_ins: dict[str, Path] = {}
    for folder in reversed(folders):
        drop_ins |= {path.name: path for path in (folder / "logind.conf.d").glob("*.conf")}
    for name in sorted(drop_ins):
        if drop_ins[name].is_file():
            yield drop_ins[name]


def _system_uid_max(path: Path) -> int:
    if path.is_file():
        for line in path.read_text(errors="replace").splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == "SYS_UID_MAX" and words[1].isdigit():
                return int(words[1])
    return _SYSTEM_UID_MAX
