"""The measuring itself: everybody takes turns on small blocks of prompts, again and again, in rotating order.

Rule: machines are noisy and drift, so contestants that are compared run within seconds of each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bench.contestants import Contestant
from bench.settings import Completion, Settings
from specq.samples import Prompt

BLOCK = 5  # prompts of one turn where sessions run one by one
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """One contestant's completions of one block, and how long they took together."""

    contestant: str
    repeat: int
    prompts: tuple[Prompt, ...]
    completions: list[Completion]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)


def measure(
    contestants: Sequence[Contestant],
    prompts: Sequence[Prompt],
    settings: Settings,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.perf_counter,
) -> list[Turn]:
    """Run all contestants on all prompts, `settings.repeats` times, and return every turn."""
    for contestant in contestants:
        tell(f"warming up {contestant.name}")
        contestant.run(prompts[:_WARM_UP], settings)
    turns: list[Turn] = []
    planned = list(schedule(contestants, prompts, settings))
    tell(f"{len(planned)} turns: {', '.join(contestant.name for contestant in contestants)} in rotating order")
    for repeat, block, contestant in planned:
        started = clock()
        completions = contestant.run(block, settings)
        turns.append(Turn(contestant.name, repeat, block, completions, clock() - started))
        tell(_progress(turns, len(planned), settings))
    return turns


def schedule(
    contestants: Sequence[Contestant], prompts: Sequence[Prompt], settings: Settings
) -> Iterator[tuple[int, tuple[Prompt, ...], Contestant]]:
    """Yield (repeat, block, contestant): for each block everybody, each time beginning with the next one."""
    turn = 0
    for repeat in range(settings.repeats):
        for block in blocks(prompts, settings.concurrency):
            start = turn % len(contestants)
            turn += 1
            for contestant in [*contestants[start:], *contestants[:start]]:
                yield repeat, block, contestant


def blocks(prompts: Sequence[Prompt], concurrency: int) -> list[tuple[Prompt, ...]]:
    """Cut the prompts into blocks of one data set each; with several sessions at a time, one block of all.

    A block ends with fewer and fewer sessions in flight, so that with many sessions few, large blocks are right.
    """
    if concurrency > 1:
        return [tuple(prompts)]
    groups = [list(group) for _, group in groupby(prompts, key=lambda prompt: prompt.dataset)]
    return [tuple(group[i : i + BLOCK]) for group in groups for i in range(0, len(group), BLOCK)]


def _progress(turns: Sequence[Turn], num_planned: int, settings: Settings) -> str:
    """Return what the last turn gave, and what is left: so many turns, which take about as long as those before."""
    turn, num_left = turns[-1], num_planned - len(turns)
    rate = turn.num_tokens / turn.seconds
    left_s = num_left * sum(each.seconds for each in turns) / len(turns)
    return (
        f"{turn.repeat + 1}/{settings.repeats} {turn.prompts[0].dataset}: {turn.contestant} {rate:.0f} tokens/s "
        f"({num_left} of {num_planned} turns left, about {left_s:.0f} s)"
    )
