# SPDX-License-Identifier: Apache-2.0
"""`python tests/compat/interface.py WHEEL_OR_FOLDER`: does this vLLM have the connector interface
that we rely on?

Reads the sources, runs nothing of them. Our own classes are read the same way: each hook that we
define must still be one of vLLM's and take what vLLM passes, and vLLM must ask for none that we
lack. What we call or look at in vLLM stands in `CALLED`, `NAMES` and `FIELDS`. Exit code 1 if
something has changed; each change is named.
"""

import ast
import functools
import re
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TRANSFER = "vllm/distributed/kv_transfer"
V1 = f"{TRANSFER}/kv_connector/v1"

Read = Callable[[str], str]

# Ours, and the classes of vLLM that it stands for.
OURS = [
    ("shmconn/connector.py", "ShmHiddenStatesConnector", f"{V1}/base.py", "KVConnectorBase_V1"),
    ("shmconn/connector.py", "ShmHiddenStatesConnector", f"{V1}/base.py", "SupportsHMA"),
    ("shmconn/stats.py", "ShmStats", f"{V1}/metrics.py", "KVConnectorStats"),
    ("shmconn/stats.py", "ShmPromMetrics", f"{V1}/metrics.py", "KVConnectorPromMetrics"),
]

# What we call, with the arguments that we give by position.
CALLED = [
    (f"{TRANSFER}/kv_connector/factory.py", "KVConnectorFactory.register_connector", 3),
    (f"{V1}/base.py", "KVConnectorBase_V1.has_connector_metadata", 0),
    (f"{V1}/base.py", "KVConnectorBase_V1._get_connector_metadata", 0),
    (f"{V1}/base.py", "KVConnectorBase_V1.get_finished_count", 0),
    (f"{TRANSFER}/kv_transfer_state.py", "get_kv_transfer_group", 0),
    ("vllm/distributed/parallel_state.py", "get_tensor_model_parallel_rank", 0),
]

# Text that must stand in a file, as a pattern, and what it is for.
NAMES = [
    ("vllm/plugins/__init__.py", r'"vllm\.general_plugins"', "the group of our entry point"),
    (f"{TRANSFER}/__init__.py", r"\bget_kv_transfer_group\b", "the worker's connector"),
    (
        "vllm/model_executor/models/extract_hidden_states.py",
        r"class CacheOnlyAttentionBackend\b",
        "the class that says how the cache of hidden states is shaped",
    ),
    ("vllm/config/speculative.py", r'"extract_hidden_states"', "the speculative method"),
    (f"{V1}/base.py", r"class KVConnectorRole\b", "the role of a connector"),
    (f"{V1}/base.py", r"class KVConnectorMetadata\b", "what goes to the workers"),
    (f"{V1}/base.py", r"class KVConnectorHandshakeMetadata\b", "what comes from the workers"),
    (f"{V1}/metrics.py", r"self\._counter_cls\b", "the counters of the metrics"),
    (f"{V1}/metrics.py", r"self\._gauge_cls\b", "the gauges of the metrics"),
    (f"{V1}/metrics.py", r"self\._histogram_cls\b", "the histograms of the metrics"),
]

# Attributes that we read.
FIELDS = [
    (
        "vllm/v1/request.py",
        "Request",
        "request_id num_prompt_tokens num_computed_tokens prompt_token_ids all_token_ids status "
        "sampling_params kv_transfer_params",
    ),
    ("vllm/v1/request.py", "RequestStatus", "FINISHED_ABORTED FINISHED_ERROR"),
    ("vllm/v1/kv_cache_interface.py", "KVCacheConfig", "kv_cache_groups"),
    ("vllm/v1/kv_cache_interface.py", "KVCacheGroupSpec", "layer_names kv_cache_spec"),
    ("vllm/v1/kv_cache_interface.py", "KVCacheSpec", "block_size"),
]


class Signature(NamedTuple):
    """Parameters of a function, without ``self`` or ``cls``.

    Attributes:
        names: positional ones, in order.
        needed: how many of them have no default.
        keywords: keyword-only ones that have no default.
        more: whether any further positional, and any further keyword arguments are taken.
    """

    names: tuple[str, ...]
    needed: int
    keywords: tuple[str, ...]
    more: tuple[bool, bool]

    @classmethod
    def of(cls, node: ast.FunctionDef) -> "Signature":
        """Of a function's definition."""
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args)]
        needed = len(names) - len(node.args.defaults)
        if names and names[0] in ("self", "cls"):
            names, needed = names[1:], needed - 1
        pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        return cls(
            tuple(names),
            needed,
            tuple(one.arg for one, default in pairs if default is None),
            (node.args.vararg is not None, node.args.kwarg is not None),
        )

    def __str__(self) -> str:
        parts = [*self.names[: self.needed], *(f"{one}=" for one in self.names[self.needed :])]
        parts += [f"*, {one}" for one in self.keywords]
        parts += [sign for sign, more in zip(("*", "**"), self.more, strict=True) if more]
        return f"({', '.join(parts)})"

    def takes(self, call: "Signature") -> bool:
        """Whether a function with this signature can stand in for one with that."""
        if self.more == (True, True):
            return True
        return (
            self.names[: len(call.names)] == call.names
            and self.needed <= len(call.names)
            and set(self.keywords) <= set(call.keywords)
            and (self.more[1] or not (call.keywords or call.more[1]))
            and (self.more[0] or not call.more[0])
        )


