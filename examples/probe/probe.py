# SPDX-License-Identifier: Apache-2.0
"""Fit a linear probe: does the last token's hidden state know what a prompt is about?

    python examples/probe/probe.py

Prompts name an animal or a country and all end in the same word, so that only what the model has
carried there can tell. The probe is fitted on some of the names and judged on others. Each reply's
own sample is asked for by its handle.
"""

import argparse
import asyncio
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainer"))

import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console
from rich.progress import Progress
from served import ROOT, Served
from torch import Tensor

from shmconn import Subscription, aio, subscribe

LAYERS = [0, 8, 15, 22, 30]
AT_ONCE = 4
ANIMALS = """\
badger beaver bison camel cat cheetah cow crocodile deer dog dolphin donkey duck eagle elephant
falcon fox frog giraffe goat goose gorilla hamster hare hedgehog horse hyena kangaroo leopard lion
lizard monkey moose mouse otter owl panda parrot penguin pig rabbit rat raven salmon seal shark
sheep snake spider squirrel swan tiger tortoise trout turkey whale wolf zebra"""
COUNTRIES = """\
Albania Algeria Argentina Australia Austria Belgium Bolivia Brazil Bulgaria Canada Chile China
Colombia Croatia Cuba Denmark Ecuador Egypt Estonia Ethiopia Finland France Germany Ghana Greece
Hungary Iceland India Indonesia Iran Iraq Ireland Italy Jamaica Japan Kenya Latvia Libya Mali Mexico
Mongolia Morocco Nepal Nigeria Norway Pakistan Peru Poland Portugal Romania Spain Sudan Sweden
Thailand Tunisia Turkey Uganda Vietnam"""
console = Console(highlight=False)


async def last_states(url: str, subscription: Subscription, names: list[str]) -> Tensor:
    """States of each prompt's last token: ``[names, layers, hidden]``."""
    direct = DefaultAsyncHttpxClient(trust_env=False)  # a proxy cannot reach our loopback
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=300, http_client=direct)
    gate = asyncio.Semaphore(AT_ONCE)
    with Progress(console=console) as progress:
        task = progress.add_task("asking", total=len(names))

        async def one(name: str) -> Tensor:
            async with gate:
                prompt = f"Please write a short text about {name} for this page"
                reply = await client.completions.create(model="model", prompt=prompt, max_tokens=1)
                params = reply.model_extra["kv_transfer_params"]  # type: ignore[index]
                sample = await aio.aget(subscription, params, timeout=60)
                progress.advance(task)
                # A copy, and the rest of the sample goes back to the ring.
                return sample.hidden_states[-1].to(torch.float64)

        return torch.stack(await asyncio.gather(*map(one, names)))


def fit(states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Ridge regression of -1 and 1: a weight for each dimension, and where the middle is."""
    middle = states.mean(0)
    centred = states - middle
    # Solved among the prompts, which are fewer than the dimensions.
    gram = centred @ centred.T
    ridge = 0.01 * gram.trace().clamp(min=1e-6) / len(gram) * torch.eye(len(gram)).to(gram)
    weight = centred.T @ torch.linalg.solve(gram + ridge, labels)
    return weight, middle


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", default=str(ROOT / "out" / "probe"), help="folder for vLLM's log")
    arguments = parser.parse_args()
    pairs = [(name, -1.0) for name in ANIMALS.split()] + [(name, 1.0) for name in COUNTRIES.split()]
    random.Random(0).shuffle(pairs)
    names = [name for name, _ in pairs]
    labels = torch.tensor([label for _, label in pairs], dtype=torch.float64)
    options = ["--layers", ",".join(map(str, LAYERS)), "--ring-size", "16MiB"]
    with (
        Served("probe-example", Path(arguments.out), options, ["--max-model-len=512"]) as served,
        subscribe(served.ring, "probe", by_handle=True) as subscription,
    ):
        states = asyncio.run(last_states(served.url, subscription, names))
    learn, judge = slice(0, len(names) // 2), slice(len(names) // 2, None)
    console.print(f"fitted on {len(names[learn])} names, judged on {len(names[judge])} others")
    for index, layer in enumerate(LAYERS):
        weight, middle = fit(states[learn, index], labels[learn])
        said = (states[judge, index] - middle) @ weight
        right = ((said > 0) == (labels[judge] > 0)).double().mean().item()
        console.print(f"layer {layer:2}: {right:6.1%}")
    console.print("(layer 0 is the last word's embedding, equal in all prompts: chance)")


if __name__ == "__main__":
    main()
