"""The figures of `specq demo`: the speed of each way, its range, and the verdict.

Rule: a ratio belongs to one turn, in which the ways ran in sequence. The range over the turns is shown, not the median.
The verdict is open if the range has both sides of 1. It is open too if plain decoding varied by more than the effect.
If each turn is too close to 1 to notice, the verdict is "as fast". This does not hold on a busy machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from statistics import median

from specq.client import Result
from specq.runtime import columns

PLAIN, LOOKUP, SPECQ = WAYS = ("plain", "lookup", "specq")
HEADER = (
    *("PROMPT", "TOKENS", "PLAIN", "LOOKUP", "SPECQ", "SPEEDUP", "VS LOOKUP"),
    *("TOKENS/ROUND", "ACCEPTANCE", "FIRST TOKEN MS", "TEXT HASH"),
)
AS_FAST = 0.05  # users do not notice a ratio this close to 1 in each turn
BUSY_CORES = 0.1  # used by other processes: from here on they may be the cause
MOST_USED = 0.2  # of the processors, by others: beyond that "as fast" is not reliable

Turns = dict[str, list[Result]]  # way -> the results of a prompt, one per turn


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens a second of each way over all prompts, one number per turn."""

    rates: dict[str, list[float]]

    @classmethod
    def of(cls, measured: list[Turns]) -> Speed:
        """Return the speed in each turn: all of its tokens divided by all of its seconds."""
        turns = range(len(measured[0][PLAIN]))
        return cls({way: [_rate([results[way][turn] for results in measured]) for turn in turns] for way in WAYS})

    def median(self, way: str) -> float:
        return median(self.rates[way])

    def ratios(self, to: str) -> list[float]:
        """Return, for each turn, the speed of specq divided by that of another way."""
        return [specq / other for specq, other in zip(self.rates[SPECQ], self.rates[to], strict=True)]

    @property
    def is_as_fast(self) -> bool:
        """Whether specq was as fast as plain decoding in each turn."""
        return all(abs(ratio - 1) <= AS_FAST for ratio in self.ratios(PLAIN))

    @property
    def can_be_told(self) -> bool:
        """Whether all turns agree on the faster way, by more than plain decoding varied."""
        ratios, plain = self.ratios(PLAIN), self.rates[PLAIN]
        effect = max(median(ratios), 1 / median(ratios))
        return (min(ratios) > 1 or max(ratios) < 1) and max(plain) / min(plain) < effect

    def __str__(self) -> str:
        parts = (f"{_range(self.ratios(way))} times {name} ({self.median(way):.0f})" for way, name in _NAMES.items())
        return f"specq: {self.median(SPECQ):.0f} tokens/s, {', '.join(parts)}"


_NAMES = {PLAIN: "plain decoding", LOOKUP: "lookup only"}


def conclusion(speed: Speed, same: bool, others: float | None, num_cores: int) -> str:
    """Return the result in a sentence.

    others     cores that other processes used meanwhile; None: unknown.
    num_cores  number of cores of the machine.
    """
    if not same:
        return "result: NOT the same text in all runs. This is a bug in specq"
    text = "result: the same text as plain decoding, token for token"
    ratios = speed.ratios(PLAIN)
    if speed.is_as_fast and not _is_busy(others, num_cores):
        return f"{text}, at the same speed. Drafts bring no speedup here"
    if not speed.can_be_told:
        return f"{text}. The speedup is unclear: {_why(others, num_cores)}. Run it again (specq demo)"
    is_slower = max(ratios) < 1
    worse = max(speed.ratios(LOOKUP)) < 1
    beside = ". Lookup only is faster: other drafts bring no speedup here" if worse and not is_slower else ""
    return f"{text}. Speedup: {_range(ratios)}{' (slower here)' if is_slower else ''}{beside}"


def _is_busy(others: float | None, num_cores: int) -> bool:
    """Whether other processes used enough of the machine to hide the effect of drafts."""
    return others is not None and others > MOST_USED * num_cores


def _why(others: float | None, num_cores: int) -> str:
    if others is None or others < BUSY_CORES:
        return "the turns vary by more than the effect of drafts"
    return f"this machine is too busy (other processes used {others:.1f} of its {num_cores} cores during the turns)"


def table(names: list[str], measured: list[Turns]) -> str:
    """Return a line for each prompt, and a line for all together."""
    rows = [_row(name, results) for name, results in zip(names, measured, strict=True)]
    num_tokens = sum(len(results[SPECQ][0].token_ids) for results in measured)
    return columns([HEADER, *rows, ("all", num_tokens, *_rated(Speed.of(measured)), "", "", "", "")])


def are_same(results: Turns) -> bool:
    """Return whether all runs of a prompt gave the same token ids."""
    return len(_digests(results)) == 1


def _digests(results: Turns) -> set[str]:
    """Return a short hash of each run's token ids.

    All hashes are equal if speculation changes no text.
    """
    runs = (result.token_ids for each in results.values() for result in each)
    return {sha256(json.dumps(token_ids).encode()).hexdigest()[:8] for token_ids in runs}


def _row(name: str, results: Turns) -> tuple[object, ...]:
    """Return the figures of one prompt; rounds and acceptance are medians of specq's runs."""
    stats = [result.stats for result in results[SPECQ]]
    return (
        name,
        len(results[SPECQ][0].token_ids),
        *_rated(Speed.of([results])),
        f"{median(s['mean_accepted_length'] for s in stats):.2f}",
        f"{median(s['acceptance_rate'] for s in stats):.0%}",
        f"{median(s['time_to_first_token_ms'] for s in stats):.0f}",
        " != ".join(sorted(_digests(results))),
    )


def _rated(speed: Speed) -> tuple[str, ...]:
    """Return the columns of the rates."""
    return (*(f"{speed.median(way):.0f}" for way in WAYS), *(_range(speed.ratios(to)) for to in (PLAIN, LOOKUP)))


def _range(ratios: list[float]) -> str:
    """Return the smallest and the largest ratio, as one number if they look the same."""
    low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return low if low == high else f"{low} to {high}"


def _rate(results: list[Result]) -> float:
    """Return tokens a second over the prompts of a turn."""
    seconds: float = sum(len(result.token_ids) / result.stats["tokens_per_second"] for result in results)
    return sum(len(result.token_ids) for result in results) / seconds
