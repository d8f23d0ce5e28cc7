"""Whether drafts, as a verifier uses them by default, ever cost more than they bring: cells of a grid.

A cell is a pair of models, who drafts, and a number of sessions. In each, contestants take turns on the same jobs:

plain     no speculation (`mode="plain"`), on a verifier without drafters
lookup    the same verifier's prompt lookups, always used
default   the drafters of the cell, and a verifier that measures whether they and its lookups pay (`--drafts measured`)
forced    the same drafters, and a verifier that always uses them (`--drafts always`)

Rules: ratios are of turns of one repetition, seconds apart; a cell says their median and its confidence interval. All verifiers
have computed all prompts before: else whoever comes second on a verifier would find them in its KV memory. Processes stay for the
next cell where it asks for the same ones, so that a default also knows what it learned at another load, as in service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from statistics import median
from typing import Any

from bench.contestants import Specq
from bench.deployments import Deployments, Starter
from bench.figures import paired, speculation
from bench.measure import Turn
from bench.pairs import Pair, draft_model
from bench.processes import cpu_seconds
from bench.settings import Settings
from specq.config import Config
from specq.processes.servers import Servers, pair_config
from specq.samples import Prompt, codec_of, load_prompts

Tell = Callable[[str], None]

# How many draft workers, and whether the verifier drafts with the draft model itself.
PLACEMENTS = {"none": (0, False), "one": (1, False), "two": (2, False), "colocated": (0, True), "both": (1, True)}
MAX_STEP_ROWS = 64
LEAST_PROMPTS = 16  # of a cell
# Of a session in a turn. At its end, which drafts make uneven, fewer sessions run than the cell says: one job each would show little else.
LEAST_JOBS, MOST_JOBS = 4, 64
LEAST_TOKENS = 24  # of a job


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
    """How long a cell takes: `turn_s` of each turn of `plain`, `repeats` turns of each, and `settle_s` of the default before.

    output_len  tokens of each job; fewer where a single job would take longer than a turn
    """

    turn_s: float
    repeats: int
    settle_s: float
    output_len: int


def cells(pairs: Sequence[Pair], placements: Sequence[str], sessions: Sequence[int]) -> list[Cell]:
    """Return the grid; without drafters the draft model makes no difference, so pairs of one target count once there."""
    found = [Cell(pair, placement, count) for pair in pairs for placement in placements for count in sessions]
    first = {pair.target: pair for pair in reversed(pairs)}
    return [cell for cell in found if cell.placement != "none" or first[cell.pair.target] == cell.pair]


def measure_cell(cell: Cell, pace: Pace, deployments: Deployments, tell: Tell) -> dict[str, Any]:
    """Start the processes of a cell that do not run yet, let everybody take turns, and return what was found as JSON-able values."""
    settings = Settings(datasets=("gsm8k", "humaneval"), output_len=pace.output_len, ignore_eos=True)
    each = max(cell.sessions, LEAST_PROMPTS) // 2
    sets = [load_prompts((name,), each, codec_of(cell.pair.target)) for name in settings.datasets]
    prompts = [prompt for both in zip(*sets, strict=True) for prompt in both]
    names = _names(cell)
    running = deployments.serve({group: _starter(cell, name) for name, group in names.items()})
    run = _Run(cell, settings, {name: running[group] for name, group in names.items()}, prompts)
    return run.settle(pace, tell) | run.measure(pace, tell)


def _names(cell: Cell) -> dict[str, str]:
    """Return what the groups of a cell are called among all that run; `alone` has no drafters, so that many cells share it."""
    of_cell = f"{cell.pair.name}/{cell.placement}"
    found = {"alone": f"{cell.pair.target} alone", "default": f"{of_cell} default"}
    return found if cell.placement == "none" else found | {"forced": f"{of_cell} forced"}


def _starter(cell: Cell, name: str) -> Starter:
    @contextmanager
    def start() -> Iterator[Servers]:
        with draft_model(cell.pair.draft) as draft, Servers(_config(cell, name, draft)) as servers:
            yield servers

    return start


def _config(cell: Cell, name: str, draft: str) -> Config:
    """Return the deployment of that name."""
    drafters, is_colocated = (0, False) if name == "alone" else PLACEMENTS[cell.placement]
    made = pair_config(cell.pair.target, draft, drafters)
    colocated = draft if is_colocated else ""
    drafts = "measured" if name == "default" else "always"
    verifier = replace(made.target, max_step_rows=MAX_STEP_ROWS, draft_model=colocated, drafts=drafts)
    return replace(made, target=verifier, broker=replace(made.broker, journal="none"))


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
        """Warm everybody up, choose the turns, and let the default find out what pays; return how it fared meanwhile."""
        first = replace(self._settings, output_len=1)
        with ThreadPoolExecutor() as pool:  # one contestant of each verifier
            list(pool.map(lambda contestant: contestant.run(self._prompts, first), self.contestants[1:]))
        self._settings = replace(self._settings, output_len=min(LEAST_TOKENS, pace.output_len))
        rate = _rate(self.turn(self.contestants[0], self.jobs(1), -1))
        self._each, num_tokens = _jobs_each(rate, self._cell.sessions, pace)
        self._settings = replace(self._settings, output_len=num_tokens)
        for other in self.contestants[1:]:
            self.turn(other, self.jobs(1), -1)
        default = next(one for one in self.contestants if one.name == "default")
        found, end = [], time.perf_counter() + pace.settle_s
        while time.perf_counter() < end:
            found.append(self.turn(default, self.jobs(self._each), -1))  # as long as those that count
        tell(
            f"{self._cell.name}: settled in {len(found)} turns; {self._each} jobs of {num_tokens} tokens a session and turn"
        )
        rates = [round(_rate(turn), 1) for turn in found]
        return {"settling_rates": rates, "jobs_each": self._each, "output_len": num_tokens}

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


def _jobs_each(rate: float, sessions: int, pace: Pace) -> tuple[int, int]:
    """Return how many jobs each session runs in a turn, and of how many tokens each."""
    num_tokens = round(pace.turn_s * rate / sessions)  # of a session in a turn
    jobs = min(MOST_JOBS, max(LEAST_JOBS if sessions > 1 else 1, round(num_tokens / pace.output_len)))
    return jobs, min(pace.output_len, max(num_tokens // jobs, LEAST_TOKENS))


def _cpu_seconds(servers: Servers) -> dict[str, float]:
    """Return the processor seconds that each process has taken so far; nothing where there is no /proc."""
    found = {name: cpu_seconds(pid) for name, pid in servers.pids().items()}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


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
