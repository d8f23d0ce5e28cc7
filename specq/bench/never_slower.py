"""Whether drafts, as a verifier uses them by default, ever cost more than they bring: cells of a grid.

A cell is a pair of models, who drafts, and a number of sessions. In each, contestants take turns on the same jobs:

plain     no speculation (`mode="plain"`), on a verifier without drafters
lookup    the same verifier's prompt lookups, always used
default   the drafters of the cell, and a verifier that measures whether they and its lookups pay (`--drafts measured`)
forced    the same drafters, and a verifier that always uses them (`--drafts always`)

Rules: ratios are of turns of one repetition, seconds apart; a cell says their median and its confidence interval. All verifiers
have computed all prompts before: else whoever comes second on a verifier would find them in its KV memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from specq.bench.contestants import Specq
from specq.bench.figures import speculation
from specq.bench.measure import Turn
from specq.bench.pairs import Pair, draft_model
from specq.bench.prompts import Prompt, codec_of, load_prompts
from specq.bench.servers import Servers, pair_config
from specq.bench.settings import Settings
from specq.config import Config

Tell = Callable[[str], None]

# How many draft workers, and whether the verifier drafts with the draft model itself.
PLACEMENTS = {"none": (0, False), "one": (1, False), "two": (2, False), "colocated": (0, True), "both": (1, True)}
MAX_STEP_ROWS = 64
RESAMPLES, CONFIDENCE = 2000, 0.95
LEAST_PROMPTS, MOST_JOBS = 8, 64  # of a cell; of a session in a turn


@dataclass(frozen=True, slots=True)
class Cell:
    """A pair of models, who drafts, and how many sessions are in flight."""

    pair: Pair
    placement: str
    sessions: int

    @property
    def name(self) -> str:
        return f"{self.pair.name}/{self.placement}/{self.sessions}"


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a cell takes: `turn_s` of each turn of `plain`, `repeats` turns of each, and `settle_s` of the default before."""

    turn_s: float
    repeats: int
    settle_s: float
    output_len: int


def cells(pairs: Sequence[Pair], placements: Sequence[str], sessions: Sequence[int]) -> list[Cell]:
    """Return the grid; without drafters the draft model makes no difference, so pairs of one target count once there."""
    found = [Cell(pair, placement, count) for pair in pairs for placement in placements for count in sessions]
    first = {pair.target: pair for pair in reversed(pairs)}
    return [cell for cell in found if cell.placement != "none" or first[cell.pair.target] == cell.pair]


def measure_cell(cell: Cell, pace: Pace, tell: Tell) -> dict[str, Any]:
    """Start the processes of a cell, let everybody take turns, and return what was found as JSON-able values."""
    settings = Settings(datasets=("gsm8k", "humaneval"), output_len=pace.output_len, ignore_eos=True)
    each = max(cell.sessions, LEAST_PROMPTS) // 2
    sets = [load_prompts((name,), each, codec_of(cell.pair.target)) for name in settings.datasets]
    prompts = [prompt for both in zip(*sets, strict=True) for prompt in both]
    with draft_model(cell.pair.draft) as draft, ExitStack() as stack:
        servers = {
            name: stack.enter_context(Servers(config))
            for name, config in _configs(cell, draft, cell.pair.target).items()
        }
        for started in servers.values():
            started.wait_ready()
        run = _Run(cell, settings, servers, prompts)
        return run.settle(pace, tell) | run.measure(pace, tell)


def _configs(cell: Cell, draft: str, target: str) -> dict[str, Config]:
    """Return the deployments of a cell by name; `alone` has no drafters."""
    drafters, is_colocated = PLACEMENTS[cell.placement]

    def config(drafters: int, model: str, drafts: str) -> Config:
        made = pair_config(target, draft, drafters)
        verifier = replace(made.target, max_step_rows=MAX_STEP_ROWS, draft_model=model, drafts=drafts)
        return replace(made, target=verifier, broker=replace(made.broker, journal="none"))

    colocated = draft if is_colocated else ""
    found = {"alone": config(0, "", "always"), "default": config(drafters, colocated, "measured")}
    return found if cell.placement == "none" else found | {"forced": config(drafters, colocated, "always")}