class Changed(Exception):
    """Something that we rely on is not there."""


@functools.lru_cache(64)
def parse(text: str) -> ast.Module:
    """A module's tree; several parts are looked for in one."""
    return ast.parse(text)


def functions(tree: ast.AST, name: str) -> dict[str, ast.FunctionDef]:
    """Methods of a class, or the module's own functions for an empty name."""
    body = class_of(tree, name).body if name else getattr(tree, "body", [])
    return {one.name: one for one in body if isinstance(one, ast.FunctionDef)}


def class_of(tree: ast.AST, name: str) -> ast.ClassDef:
    """A class of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise Changed(f"there is no class {name} any more")


def is_abstract(node: ast.FunctionDef) -> bool:
    """Whether a class must define this to be made."""
    return any("abstractmethod" in ast.unparse(one) for one in node.decorator_list)


def attributes(node: ast.ClassDef) -> set[str]:
    """Everything that a class has by name: fields, methods, and what its methods set."""
    found = {one.name for one in ast.walk(node) if isinstance(one, ast.FunctionDef)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store):
            found.add(one.attr)
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
    return found


def hooks(vllm: Read, ours: Read) -> list[str]:
    """What has changed in the hooks that vLLM calls."""
    found: list[str] = []
    defined: dict[str, set[str]] = {}
    wanted: dict[str, dict[str, ast.FunctionDef]] = {}
    for our_path, our_class, path, name in OURS:
        mine = functions(parse(ours(our_path)), our_class)
        try:
            theirs = functions(parse(vllm(path)), name)
        except Changed as change:
            found.append(f"{path}: {change}")
            continue
        defined.setdefault(our_class, set()).update(mine)
        wanted.setdefault(our_class, {}).update(theirs)
        for hook, node in theirs.items():
            if hook not in mine:
                if is_abstract(node):
                    found.append(f"{path}: {name}.{hook} must be defined; {our_class} has none")
                continue
            call, own = Signature.of(node), Signature.of(mine[hook])
            if hook != "__init__" and not own.takes(call):
                found.append(f"{path}: {name}.{hook} is {call}; {our_class} takes {own}")
            if hook == "__init__" and own.names[: len(call.names)] != call.names:
                found.append(f"{path}: {name}.__init__ is {call}; {our_class} passes {own}")
    for our_class, names in defined.items():
        for hook in sorted(names - set(wanted[our_class])):
            if not hook.startswith("_"):
                found.append(f"vLLM has no hook {hook} any more; {our_class} defines it")
    return found


def calls(vllm: Read) -> list[str]:
    """What has changed in the functions that we call."""
    found = []
    for path, name, given in CALLED:
        owner, _, function = name.rpartition(".")
        try:
            signature = Signature.of(functions(parse(vllm(path)), owner)[function])
        except KeyError:
            found.append(f"{path}: there is no {name} any more")
        except Changed as change:
            found.append(f"{path}: {change}")
        else:
            fits = signature.needed <= given and not signature.keywords
            if not fits or (given > len(signature.names) and not signature.more[0]):
                found.append(f"{path}: {name} is {signature}; we give it {given} arguments")
    return found


def names(vllm: Read) -> list[str]:
    """What has changed in names and attributes that we look at."""
    found = []
    for path, pattern, purpose in NAMES:
        try:
            if re.search(pattern, vllm(path)) is None:
                found.append(f"{path}: no {pattern} any more ({purpose})")
        except Changed as change:
            found.append(f"{path}: {change} ({purpose})")
    for path, name, wanted in FIELDS:
        try:
            left = set(wanted.split()) - attributes(class_of(parse(vllm(path)), name))
        except Changed as change:
            found.append(f"{path}: {change}")
        else:
            found += [f"{path}: {name} has no {one} any more" for one in sorted(left)]
    return found


def changes(vllm: Read, ours: Read) -> list[str]:
    """All that has changed, one line each."""
    found = hooks(vllm, ours) + calls(vllm) + names(vllm)
    return sorted(set(found))


def reader(place: Path) -> Read:
    """Reads files of a wheel, or of a folder that holds ``vllm``."""

    def read(path: str) -> str:
        try:
            if place.is_dir():
                return (place / path).read_text()
            with zipfile.ZipFile(place) as wheel:
                return wheel.read(path).decode()
        except (KeyError, FileNotFoundError) as error:
            raise Changed("the file is not there any more") from error

    return read


def main() -> int:
    """Prints what has changed."""
    if len(sys.argv) != 2:
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    found = changes(reader(Path(sys.argv[1])), reader(ROOT))
    for line in found:
        print(line)
    if not found:
        print(f"{Path(sys.argv[1]).name}: all that the connector relies on is there")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
