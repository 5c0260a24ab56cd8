# SPDX-License-Identifier: Apache-2.0
"""The whole of it on one CPU: vLLM serves, a ring carries, a trainer learns, all at once.

    python examples/trainer/run.py                 # some minutes
    python examples/trainer/run.py --kill-after 8  # the trainer is killed once, and goes on

The texts are Python's own documentation, which every Python carries. They are sent to
`shmconn serve` on SmolLM2; the trainer, a process of its own, reads the samples that come of them.
A trainer that is killed is started again. If all of this is killed, run it again: it sends what
the last checkpoint does not count.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console
from served import ENVIRONMENT, MODEL, ROOT, Served
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
LAYERS = "2,15,27,30"
AT_ONCE = 4
BYTES_PER_TOKEN = 4 * 576 * 4
VOCABULARY = 4096
# Topics whose texts are held out: every so many.
EVERY = 8
console = Console(highlight=False)


@dataclass
class Texts:
    """Prompts by the tags of their samples."""

    learn: dict[str, list[int]]
    held_out: dict[str, list[int]]

    @classmethod
    def read(cls, tokens: int, learn: int, held_out: int) -> "Texts":
        """Pieces of documentation to learn from; those held out are of other topics."""
        tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        pieces: tuple[list[list[int]], list[list[int]]] = ([], [])
        for index, name in enumerate(sorted(topics)):
            ids = tokenizer.encode(topics[name]).ids
            pieces[index % EVERY == 0].extend(
                ids[at : at + tokens] for at in range(0, len(ids) - tokens, tokens)
            )
        made = []
        for found, count, name in zip(
            pieces, (learn, held_out), ("learn", "held-out"), strict=True
        ):
            if count > len(found):
                raise SystemExit(f"{count} texts of {tokens} tokens: there are {len(found)}")
            random.Random(0).shuffle(found)
            made.append({f"{name}-{at}": piece for at, piece in enumerate(found[:count])})
        return cls(*made)

    def drop(self, checkpoint: Path) -> None:
        """Leaves out what a checkpoint counts."""
        if checkpoint.exists():
            batches = torch.load(checkpoint, weights_only=True, mmap=True)["batches"]
            for batch in batches:
                for tag in batch["tags"]:
                    self.learn.pop(tag, None)
            self.held_out.clear()


async def send(served: Served, prompts: dict[str, list[int]]) -> None:
    """Sends prompts, which stand by the tags of their samples, while the ring has room.

    vLLM would wait for room by itself, but its engine takes half of two cores for that.
    """
    direct = DefaultAsyncHttpxClient(trust_env=False)  # a proxy cannot reach our loopback
    client = AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-", timeout=600, http_client=direct)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(tag: str, prompt: list[int]) -> None:
        async with gate:
            while served.full > 0.7:
                await asyncio.sleep(0.2)
            body = {"kv_transfer_params": {"tag": tag}}
            await client.completions.create(
                model="model", prompt=prompt, max_tokens=1, extra_body=body
            )

    async with asyncio.TaskGroup() as group:
        for tag, prompt in prompts.items():
            group.create_task(one(tag, prompt))


async def train(command: list[str], kill_after: int, figures: Path) -> int:
    """Runs the trainer, and again if it is killed. Returns its exit code."""
    environment = {**os.environ, **ENVIRONMENT}
    while True:
        # Ctrl-C is for us: we end it.
        trainer = await asyncio.create_subprocess_exec(
            *command, env=environment, start_new_session=True
        )
        try:
            if kill_after:
                await kill(trainer, kill_after, figures)
                kill_after = 0
            code = await trainer.wait()
        finally:
            if trainer.returncode is None:
                trainer.kill()
                await trainer.wait()
        if code != -signal.SIGKILL:
            return code
        console.print("\nthe trainer was killed: it is started again")


async def kill(trainer: asyncio.subprocess.Process, after: int, figures: Path) -> None:
    """Kills the trainer a second after a checkpoint that counts so many batches."""
    while trainer.returncode is None:
        await asyncio.sleep(0.1)
        if figures.exists() and len(json.loads(figures.read_text())["batches"]) >= after:
            await asyncio.sleep(1)
            trainer.kill()
            return


async def all_published(served: Served, count: int) -> None:
    """Until every sample has found room in the ring."""
    while served.published < count:
        if served.process.code is not None:
            raise SystemExit(f"vLLM ended: {served.process.log} says why")
        await asyncio.sleep(0.2)


async def serve_and_train(
    served: Served, command: list[str], arguments: argparse.Namespace, texts: Texts
) -> int:
    """Sends, trains and ends the server. Returns the trainer's exit code."""

    async def send_all() -> None:
        await send(served, texts.held_out)
        await send(served, texts.learn)
        await all_published(served, len(texts.held_out) + len(texts.learn))

    figures = Path(arguments.out) / "figures.json"
    training = asyncio.create_task(train(command, arguments.kill_after, figures))
    sending = asyncio.create_task(send_all())
    try:
        await asyncio.wait({training, sending}, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            console.print("the trainer ended before all samples had come")
            return training.result() or 1
        await sending
        # A clean end: vLLM closes the ring, the trainer reads the rest, and ends.
        await asyncio.to_thread(served.stop)
        return await training
    finally:
        for task in (training, sending):
            task.cancel()
        await asyncio.gather(training, sending, return_exceptions=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=480, help="texts to learn from")
    parser.add_argument("--held-out", type=int, default=16, help="texts of the exam")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each text")
    parser.add_argument("--out", default=str(ROOT / "out" / "trainer"))
    parser.add_argument("--kill-after", type=int, default=0, help="batches; 0: never")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    texts = Texts.read(arguments.tokens, arguments.samples, arguments.held_out)
    common = Counter(token for text in texts.learn.values() for token in text)
    vocabulary = out / "vocabulary.json"
    vocabulary.write_text(json.dumps([token for token, _ in common.most_common(VOCABULARY)]))
    texts.drop(out / "checkpoint.pt")
    if not texts.learn:
        raise SystemExit(f"{out} is a finished training: remove it, or name another --out")
    # Room for the texts of the exam, for what no checkpoint counts yet, and for what is on its way.
    size = (2 * arguments.held_out + 32) * arguments.tokens * BYTES_PER_TOKEN
    # The group is there from the first sample on, so the trainer misses none.
    options = ["--layers", LAYERS, "--ring-size", str(size), "--group", "trainer"]
    flags = ["--max-model-len=1024", "--max-num-seqs=8", "--dtype=float32"]
    try:
        with Served("trainer-example", out, options, flags) as served:
            command = [
                *(sys.executable, str(HERE / "train.py"), served.ring, "--out", str(out)),
                *("--vocabulary", str(vocabulary), "--held-out", str(arguments.held_out)),
                *("--samples", str(arguments.samples + arguments.held_out)),
            ]
            code = asyncio.run(serve_and_train(served, command, arguments, texts))
    except KeyboardInterrupt:
        console.print("\ninterrupted: run it again, and it goes on from its checkpoint")
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
