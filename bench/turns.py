"""Taking turns: all contestants complete the same small block of prompts, block after block, in rotating order.

Rule: machines are noisy and drift, so compared contestants run within seconds of each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol, TypeVar

from bench.scenario import Completion, Settings
from specq.runtime import Tell
from specq.samples import Prompt

BLOCK = 5  # prompts of one turn where sessions run one by one
WARM_UP = 2
Block = tuple[int, Sequence[Prompt]]  # with the number of the repetition


class Contestant(Protocol):
    """A system that completes prompts, `concurrency` at a time; 0: the concurrency of the settings."""

    name: str
    concurrency: int

    def run(self, prompts: Sequence[Prompt], settings: Settings) -> list[Completion]:
        """Complete the prompts; results in their order."""
        ...


T = TypeVar("T")
C = TypeVar("C", bound=Contestant)


@dataclass(frozen=True, slots=True)
class Turn:
    """One contestant's completions of one block, and their time together."""

    contestant: str
    repeat: int
    prompts: tuple[Prompt, ...]
    completions: list[Completion]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self.completions)

    @property
    def rate(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0


def take_turn(
    contestant: Contestant, block: Sequence[Prompt], settings: Settings, repeat: int = -1,
    clock: Callable[[], float] = time.perf_counter,
) -> Turn:  # fmt: skip
    """Let one contestant complete some prompts; `repeat` -1: the turn does not count."""
    started = clock()
    completions = contestant.run(block, settings)
    return Turn(contestant.name, repeat, tuple(block), completions, clock() - started)


def rotated(everybody: Sequence[T], number: int) -> list[T]:
    """Return all contestants, with another one first each time."""
    start = number % max(len(everybody), 1)
    return [*everybody[start:], *everybody[:start]]


def schedule(contestants: Sequence[C], blocks: Iterable[Block]) -> Iterator[tuple[int, Sequence[Prompt], C]]:
    """Yield (repeat, block, contestant): for each block all contestants, each time beginning with the next one."""
    for number, (repeat, block) in enumerate(blocks):
        for contestant in rotated(contestants, number):
            yield repeat, block, contestant


def measure(
    contestants: Sequence[Contestant], blocks: Iterable[Block], settings: Settings, tell: Tell,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Turn]:  # fmt: skip
    """Run all contestants on all blocks, and return every turn."""
    turns: list[Turn] = []
    planned = list(schedule(contestants, blocks))
    tell(f"{len(planned)} turns: {', '.join(contestant.name for contestant in contestants)} in rotating order")
    for repeat, block, contestant in planned:
        turns.append(take_turn(contestant, block, settings, repeat, clock))
        tell(_progress(turns, len(planned), settings))
    return turns


def _progress(turns: Sequence[Turn], num_planned: int, settings: Settings) -> str:
    """Return the result of the last turn, and the number and estimated time of the turns left."""
    turn, num_left = turns[-1], num_planned - len(turns)
    left_s = num_left * sum(each.seconds for each in turns) / len(turns)
    return (
        f"{turn.repeat + 1}/{settings.repeats} {turn.prompts[0].dataset}: {turn.contestant} {turn.rate:.0f} tokens/s "
        f"({num_left} of {num_planned} turns left, about {left_s:.0f} s)"
    )


def warm_up(contestants: Sequence[Contestant], prompts: Sequence[Prompt], settings: Settings, tell: Tell) -> None:
    """Let all contestants complete a few prompts."""
    for contestant in contestants:
        tell(f"warming up {contestant.name}")
        contestant.run(prompts[:WARM_UP], settings)


def settle(
    contestant: Contestant, portions: Iterable[Sequence[Prompt]], settings: Settings, seconds: float
) -> list[Turn]:
    """Let a contestant serve these endless portions for `seconds`, so that it learns which drafts pay off."""
    end, found = time.perf_counter() + seconds, list[Turn]()
    for portion in portions:
        if time.perf_counter() >= end:
            break
        found.append(take_turn(contestant, portion, settings))
    return found


def blocks_of(portions: Iterable[Sequence[Prompt]], concurrency: int) -> list[Block]:
    """Return the blocks of repetitions that have these prompts."""
    return [(repeat, block) for repeat, prompts in enumerate(portions) for block in blocks(prompts, concurrency)]


def blocks(prompts: Sequence[Prompt], concurrency: int) -> list[tuple[Prompt, ...]]:
    """Cut the prompts into blocks of one data set each; with several sessions at a time, one block of all.

    Towards its end, a block has fewer and fewer sessions in flight. So with many sessions a few large blocks are
    better.
    """
    if concurrency > 1:
        return [tuple(prompts)]
    groups = [list(group) for _, group in groupby(prompts, key=lambda prompt: prompt.dataset)]
    return [tuple(group[i : i + BLOCK]) for group in groups for i in range(0, len(group), BLOCK)]
