"""Cells of temperature and sessions, and the turns in each: the unit of a cell is a handful of prompts that everybody completes
in turn, seconds apart, in rotating order. With one session a unit is one prompt.

Rule: units are measured in an order in which any beginning is a fair sample, and each is kept when it is done: a run that is
stopped goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

from bench.rivals.field import (
    DEFAULTS,
    RIVALS,
    SPECQ,
    Completed,
    Contestant,
    Params,
    complete_all,
    llama_on_all_cores,
)
from specq.samples import Prompt

Unit = dict[str, Any]  # "prompts": their names; "turns": contestant -> what it did

JOBS_EACH = 2  # of a session in a unit of several sessions
MOST_UNITS = 8  # of a cell with several sessions
SLOW_EVERY = 3  # transformers completes every third prompt: its distance is large, and it takes most of the time
SETTLE_S = 20.0  # of service for a default before a cell counts, in which it finds out what pays


@dataclass(frozen=True, slots=True)
class Cell:
    """A temperature, and how many of specq's sessions are in flight."""

    temperature: float
    sessions: int

    @property
    def name(self) -> str:
        return f"{'greedy' if self.temperature == 0 else f'T={self.temperature:g}'}/{self.sessions}"

    def units(self, prompts: Sequence[Prompt]) -> list[tuple[Prompt, ...]]:
        """Return the prompts of each unit."""
        if self.sessions == 1:
            return [(prompt,) for prompt in prompts]
        size = JOBS_EACH * self.sessions
        count = min(MOST_UNITS, -(-2 * len(prompts) // size))  # each prompt about twice
        following = cycle(prompts)
        return [tuple(islice(following, size)) for _ in range(count)]

    def takes_part(self, name: str, number: int) -> bool:
        """Whether a contestant is measured in unit `number`: several sessions are about specq's default beside its parts."""
        if self.sessions > 1:
            return name in SPECQ or name == llama_on_all_cores()
        return name not in RIVALS or number % SLOW_EVERY == 0


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt of each data set after the other, again and again."""
    datasets = list(dict.fromkeys(prompt.dataset for prompt in prompts))
    sets = [[prompt for prompt in prompts if prompt.dataset == name] for name in datasets]
    longest = max(map(len, sets), default=0)
    return [one[i] for i in range(longest) for one in sets if i < len(one)]


class Grid:
    """The cells on some prompts; `num_tokens` of each completion at most."""

    def __init__(self, cells: Sequence[Cell], prompts: Sequence[Prompt], num_tokens: int) -> None:
        self._cells, self._prompts, self._params = cells, in_turns(prompts), Params(num_tokens)

    def missing(self, done: Mapping[str, Unit]) -> list[tuple[Cell, int, tuple[Prompt, ...]]]:
        """Return the units, in order, that are not done; see `name_of` for their names."""
        units = chain.from_iterable(
            ((cell, number, unit) for number, unit in enumerate(cell.units(self._prompts))) for cell in self._cells
        )
        return [unit for unit in units if name_of(*unit[:2]) not in done]

    def run(
        self, contestants: Sequence[Contestant], done: Mapping[str, Unit], end: float, tell: Callable[[str], None]
    ) -> Iterator[tuple[str, Unit]]:
        """Yield the name of each unit that is not done, and what everybody did in it; start none after `end` (monotonic)."""
        settled = None
        for cell, number, unit in self.missing(done):
            if time.monotonic() > end:
                return
            params = replace(self._params, temperature=cell.temperature)
            if settled != cell:
                tell(f"{cell.name}: settling")
                settle([one for one in contestants if cell.takes_part(one.name, 0)], self._prompts, cell, params)
                settled = cell
            found = self._measure(contestants, cell, number, unit, params)
            rates = (f"{who} {one['rate']:.0f}" for who, one in found["turns"].items())
            tell(f"{name_of(cell, number)}: {', '.join(rates)}")
            yield name_of(cell, number), found

    def _measure(
        self, contestants: Sequence[Contestant], cell: Cell, number: int, unit: tuple[Prompt, ...], params: Params
    ) -> Unit:
        own = [contestant for contestant in contestants if cell.takes_part(contestant.name, number)]
        start = number % max(len(own), 1)
        turns = {}
        for contestant in [*own[start:], *own[:start]]:
            started = time.perf_counter()
            completed = complete_all(contestant, unit, replace(params, seed=number), cell.sessions)
            turns[contestant.name] = figures_of(contestant, completed, time.perf_counter() - started, cell.sessions)
        names = [f"{prompt.dataset}/{prompt.id}" for prompt in unit]
        return {"prompts": names, "turns": {contestant.name: turns[contestant.name] for contestant in own}}


def name_of(cell: Cell, number: int) -> str:
    """Return the name of a unit."""
    return f"{cell.name}/{number}"


def figures_of(contestant: Contestant, completed: Sequence[Completed], wall_s: float, sessions: int) -> dict[str, Any]:
    """Return tokens, seconds and the rate of a turn.

    One at a time: the tokens after the first ones and their seconds. Several: all tokens and all seconds, prompts in memory.
    """
    one_by_one = sessions == 1 or contestant.num_at_once == 1
    tokens = sum(len(one.token_ids) - (one.num_first if one_by_one else 0) for one in completed)
    seconds = sum(one.seconds - one.first_s for one in completed) if one_by_one else wall_s
    return {
        "tokens": tokens,
        "seconds": round(seconds, 5),
        "rate": round(tokens / seconds, 2) if tokens and seconds else 0.0,
        "first_s": [round(one.first_s, 5) for one in completed],
        "rounds": sum(one.rounds for one in completed),
    }


def settle(contestants: Sequence[Contestant], prompts: Sequence[Prompt], cell: Cell, params: Params) -> None:
    """Warm everybody up; a verifier computes all prompts where several sessions run, and finds out whether its drafts pay."""
    for contestant in contestants:
        complete_all(contestant, prompts[:1], replace(params, max_tokens=8), 1)
        if contestant.name in SPECQ and cell.sessions > 1:
            complete_all(contestant, prompts, replace(params, max_tokens=1), cell.sessions)
        if contestant.name in DEFAULTS:
            following, end = cycle(prompts), time.monotonic() + SETTLE_S
            while time.monotonic() < end:
                jobs = list(islice(following, JOBS_EACH * cell.sessions))
                complete_all(contestant, jobs, params, cell.sessions)
