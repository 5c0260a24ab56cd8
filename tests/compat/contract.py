# SPDX-License-Identifier: Apache-2.0
"""What the connector relies on of vLLM's calls: which hook, when, with what, in which thread.

`python contract.py FOLDER` runs an engine of the installed vLLM in this process, with a connector
that writes down each call, and prints the calls; `breaches` says which of them are not as the
connector needs them, each by the name of its hook. The rows of a step are written by vLLM's dummy
draft model; that, and the end of a request's blocks, is written down too.
"""

import functools
import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "vllm"))

# One step: its metadata is built and bound, and only then are rows of it written; it is asked for
# its results once; requests may end at any time but between building and binding.
STEP = r"build bind (ended )*(rows )*(ended )*results (ended )*(rows )*clear (ended )*"
LETTERS = {
    "build_connector_meta": "build",
    "bind_connector_metadata": "bind",
    "get_finished": "results",
    "clear_connector_metadata": "clear",
    "request_finished_all_groups": "ended",
    "request_finished": "ended",
    "rows": "rows",
}

Call = dict[str, Any]
calls: list[Call] = []


def note(hook: str, **seen: Any) -> None:
    """Writes a call down."""
    calls.append({"hook": hook, "thread": threading.get_ident(), **seen})


def note_end(hook: str, request: Any, groups: Any, held: bool) -> None:
    """Writes the end of a request down."""
    kinds = [sorted({type(one).__name__ for one in group}) for group in groups]
    note(hook, request=request.request_id, groups=kinds, held=held)


def recorder() -> type[Any]:
    """Our connector, in whose hooks each call is written down."""
    from shmconn.connector import ShmHiddenStatesConnector

    class Recorder(ShmHiddenStatesConnector):  # type: ignore[misc]
        _built = 0

        def register_kv_caches(self, kv_caches: Any) -> None:
            note("register_kv_caches", caches=len(kv_caches))
            super().register_kv_caches(kv_caches)

        def get_handshake_metadata(self) -> Any:
            note("get_handshake_metadata")
            return super().get_handshake_metadata()

        def set_xfer_handshake_metadata(self, metadata: Any) -> None:
            note(
                "set_xfer_handshake_metadata",
                ours=[type(one).__name__ for one in metadata.values()],
            )
            super().set_xfer_handshake_metadata(metadata)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            metadata = super().build_connector_meta(scheduler_output)
            self._built += 1
            metadata.serial = self._built
            note("build_connector_meta", serial=self._built, work=len(metadata.work))
            return metadata

        def bind_connector_metadata(self, connector_metadata: Any) -> None:
            note("bind_connector_metadata", serial=getattr(connector_metadata, "serial", None))
            super().bind_connector_metadata(connector_metadata)

        def clear_connector_metadata(self) -> None:
            note("clear_connector_metadata")
            super().clear_connector_metadata()

        def get_finished(self, finished_req_ids: Any) -> Any:
            sent, received = super().get_finished(finished_req_ids)
            kinds = sorted({type(one).__name__ for one in finished_req_ids})
            note("get_finished", kinds=kinds, sent=sorted(sent or ()))
            return sent, received

        def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
            held, reply = super().request_finished_all_groups(request, block_ids)
            note_end("request_finished_all_groups", request, block_ids, held)
            return held, reply

        def request_finished(self, request: Any, block_ids: Any) -> Any:
            held, reply = super().request_finished(request, block_ids)
            note_end("request_finished", request, [block_ids], held)
            return held, reply

        def shutdown(self) -> None:
            note("shutdown", role=self.role.name)
            super().shutdown()

    return Recorder


