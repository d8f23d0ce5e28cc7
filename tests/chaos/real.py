"""Prompts for the bundled pair, with the texts that come of them where nothing fails."""

from __future__ import annotations

from itertools import cycle

from specq import Client
from tests.chaos.load import Prompts
from tests.chaos.processes import START_S, Deployment

QUESTIONS = (
    "Tom has 3 boxes with 12 pencils each. He gives away 7 pencils. How many are left?",
    "Write a Python function that returns the sum of a list.",
    "What is the capital of France?",
    "A train goes 60 miles in an hour. How far does it go in 4 hours?",
)
NUM_TOKENS = 64


def real_prompts(deployment: Deployment) -> Prompts:
    """Ask without faults first; yield the questions and their answers for ever."""
    with Client(deployment.address, timeout_s=START_S) as client:
        deployment.wait_ready(client)
        found = []
        for question in QUESTIONS:
            prompt = client.served.codec.encode(question)
            answer = client.generate(token_ids=prompt, max_tokens=NUM_TOKENS, ignore_eos=True)
            found.append((prompt, answer.token_ids))
    yield from cycle(found)
