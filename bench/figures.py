"""From turns to figures: medians over repetitions, paired ratios, speculation figures; also by data set.

Rule: a repetition's rate is all its tokens over all its seconds. Ratios are computed within a repetition, where both
sides had the same noise, and then the median is taken.

Speed by data set, and right answers where they were counted, are a table and a plot for each data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.accuracy import Shares
from bench.deployments import PLAIN
from bench.report import Figure, figure, tell
from bench.scenario import Completion
from bench.turns import Turn
from specq.runtime import how_to_install

RESAMPLES, CONFIDENCE = 2000, 0.95  # of an interval

Row = tuple[object, ...]
HEADER: Row = (
    "CONTESTANT",
    "SESSIONS",
    "TOKENS/S",
    "VS GENERATE",
    "VS PLAIN",
    "VS LOOKUP",
    "FIRST TOKEN MS",
    "TOKENS/ROUND",
    "ACCEPTED",
    "BYTES/TOKEN",
)


def rates(turns: Sequence[Turn]) -> list[float]:
    """Return tokens a second of each repetition."""
    repeats = sorted({turn.repeat for turn in turns})
    return [_rate([turn for turn in turns if turn.repeat == repeat]) for repeat in repeats]


def _rate(turns: Sequence[Turn]) -> float:
    seconds = sum(turn.seconds for turn in turns)
    return sum(turn.num_tokens for turn in turns) / seconds if seconds else 0.0


def figures(turns: Sequence[Turn], concurrency: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Return each contestant's figures, including ratios to the others; `concurrency` by contestant."""
    by_name = {name: [turn for turn in turns if turn.contestant == name] for name in concurrency}
    result = {name: _figures(own, concurrency[name]) for name, own in by_name.items()}
    for name, own in result.items():
        own["ratio_to"] = {other: _ratio(by_name[name], by_name[other]) for other in result if other != name}
    return result