def watch(owner: Any, name: str, seen: Callable[..., Call]) -> None:
    """Writes down each call of a function of vLLM's own, before it is made."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def watched(*args: Any, **kwargs: Any) -> Any:
        note(**seen(*args))
        return real(*args, **kwargs)

    setattr(owner, name, watched)


def breaches(calls: list[Call]) -> list[str]:
    """What is not as the connector needs it."""
    found: list[str] = []
    by_hook: dict[str, list[Call]] = {}
    for call in calls:
        by_hook.setdefault(call["hook"], []).append(call)
    # Threads.
    home = calls[0]["thread"]
    for hook, made in by_hook.items():
        if any(call["thread"] != home for call in made):
            found.append(f"{hook} is called in more than one thread")
    # The start.
    start = ["register_kv_caches", "get_handshake_metadata", "set_xfer_handshake_metadata"]
    first = [next((i for i, one in enumerate(calls) if one["hook"] == hook), -1) for hook in start]
    if -1 in first or first != sorted(first):
        found.append(f"{' / '.join(start)} are not called in this order: {first}")
    for call in by_hook.get("set_xfer_handshake_metadata", []):
        if "ShmHandshake" not in call["ours"]:
            found.append(f"set_xfer_handshake_metadata brings {call['ours']}")
    # Each metadata reaches the worker once, and in order.
    built = [call["serial"] for call in by_hook.get("build_connector_meta", [])]
    bound = [call["serial"] for call in by_hook.get("bind_connector_metadata", [])]
    if built != bound:
        lost = sorted(set(built) - {one for one in bound if one is not None})
        found.append(f"bind_connector_metadata: {len(bound)} of {len(built)} built, without {lost}")
    # The order within a step.
    words = "".join(f"{LETTERS[one['hook']]} " for one in calls if one["hook"] in LETTERS)
    rest = re.sub(rf"^(ended )*({STEP})*", "", words)
    if rest:
        found.append(f"get_finished / bind_connector_metadata / rows come as: {rest[:80]}")
    if not by_hook.get("rows"):
        found.append("rows: none was seen to be written")
    for call in by_hook.get("get_finished", []):
        if set(call["kinds"]) - {"str"}:
            found.append(f"get_finished is given {call['kinds']}")
    # Each request's end.
    ended = by_hook.get("request_finished_all_groups", []) + by_hook.get("request_finished", [])
    for request, times in Counter(call["request"] for call in ended).items():
        if times > 1:
            found.append(f"request_finished is called {times} times for {request}")
    for call in ended:
        if set(sum(call["groups"], [])) - {"int"}:
            found.append(f"request_finished is given blocks that are {call['groups']}")
    # Held blocks are freed when they are reported, and not before.
    order = {id(call): at for at, call in enumerate(calls)}
    sent = {one: call for call in by_hook.get("get_finished", []) for one in call["sent"]}
    freed = {call["request"]: call for call in by_hook.get("freed", [])}
    for call in ended:
        request = call["request"]
        if request not in freed:
            found.append(f"request_finished: the blocks of {request} are never freed")
        elif call["held"] and order[id(freed[request])] < order[id(sent.get(request, call))]:
            found.append(f"get_finished: the blocks of {request} are freed before it says so")
    if "shutdown" not in by_hook:
        found.append("shutdown is not called")
    return found


def main(folder: Path) -> None:
    """Requests of several kinds, one aborted, and a step without any; prints the calls."""
    from offline import Offline, prompt, set_up

    set_up(folder)
    from modes import tiny
    from vllm import SamplingParams
    from vllm.model_executor.models import extract_hidden_states
    from vllm.v1.core.sched.scheduler import Scheduler

    sys.modules["contract"] = sys.modules["__main__"]
    watch(extract_hidden_states, "basic_cache", lambda *_: {"hook": "rows"})
    watch(
        Scheduler, "_free_blocks", lambda _, one, *__: {"hook": "freed", "request": one.request_id}
    )

    def transfer(ring: str) -> dict[str, Any]:
        extra = {"ring": ring, "ring_size": "16MiB"}
        names = {"kv_connector": "Recorder", "kv_connector_module_path": "contract"}
        return {**names, "kv_role": "kv_producer", "kv_connector_extra_config": extra}

    engine = Offline(tiny(folder), transfer=transfer)
    # What warming up wrote belongs to no step.
    calls[:] = [call for call in calls if call["hook"] not in ("rows", "freed")]
    asked = [prompt(tokens, tokens) for tokens in (1, 40, 200)]
    greedy = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.llm.generate([{"prompt_token_ids": ids} for ids in asked], greedy, use_tqdm=False)
    engine.settle()
    engine.engine.add_request("cut", {"prompt_token_ids": prompt(400, 5)}, greedy)
    engine.engine.step()
    engine.engine.abort_request(["cut"])
    engine.settle()
    engine.engine.step()
    engine.engine.engine_core.shutdown()
    engine.reader.close()
    print("CALLS", json.dumps(calls))


if __name__ == "__main__":
    Recorder = recorder()
    main(Path(sys.argv[1]))
