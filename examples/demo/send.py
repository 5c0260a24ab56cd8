# SPDX-License-Identifier: Apache-2.0
"""Send prompts to an OpenAI server with shmconn in it, and log what it answered.

Each prompt is sent twice. A file `NAME.chat.txt` is the user's message of a chat; any other `.txt`
is a text to complete. Every third prompt asks for the states of the generated tokens as well. The
log, one JSON object a line, is what `shmconn verify --sends` reads:

    python send.py http://127.0.0.1:8000/v1 prompts/ sends.jsonl
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

AT_ONCE = 8
TIMES = 2
OUTPUT_TOKENS = 8
REQUEST_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Prompt:
    """One text; `tag` names its sample, and so its file."""

    name: str
    text: str
    chat: bool
    include_output_tokens: bool

    def tag(self, send: int) -> str:
        """A name of its own for each send: the two samples go to two files."""
        return f"{self.name}-send{send}"


def read_prompts(folder: Path) -> list[Prompt]:
    """The prompts of a folder, in the order in which to send them.

    The first text of several that share a prefix goes first, so that the prefix is in vLLM's cache
    when the others come.
    """
    files = sorted(folder.glob("*.txt"), key=lambda file: (file.name != "shared-1.txt", file.name))
    return [
        Prompt(
            name=file.name.split(".")[0],
            text=file.read_text(encoding="utf-8").rstrip("\n"),
            chat=file.name.endswith(".chat.txt"),
            include_output_tokens=index % 3 == 0,
        )
        for index, file in enumerate(files)
    ]


async def send(client: AsyncOpenAI, model: str, prompt: Prompt, number: int) -> dict[str, Any]:
    """One request; returns its line for the log.

    Raises:
        RuntimeError: The reply names no sample.
    """
    tag = prompt.tag(number)
    common: dict[str, Any] = {
        "model": model,
        "temperature": 0,
        "max_tokens": OUTPUT_TOKENS if prompt.include_output_tokens else 1,
        "extra_body": {
            "return_token_ids": True,
            "kv_transfer_params": {
                "tag": tag,
                "include_output_tokens": prompt.include_output_tokens,
            },
        },
    }
    reply: dict[str, Any]
    if prompt.chat:
        messages: Any = [{"role": "user", "content": prompt.text}]
        reply = (await client.chat.completions.create(messages=messages, **common)).model_dump()
    else:
        reply = (await client.completions.create(prompt=prompt.text, **common)).model_dump()
    choice = reply["choices"][0]
    sample = reply.get("kv_transfer_params") or {}
    if "handle" not in sample:
        raise RuntimeError(f"the reply to {tag} names no sample: kv_transfer_params is {sample}")
    return {
        "tag": tag,
        # Chat replies carry the prompt's ids on the top level, completions in the choice.
        "prompt_token_ids": reply.get("prompt_token_ids") or choice.get("prompt_token_ids"),
        "token_ids": choice["token_ids"],
        "finish_reason": choice["finish_reason"],
        "include_output_tokens": prompt.include_output_tokens,
        "temperature": 0,
        **{key: sample.get(key) for key in ("handle", "request_id", "layer_ids", "shape", "dtype")},
    }


async def send_all(
    url: str,
    prompts: Sequence[Prompt],
    log: Path,
    answered: Callable[[int], None] = lambda count: None,
) -> list[dict[str, Any]]:
    """Send each prompt `TIMES` times, `AT_ONCE` at once, and write the log as replies come.

    Args:
        url: The server's, with /v1.
        prompts: What to send.
        log: The file to write.
        answered: Called with the number of replies so far.
    """
    lines: list[dict[str, Any]] = []
    free = asyncio.Semaphore(AT_ONCE)
    # A retry by the client would be a second request, with a second sample under the same tag.
    client = AsyncOpenAI(
        base_url=url,
        api_key="none",
        max_retries=0,
        timeout=REQUEST_TIMEOUT_S,
        http_client=DefaultAsyncHttpxClient(trust_env=False),  # a proxy cannot reach our loopback
    )
    async with client:
        model = (await client.models.list()).data[0].id
        with log.open("w", encoding="utf-8") as file:

            async def one(prompt: Prompt, number: int) -> None:
                async with free:
                    line = await send(client, model, prompt, number)
                file.write(json.dumps(line) + "\n")
                file.flush()
                lines.append(line)
                answered(len(lines))

            async with asyncio.TaskGroup() as group:
                for number in range(1, TIMES + 1):
                    for prompt in prompts:
                        group.create_task(one(prompt, number))
    return lines


def main(arguments: list[str]) -> int:
    """The command: `send.py URL PROMPTS LOG`."""
    if len(arguments) != 3:
        print("usage: send.py URL PROMPTS LOG", file=sys.stderr)
        return 2
    url, folder, log = arguments
    lines = asyncio.run(send_all(url, read_prompts(Path(folder)), Path(log)))
    print(f"{len(lines)} replies, logged in {log}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