class _Run:
    """The contestants of a cell, and their turns."""

    def __init__(
        self, cell: Cell, settings: Settings, servers: Mapping[str, Servers], prompts: Sequence[Prompt]
    ) -> None:
        self._cell, self._settings, self._servers = cell, settings, servers
        self._prompts, self._following = prompts, cycle(prompts)
        alone = servers["alone"].client
        self.contestants = [
            Specq("plain", alone, cell.sessions, {"mode": "plain"}),
            Specq("lookup", alone, cell.sessions),
        ]
        self.contestants += [
            Specq(name, started.client, cell.sessions) for name, started in servers.items() if name != "alone"
        ]

    def turn(self, contestant: Specq, prompts: Sequence[Prompt], repeat: int) -> Turn:
        """Let a contestant complete some prompts."""
        started = time.perf_counter()
        completions = contestant.run(prompts, self._settings)
        return Turn(contestant.name, repeat, tuple(prompts), completions, time.perf_counter() - started)

    def jobs(self, each: int) -> list[Prompt]:
        """Return prompts, so many for each session; the next ones at each call."""
        return list(islice(self._following, each * self._cell.sessions))

    def settle(self, pace: Pace, tell: Tell) -> dict[str, Any]:
        """Warm everybody up, and let the default find out what pays; return how it fared meanwhile."""
        first = replace(self._settings, output_len=1)
        with ThreadPoolExecutor() as pool:  # one contestant of each verifier
            list(pool.map(lambda contestant: contestant.run(self._prompts, first), self.contestants[1:]))
        rates = {one.name: _rate(self.turn(one, self.jobs(1), -1)) for one in self.contestants}
        self._each = _jobs_each(rates["plain"], self._cell.sessions, pace)
        default = next(one for one in self.contestants if one.name == "default")
        found, end = [], time.perf_counter() + pace.settle_s
        while time.perf_counter() < end:
            found.append(self.turn(default, self.jobs(1), -1))
        tell(f"{self._cell.name}: settled in {len(found)} turns; {self._each} jobs a session and turn")
        return {"settling_rates": [round(_rate(turn), 1) for turn in found], "jobs_each": self._each}

    def measure(self, pace: Pace, tell: Tell) -> dict[str, Any]:
        """Let everybody take turns; return rates, ratios, and what the processes of the default took of the processors."""
        turns: list[Turn] = []
        cpu: list[dict[str, float]] = []
        for repeat in range(pace.repeats):
            prompts, start = self.jobs(self._each), repeat % len(self.contestants)
            for contestant in [*self.contestants[start:], *self.contestants[:start]]:
                before = _cpu_seconds(self._servers["default"])
                turns.append(self.turn(contestant, prompts, repeat))
                if contestant.name == "default":
                    after = _cpu_seconds(self._servers["default"])
                    cpu.append({name: (after[name] - before[name]) / turns[-1].seconds for name in after})
            tell(f"{self._cell.name} {repeat + 1}/{pace.repeats}: " + ", ".join(
                f"{turn.contestant} {_rate(turn):.0f}" for turn in turns[-len(self.contestants) :]
            ))  # fmt: skip
        shares = {name: round(median(one[name] for one in cpu), 4) for name in cpu[0]}
        return summary(turns) | {"cpu_share_of_default": shares}


def _rate(turn: Turn) -> float:
    return turn.num_tokens / turn.seconds


def _jobs_each(rate: float, sessions: int, pace: Pace) -> int:
    """Return how many jobs each session runs in a turn."""
    return int(min(MOST_JOBS, max(1, round(pace.turn_s * rate / (sessions * pace.output_len)))))


def _cpu_seconds(servers: Servers) -> dict[str, float]:
    """Return the processor seconds that each process has taken so far; nothing where there is no /proc."""
    found = {}
    for name, pid in servers.pids().items():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            return {}
        found[name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


# --- figures ------------------------------------------------------------------------------------------------------


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the rates of each contestant, and the ratios that the question is about.

    to_best     default to the better of plain and lookup, by their medians
    forced_to_best, to_forced   likewise
    """
    names = list(dict.fromkeys(turn.contestant for turn in turns))
    rates = {name: [_rate(turn) for turn in turns if turn.contestant == name] for name in names}
    best = max(("plain", "lookup"), key=lambda name: median(rates[name]))
    found: dict[str, Any] = {
        "best": best,
        "rates": {name: [round(rate, 2) for rate in own] for name, own in rates.items()},
        "medians": {name: round(median(own), 1) for name, own in rates.items()},
        "to_best": paired(rates["default"], rates[best]),
        "speculation": {name: _speculation(turns, name) for name in names},
    }
    if "forced" in rates:
        found["forced_to_best"] = paired(rates["forced"], rates[best])
        found["to_forced"] = paired(rates["default"], rates["forced"])
    return found


def _speculation(turns: Sequence[Turn], name: str) -> dict[str, Any]:
    found = speculation([completion for turn in turns if turn.contestant == name for completion in turn.completions])
    keys = ("rounds", "mean_accepted_length", "drafted", "draft_tokens", "min_accept_prob")
    first = [one.first_token_ms for turn in turns if turn.contestant == name for one in turn.completions]
    return {key: found[key] for key in keys} | {"first_token_ms": round(median(first), 2)}


def paired(ours: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Return the median of the paired ratios, with its bootstrap confidence interval."""
    ratios = np.array(ours) / np.array(others)
    random = np.random.default_rng(0)
    medians = np.median(random.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return {
        "median": round(float(np.median(ratios)), 4),
        "interval": [round(float(low), 4), round(float(high), 4)],
        "ratios": [round(float(ratio), 4) for ratio in ratios],
    }
