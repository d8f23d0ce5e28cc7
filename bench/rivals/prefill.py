"""The speed of a long prompt: the seconds to the first token of a new text, all contestants in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice

from bench.scenario import Settings
from bench.turns import Contestant, rotated
from specq.samples import Prompt

LENGTH, STEP = 500, 509  # tokens of a prompt, and from one prompt's first token to the next one's
LEFT_OUT = ("assisted", "lookup", "llama.cpp lookup")  # they compute prompts as others here do


def measure_prefill(contestants: Sequence[Contestant], prompts: Sequence[Prompt], number: int) -> dict[str, float]:
    """Return {contestant: tokens a second} for prompt `number`; the first call of a process should not count."""
    own = [contestant for contestant in contestants if contestant.name not in LEFT_OUT]
    texts = list(chain.from_iterable(prompt.token_ids for prompt in prompts))
    prompt, one_token = _unseen(texts, number), Settings(output_len=1)
    rates = {one.name: 1e3 * LENGTH / one.run([prompt], one_token)[0].first_token_ms for one in rotated(own, number)}
    return {one.name: round(rates[one.name], 1) for one in own}


def _unseen(texts: Sequence[int], number: int) -> Prompt:
    """Return a prompt that begins inside a text, at different places, so that its prefix is in no cache."""
    start = (STEP * (number + 1)) % len(texts)
    return Prompt("prefill", str(number), tuple(islice(cycle([*texts[start:], *texts[:start]]), LENGTH)))
