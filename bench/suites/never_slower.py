"""`specq bench never-slower`: whether drafts, with a verifier's defaults, ever cost more than they gain.

A cell is a pair of models, a placement of drafters, and a number of sessions. In each cell, contestants take turns on
the same jobs:

    plain     no speculation (`mode="plain"`), on a verifier without drafters
    lookup    the same verifier's prompt lookups, always used
    default   the drafters of the cell, and a verifier that measures whether drafts and lookups pay off
              (`--drafts measured`)
    forced    the same drafters, and a verifier that always uses them (`--drafts always`)

Rules: ratios are of turns of one repetition, seconds apart. A cell has their median and its confidence interval. All
verifiers compute all prompts before. Otherwise the second contestant on a verifier would find them in its KV cache.
Processes continue to the next cell if it needs the same ones. So a default also knows what it learned at another load,
as in service.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle, islice, repeat
from statistics import median
from typing import Any

import click

from bench.deployments import LOOKUP, NO_DRAFTS, PLAIN, Deployments, Specq, Starter, deployment, starter
from bench.figures import CONFIDENCE, interval_text, of_contestants, paired, rates, speculation
from bench.report import Figure, Report, attempt, figure, show, tell
from bench.scenario import Pair, Settings, parse_pairs
from bench.suite import COUNT, option, repeatable, suite
from bench.turns import Turn, measure, settle, take_turn
from specq.config import Config
from specq.processes.servers import Servers
from specq.protocol import ConfigError
from specq.runtime import Number, Tell
from specq.samples import Prompt, codec_of, load_prompts

DEFAULT_PAIRS = ("tiny=tiny,tiny", "random=tiny,random")
# The number of draft workers, and whether the verifier drafts with the draft model itself.
PLACEMENTS = {"none": (0, False), "one": (1, False), "two": (2, False), "colocated": (0, True), "both": (1, True)}
MAX_STEP_ROWS = 64
LEAST_PROMPTS = 16  # of a cell
# Jobs of a session in a turn. At the end of a turn, which drafts make uneven, fewer sessions run than in the cell. With
# one job each, the result would mostly show this.
LEAST_JOBS, MOST_JOBS = 4, 64
LEAST_TOKENS = 24  # of a job
LEAST, FORCED_WINS, OF_FORCED = (
    0.98,
    1.05,
    0.97,
)  # minimum to the best of plain and lookup; forced drafts win from here; minimum to forced
HEADER = (
    *("CELL", "PLAIN", "LOOKUP", "DEFAULT", "FORCED", "DEFAULT/BEST", "FORCED/BEST", "DEFAULT/FORCED", "DRAFT CPU", ""),
)


@dataclass(frozen=True, slots=True)
class ServedCell:
    """A pair of models, a placement of drafters, and the number of sessions in flight."""

    pair: Pair
    placement: str
    sessions: int

    @property
    def name(self) -> str:
        return f"{self.pair.name}/{self.placement}/{self.sessions}"


@dataclass(frozen=True, slots=True)
class Pace:
    """The durations of a cell.

    turn_s      of each turn of `plain`.
    repeats     turns of each contestant.
    settle_s    of the default before.
    output_len  tokens of each job; fewer if a single job would take longer than a turn.
    """

    turn_s: float
    repeats: int
    settle_s: float
    output_len: int


@suite("never-slower")
@repeatable(
    "--pair",
    str,
    (),
    "Pair of models, where DRAFT may be weak, weak:NOISE or random.",
    metavar="NAME=TARGET,DRAFT",
    show_default="tiny with its draft, and with a random one",
)
@repeatable("--sessions", COUNT, (1, 4, 16), "Number of sessions in flight.")
@repeatable(
    "--placement",
    click.Choice(list(PLACEMENTS)),
    tuple(PLACEMENTS),
    "Drafters: none, one or two workers, the verifier's process, or both.",
    show_default="all",
)
@repeatable("--only", str, (), "Measure only this cell.", metavar="PAIR/PLACEMENT/SESSIONS", show_default=False)
@option("--turn-s", Number(0.01), 1.2, "Seconds of a plain turn.")
@option("--repeats", COUNT, 6, "Number of turns of each contestant.")
@option("--settle-s", Number(0), 8.0, "Seconds of service before the turns.")
@option("--output-len", COUNT, 96, "Tokens of each job. Fewer if one job takes longer than a turn.")
@click.option(
    "--resume",
    is_flag=True,
    help="Keep the cells in the file of --out. Measure missing and failed cells.",
)
def command(
    report: Report,
    *,
    pair: tuple[str, ...],
    sessions: tuple[int, ...],
    placement: tuple[str, ...],
    only: tuple[str, ...],
    resume: bool,
    **pace: Any,
) -> None:
    """Measure whether the default is ever slower than no speculation or lookups alone, and keeps the gains of drafts.

    A cell passes if the default reaches 0.98 of the better of plain and lookup. Where drafts that are always used win
    by 5%, it must also reach 0.97 of them. Each cell takes about 45 seconds, up to three minutes with a slow model.
    Successive cells that differ only in the sessions share their processes.
    """
    grid = _chosen(cells(parse_pairs(pair or DEFAULT_PAIRS), placement, sessions), only)
    if resume:
        report.resume()
    report.update(settings=pace)
    about = {"pace": pace} | {
        part: report.content[part] for part in ("date", "commit")
    }  # of a cell, because a report may hold older ones
    with Deployments() as deployments:
        for cell in [cell for cell in grid if not _is_measured(report.content["results"].get(cell.name))]:
            found = attempt(cell.name, lambda cell=cell: measure_cell(cell, Pace(**pace), deployments, tell))  # type: ignore[misc]
            report.update(figures=_figures(cell.name, found), results={cell.name: about | asdict(cell) | found})
    show([HEADER, *(_row(name, one) for name, one in report.content["results"].items())], [
        (f"in brackets: {CONFIDENCE:.0%} confidence intervals of the median ratio; DRAFT CPU: processor share of the "
        f"drafters")
    ])  # fmt: skip


def _chosen(grid: list[ServedCell], only: tuple[str, ...]) -> list[ServedCell]:
    """Return the named cells, or all; raises ConfigError for an unknown name."""
    names = [cell.name for cell in grid]
    for name in only:
        if name not in names:
            raise ConfigError(f"there is no cell {name!r} among {', '.join(names)}")
    return [cell for cell in grid if not only or cell.name in only]


def _is_measured(found: dict[str, Any] | None) -> bool:
    """Return whether a cell has been measured; a failed one is measured again."""
    return found is not None and "error" not in found


def _figures(name: str, found: dict[str, Any]) -> dict[str, Figure]:
    rates = {f"{name} {who} tokens/s": figure("tokens/s", own) for who, own in found.get("rates", {}).items()}
    kinds = ("to_best", "forced_to_best", "to_forced")
    return rates | {f"{name} {kind}": figure("ratio", found[kind]["ratios"]) for kind in kinds if kind in found}


# --- cells --------------------------------------------------------------------------------------------------------


def cells(pairs: Sequence[Pair], placements: Sequence[str], sessions: Sequence[int]) -> list[ServedCell]:
    """Return the grid.

    Without drafters the draft model makes no difference, so only one pair of each target is included there.
    """
    found = [ServedCell(pair, placement, count) for pair in pairs for placement in placements for count in sessions]
    first = {pair.target: pair for pair in reversed(pairs)}
    return [cell for cell in found if cell.placement != "none" or first[cell.pair.target] == cell.pair]


def measure_cell(cell: ServedCell, pace: Pace, deployments: Deployments, tell: Tell) -> dict[str, Any]:
    """Start the missing processes of a cell, let all contestants take turns, and return JSON-able results."""
    settings = Settings(output_len=pace.output_len, ignore_eos=True, concurrency=cell.sessions, repeats=pace.repeats)
    each = max(cell.sessions, LEAST_PROMPTS) // 2
    sets = [load_prompts((name,), each, codec_of(cell.pair.target)) for name in ("gsm8k", "humaneval")]
    prompts = [prompt for both in zip(*sets, strict=True) for prompt in both]
    names = names_of(cell)
    running = deployments.serve({group: _starter(cell, name) for name, group in names.items()})
    everybody = _contestants({name: running[group] for name, group in names.items()})
    return take_turns(cell, pace, everybody, prompts, settings, tell)


def names_of(cell: ServedCell) -> dict[str, str]:
    """Return the names of a cell's groups among all that run.

    `alone` has no drafters, so many cells share it.
    """
    of_cell = f"{cell.pair.name}/{cell.placement}"
    found = {"alone": f"{cell.pair.target} alone", "default": f"{of_cell} default"}
    return found if cell.placement == "none" else found | {"forced": f"{of_cell} forced"}


def _starter(cell: ServedCell, name: str) -> Starter:
    return starter(partial(_config, cell, name), cell.pair.draft)


def _config(cell: ServedCell, name: str, draft: str) -> Config:
    """Return the deployment of that name."""
    drafters, is_colocated = (0, False) if name == "alone" else PLACEMENTS[cell.placement]
    own: dict[str, Any] = {
        "draft_model": draft if is_colocated else "",
        "drafts": "measured" if name == "default" else "always",
    }
    return deployment(cell.pair.target, draft, drafters, max_step_rows=MAX_STEP_ROWS, **own)


def _contestants(running: dict[str, Servers]) -> list[Specq]:
    alone = running.pop("alone").client
    found = [Specq(PLAIN, alone, options=NO_DRAFTS), Specq(LOOKUP, alone)]
    return found + [Specq(name, servers.client, pids=servers.pids()) for name, servers in running.items()]


def take_turns(
    cell: ServedCell, pace: Pace, everybody: Sequence[Specq], prompts: Sequence[Prompt], settings: Settings, tell: Tell
) -> dict[str, Any]:
    """Warm up all contestants, choose the size of turns, let the default settle, and let all take turns.

    Returns the default's rates while it settled, rates, ratios, and the processor shares of the default's processes.
    """
    following, (plain, *others) = cycle(prompts), everybody
    with ThreadPoolExecutor() as pool:  # one contestant of each verifier
        list(pool.map(lambda one: one.run(prompts, replace(settings, output_len=1)), others))
    short = replace(settings, output_len=min(LEAST_TOKENS, pace.output_len))
    rate = take_turn(plain, list(islice(following, cell.sessions)), short).rate
    jobs_each, num_tokens = size_of_turns(rate, cell.sessions, pace)
    settings, size = replace(settings, output_len=num_tokens), jobs_each * cell.sessions
    for other in others:
        take_turn(other, list(islice(following, cell.sessions)), settings)
    default = next(one for one in everybody if one.name == "default")
    settled = settle(default, (list(islice(following, size)) for _ in repeat(0)), settings, pace.settle_s)
    tell(f"{cell.name}: settled in {len(settled)} turns; {jobs_each} jobs of {num_tokens} tokens a session and turn")
    default.cpu_s.clear()
    turns = measure(
        everybody, [(number, list(islice(following, size))) for number in range(pace.repeats)], settings, tell
    )
    seconds = sum(turn.seconds for turn in turns if turn.contestant == default.name)
    return {
        "settling_rates": [round(turn.rate, 1) for turn in settled],
        "jobs_each": jobs_each,
        "output_len": num_tokens,
        **summary(turns),
        "cpu_share_of_default": {name: round(used / seconds, 4) for name, used in default.cpu_s.items()},
    }


def size_of_turns(rate: float, sessions: int, pace: Pace) -> tuple[int, int]:
    """Return how many jobs each session runs in a turn, and of how many tokens each."""
    num_tokens = round(pace.turn_s * rate / sessions)  # of a session in a turn
    jobs = min(MOST_JOBS, max(LEAST_JOBS if sessions > 1 else 1, round(num_tokens / pace.output_len)))
    return jobs, min(pace.output_len, max(num_tokens // jobs, LEAST_TOKENS))


# --- figures ------------------------------------------------------------------------------------------------------


def summary(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the rates of each contestant, and the compared ratios.

    to_best     default to the better of plain and lookup, by their medians.
    forced_to_best, to_forced   likewise.
    """
    own = of_contestants(turns)
    found_rates = {name: rates(turns) for name, turns in own.items()}
    best = max((PLAIN, LOOKUP), key=lambda name: median(found_rates[name]))
    found: dict[str, Any] = {
        "best": best,
        "rates": {name: [round(rate, 2) for rate in each] for name, each in found_rates.items()},
        "medians": {name: round(median(each), 1) for name, each in found_rates.items()},
        "to_best": paired(found_rates["default"], found_rates[best]),
        "speculation": {name: _speculation(turns) for name, turns in own.items()},
    }
    if "forced" in found_rates:
        found["forced_to_best"] = paired(found_rates["forced"], found_rates[best])
        found["to_forced"] = paired(found_rates["default"], found_rates["forced"])
    return found