def _figures(turns: Sequence[Turn], concurrency: int) -> dict[str, Any]:
    completions = [completion for turn in turns for completion in turn.completions]
    datasets = sorted({prompt.dataset for turn in turns for prompt in turn.prompts})
    first = [completion.first_token_ms for completion in completions]
    return {
        "sessions": concurrency,
        "tokens_per_second": _spread(rates(turns)),
        "by_dataset": {name: _of_dataset(turns, name) for name in datasets},
        "time_to_first_token_ms": {"median": round(median(first), 2), "max": round(max(first), 2)},
        "num_tokens": sum(len(completion.token_ids) for completion in completions),
        "seconds": round(sum(turn.seconds for turn in turns), 3),
        "speculation": speculation(completions),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": round(median(values), 2), "repeats": [round(value, 2) for value in values]}


def _of_dataset(turns: Sequence[Turn], dataset: str) -> dict[str, Any]:
    """Return the figures of one data set. It has a rate only if its prompts had turns of their own."""
    pure = [turn for turn in turns if {prompt.dataset for prompt in turn.prompts} == {dataset}]
    completions = [
        completion
        for turn in turns
        for prompt, completion in zip(turn.prompts, turn.completions, strict=True)
        if prompt.dataset == dataset
    ]
    rate = {"tokens_per_second": _spread(rates(pure))} if pure else {}
    return rate | {"mean_accepted_length": speculation(completions)["mean_accepted_length"]}


def ratios(ours: Sequence[Turn], others: Sequence[Turn]) -> list[float]:
    """Return our rate divided by the other's, for each repetition."""
    return [own / other if other else 0.0 for own, other in zip(rates(ours), rates(others), strict=True)]


def _ratio(ours: Sequence[Turn], others: Sequence[Turn]) -> float:
    """Return the median over repetitions of our rate divided by the other's."""
    return round(median(ratios(ours, others)), 3)


# --- speculation --------------------------------------------------------------------------------------------------


def speculation(completions: Sequence[Completion]) -> dict[str, Any]:
    """Return the drafted and accepted counts over all completions; None where unknown.

    accepted_lengths   [i] = rounds in which i drafted tokens were accepted.
    acceptance_by_depth  [d] = accepted share of the nodes verified at depth d + 1.
    wasted_rows        verified nodes that were not accepted.
    hit_rate           share of rounds that began with live nodes.
    min_accept_prob    mean over rounds.
    nodes_per_round    verified nodes.
    leaves, depth      of the trees of rounds that verified any node.
    """
    stats = [completion.stats for completion in completions]
    rounds, num_tokens = _sum(stats, "rounds"), sum(len(completion.token_ids) for completion in completions)
    drafted, accepted = _sum(stats, "draft_tokens"), _sum(stats, "accepted_tokens")
    known = any("accepted_tokens" in one for one in stats)
    with_nodes = _sum(stats, "drafted_rounds")
    size = {name: _sum(stats, name) for name in ("draft_bytes", "verdict_bytes")}
    return {
        "rounds": rounds,
        "mean_accepted_length": round(num_tokens / rounds, 3) if rounds else None,
        "drafted": _sum(stats, "drafted") if known else None,
        "draft_tokens": drafted if known else None,
        "accepted_tokens": accepted if known else None,
        "stale": _sum(stats, "stale") if known else None,
        "wasted_rows": drafted - accepted if known else None,
        "hit_rate": round(_sum(stats, "hits") / rounds, 4) if known and rounds else None,
        "min_accept_prob": round(_sum(stats, "min_accept_probs") / rounds / 1e3, 4) if known and rounds else None,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "acceptance_by_depth": _by_depth(stats),
        "nodes_per_round": round(drafted / rounds, 3) if known and rounds else None,
        "leaves": round(_sum(stats, "leaves") / with_nodes, 3) if with_nodes else None,
        "depth": round(_sum(stats, "depths") / with_nodes, 3) if with_nodes else None,
        "accepted_lengths": _add([one.get("accepted_lengths", []) for one in stats]),
        "bytes_per_round": {name: round(value / rounds, 1) for name, value in size.items()}
        if known and rounds
        else None,
        "bytes_per_token": round(sum(size.values()) / num_tokens, 1) if known and num_tokens else None,
    }


def _sum(stats: Sequence[dict[str, Any]], name: str) -> int:
    return sum(int(one.get(name, 0)) for one in stats)


def _add(histograms: Sequence[Sequence[int]]) -> list[int]:
    length = max(map(len, histograms), default=0)
    return [sum(histogram[i] for histogram in histograms if i < len(histogram)) for i in range(length)]


def _by_depth(stats: Sequence[dict[str, Any]]) -> list[float]:
    depths = [one.get("positions", []) for one in stats]
    verified, accepted = (_add([[pair[i] for pair in pairs] for pairs in depths]) for i in (0, 1))
    return [round(a / v, 4) if v else 0.0 for v, a in zip(verified, accepted, strict=True)]


# --- the table ----------------------------------------------------------------------------------------------------


def table(result: dict[str, dict[str, Any]]) -> list[Row]:
    """Return the figures as rows for the screen, a header first; a dash for missing values."""
    return [HEADER, *(_row(name, own) for name, own in result.items())]


def _row(name: str, own: dict[str, Any]) -> Row:
    told = own["speculation"]
    return (
        name,
        own["sessions"],
        f"{own['tokens_per_second']['median']:.1f}",
        or_dash(own["ratio_to"].get("transformers"), "{:.2f}x".format),
        or_dash(own["ratio_to"].get("plain"), "{:.2f}x".format),
        or_dash(own["ratio_to"].get("lookup"), "{:.2f}x".format),
        f"{own['time_to_first_token_ms']['median']:.0f}",
        or_dash(told["mean_accepted_length"], "{:.2f}".format),
        or_dash(told["acceptance_rate"], "{:.0%}".format),
        or_dash(told["bytes_per_token"], "{:.0f}".format),
    )


def of_contestants(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    """Return the turns of each contestant by name."""
    return {
        name: [turn for turn in turns if turn.contestant == name] for name in dict.fromkeys(t.contestant for t in turns)
    }


def interval_text(found: dict[str, Any] | None, digits: int = 2) -> str:
    """Return the result of `paired` as text: the median and its interval; a dash for None."""
    if found is None:
        return "-"
    low, high = found["interval"]
    return f"{found['median']:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def or_dash(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)


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


ByDataset = dict[str, dict[str, dict[str, Figure]]]  # data set -> RATE or RIGHT, where known -> contestant -> figure
RATE, RIGHT = "tokens/s", "right"


def by_dataset(contestants: Mapping[str, dict[str, Any]], right: Shares) -> ByDataset:
    """Return the speed, as in `figures`, and the share of right answers for each data set, where known."""
    found: ByDataset = {}
    for name, figures in contestants.items():
        for dataset, own in figures["by_dataset"].items():
            known = found.setdefault(dataset, {})
            if "tokens_per_second" in own:
                known.setdefault(RATE, {})[name] = figure("tokens/s", own["tokens_per_second"]["repeats"])
            if dataset in right:
                known.setdefault(RIGHT, {})[name] = figure("share", right[dataset][name])
    return found


def dataset_figures(measured: ByDataset) -> dict[str, Figure]:
    """Return the figures under their names in a report."""
    return {
        f"{dataset} {name} {what}": one
        for dataset, known in measured.items()
        for what, own in known.items()
        for name, one in own.items()
    }


def dataset_table(measured: ByDataset, names: Iterable[str]) -> list[Row]:
    """Return a row for each data set and contestant, a header first."""
    header: Row = ("DATA SET", "CONTESTANT", "TOKENS/S", "VS PLAIN", "RIGHT")
    return [header, *((dataset, name, *_cells(known, name)) for dataset, known in measured.items() for name in names)]


def _cells(known: dict[str, dict[str, Figure]], name: str) -> Row:
    rate, plain, right = (known.get(what, {}).get(who) for what, who in ((RATE, name), (RATE, PLAIN), (RIGHT, name)))
    return (
        f"{rate['median']:.1f}" if rate else "-",
        f"{median(map(truediv, rate['repeats'], plain['repeats'])):.2f}x" if rate and plain else "-",
        f"{right['median']:.1%}" if right else "-",
    )


def can_draw() -> bool:
    """Return whether matplotlib is installed; if not, print how to install it."""
    if find_spec("matplotlib") is None:
        tell(f"no plots: {how_to_install('matplotlib')}")
        return False
    return True


def draw(measured: ByDataset, report: Path) -> list[Path]:
    """Write a PNG for each data set beside the report; return the files."""
    from matplotlib.figure import Figure as Canvas

    paths = []
    for dataset, known in measured.items():
        canvas: Any = Canvas(figsize=(5 * len(known), 4), layout="constrained")
        canvas.suptitle(dataset)
        for panel, (what, own) in zip(canvas.subplots(1, len(known), squeeze=False)[0], known.items(), strict=True):
            _bars(panel, what, own)
        paths.append(report.with_name(f"{report.stem}_{dataset}.png"))
        canvas.savefig(paths[-1], dpi=110)
    return paths


def _bars(panel: Any, what: str, bars: Mapping[str, Figure]) -> None:
    """Draw the median of each contestant, and its repetitions as points."""
    shown = panel.bar(list(bars), [one["median"] for one in bars.values()], color="C0")
    panel.bar_label(shown, fmt="%.3g", padding=3)
    for name, one in bars.items():
        panel.plot([name] * len(one["repeats"]), one["repeats"], "k.", markersize=4)
    panel.set(title=what, ylabel=next(iter(bars.values()))["unit"])
    panel.set_ylim(0, 1 if what == RIGHT else None)
    panel.tick_params(axis="x", rotation=30)
