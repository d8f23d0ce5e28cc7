"""Complete a list of prompts from asyncio: all are in flight at once, and share the verifier's steps.

python examples/many_prompts.py
"""

import asyncio
import os

import specq

BROKER = os.environ.get("SPECQ_BROKER", "tcp://127.0.0.1:5750")
PROMPTS = ["Once upon a time", "2 + 2 =", "def is_even(n):", "The cat"]


async def main() -> None:
    async with specq.AsyncClient(BROKER) as client:
        results = await client.generate(PROMPTS, max_tokens=24, temperature=0.8, seed=7)
    for prompt, result in zip(PROMPTS, results, strict=True):
        print(f"{prompt!r}: {result.text!r} ({result.finish_reason})")


if __name__ == "__main__":
    asyncio.run(main())