def _speculation(turns: Sequence[Turn]) -> dict[str, Any]:
    completions = [completion for turn in turns for completion in turn.completions]
    keys = ("rounds", "mean_accepted_length", "drafted", "draft_tokens", "min_accept_prob")
    first = [completion.first_token_ms for completion in completions]
    return {key: speculation(completions)[key] for key in keys} | {"first_token_ms": round(median(first), 2)}


def _row(name: str, found: dict[str, Any]) -> tuple[object, ...]:
    if "error" in found:
        return (name, *[""] * (len(HEADER) - 2), "ERROR")
    medians = found["medians"]
    rates = [medians.get(who, "-") for who in ("plain", "lookup", "default", "forced")]
    ratios = [interval_text(found.get(kind), 3) for kind in ("to_best", "forced_to_best", "to_forced")]
    drafters = sum(share for who, share in found["cpu_share_of_default"].items() if who.startswith("draft"))
    return (name, *rates, *ratios, f"{drafters:.3f}", "ok" if passes(found) else "MISSED")


def passes(found: dict[str, Any]) -> bool:
    """Return whether a cell passes."""
    is_kept = "forced_to_best" not in found or (
        found["forced_to_best"]["median"] < FORCED_WINS or found["to_forced"]["median"] >= OF_FORCED
    )
    return bool(found["to_best"]["median"] >= LEAST and is_kept)
