"""Cells of temperature and sessions, and the turns in each.

The unit of a cell is a handful of prompts that all contestants complete in turn, seconds apart, in rotating order. With
one session a unit is one prompt.

Rule: units are measured in an order in which any beginning is a fair sample, and each is saved when it is done. So a
stopped run can continue.

The speed of a long prompt is measured as the seconds to the first token of a new text, all contestants in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, repeat
from typing import Any

from bench.rivals.field import DEFAULTS, LLAMA_FASTEST, RIVALS, SPECQ, llama_on_all_cores
from bench.scenario import Settings
from bench.turns import Contestant, Turn, rotated, settle, take_turn
from specq.runtime import Tell
from specq.samples import Prompt

Unit = dict[str, Any]  # "prompts": their names; "turns": contestant -> its result

JOBS_EACH = 2  # of a session in a unit of several sessions
MOST_UNITS = 8  # of a cell with several sessions
SLOW_EVERY = 3  # transformers completes every third prompt: the gap to it is large, and it takes most of the time
SETTLE_S = 20.0  # seconds of service for a default before a cell counts, in which it learns which drafts pay off


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
        """Return whether a contestant is measured in unit `number`.

        Several sessions only compare specq's default with its parts.
        """
        if self.sessions > 1:
            return name in SPECQ or name in (llama_on_all_cores(), LLAMA_FASTEST)
        return name not in RIVALS or number % SLOW_EVERY == 0


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt of each data set after the other, repeatedly."""
    datasets = list(dict.fromkeys(prompt.dataset for prompt in prompts))
    sets = [[prompt for prompt in prompts if prompt.dataset == name] for name in datasets]
    longest = max(map(len, sets), default=0)
    return [one[i] for i in range(longest) for one in sets if i < len(one)]


class Grid:
    """The cells on some prompts; `num_tokens`: maximum tokens of each completion."""

    def __init__(self, cells: Sequence[Cell], prompts: Sequence[Prompt], num_tokens: int) -> None:
        self._cells, self._prompts, self._settings = cells, in_turns(prompts), Settings(output_len=num_tokens)

    def missing(self, done: Mapping[str, Unit]) -> list[tuple[Cell, int, tuple[Prompt, ...]]]:
        """Return the missing units, in order; see `name_of` for their names."""
        units = chain.from_iterable(
            ((cell, number, unit) for number, unit in enumerate(cell.units(self._prompts))) for cell in self._cells
        )
        return [unit for unit in units if name_of(*unit[:2]) not in done]

    def run(
        self, contestants: Sequence[Contestant], done: Mapping[str, Unit], end: float, tell: Tell
    ) -> Iterator[tuple[str, Unit]]:
        """Yield the name of each missing unit and its results; start none after `end` (monotonic clock)."""
        settled = None
        for cell, number, unit in self.missing(done):
            if time.monotonic() > end:
                return
            now = replace(self._settings, temperature=cell.temperature, concurrency=cell.sessions, seed=number)
            if settled != cell:
                tell(f"{cell.name}: settling")
                begin([one for one in contestants if cell.takes_part(one.name, 0)], self._prompts, now)
                settled = cell
            found = measure_unit([one for one in contestants if cell.takes_part(one.name, number)], unit, number, now)
            rates = (f"{who} {one['rate']:.0f}" for who, one in found["turns"].items())
            tell(f"{name_of(cell, number)}: {', '.join(rates)}")
            yield name_of(cell, number), found


def measure_unit(everybody: Sequence[Contestant], unit: tuple[Prompt, ...], number: int, settings: Settings) -> Unit:
    """Let all contestants complete a unit."""
    turns = {one.name: take_turn(one, unit, settings, number) for one in rotated(everybody, number)}
    names = [f"{prompt.dataset}/{prompt.id}" for prompt in unit]
    found = {one.name: figures_of(turns[one.name], one.concurrency or settings.concurrency) for one in everybody}
    return {"prompts": names, "turns": found}


def name_of(cell: Cell, number: int) -> str:
    """Return the name of a unit."""
    return f"{cell.name}/{number}"


def figures_of(turn: Turn, num_at_once: int) -> dict[str, Any]:
    """Return tokens, seconds and the rate of a turn.

    One at a time: the tokens after the first ones and their seconds. Several: all tokens and all seconds, with prompts
    in memory.
    """
    one_by_one, first_s = num_at_once == 1, [one.first_token_ms / 1e3 for one in turn.completions]
    tokens = turn.num_tokens - (sum(one.num_first for one in turn.completions) if one_by_one else 0)
    seconds = sum(one.seconds for one in turn.completions) - sum(first_s) if one_by_one else turn.seconds
    return {
        "tokens": tokens,
        "seconds": round(seconds, 5),
        "rate": round(tokens / seconds, 2) if tokens and seconds else 0.0,
        "first_s": [round(one, 5) for one in first_s],
        "rounds": sum(one.stats["rounds"] for one in turn.completions),
    }


def begin(everybody: Sequence[Contestant], prompts: Sequence[Prompt], settings: Settings) -> None:
    """Warm up all contestants.

    With several sessions a verifier computes all prompts. A default also learns whether its drafts pay off.
    """
    for one in everybody:
        one.run(prompts[:1], replace(settings, output_len=8))
        if one.name in SPECQ and settings.concurrency > 1:
            one.run(prompts, replace(settings, output_len=1))
        if one.name in DEFAULTS:
            following, size = cycle(prompts), JOBS_EACH * settings.concurrency
            settle(one, (list(islice(following, size)) for _ in repeat(0)), settings, SETTLE_S)


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
