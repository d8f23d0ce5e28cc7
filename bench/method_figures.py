"""Figures of drafting methods from their turns: speed and ratios, acceptance, draft costs, equality of texts.

No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

from bench import agreement
from bench.deployments import LOOKUP, PLAIN
from bench.figures import Row, figures, of_contestants, or_dash, ratios
from bench.methods import DRAFT, EVERYTHING, ServedMethod
from bench.report import Figure, figure
from bench.turns import Turn

SHOWN_DEPTHS = 6
NOTES = (
    "ratios are of tokens/s within a repetition: the median, and the range of the repetitions",
    (
        "BY DEPTH: share of all rounds that accepted at least one drafted token, two, and so on; TOKENS/ROUND is 1 + "
        "their sum, but for cut ends"
    ),
    (
        "DRAFT MS: what a step takes beside its forward pass (drafting, receiving, sending), less the same of plain "
        "decoding; FORWARD MS: that pass"
    ),
    "WORKER MS: processor time of the draft worker for each step; it drafts while the verifier computes",
    "MB: the drafters' weights in their files",
)


@dataclass(frozen=True, slots=True)
class MeasuredMethod:
    """The turns of all methods at one temperature.

    steps      by method, from `StepSplit`.
    worker_s   by method, the processor seconds of its draft worker.
    """

    turns: list[Turn]
    steps: dict[str, dict[str, Any]]
    worker_s: dict[str, float]


def cells_of(methods: Sequence[ServedMethod], measured: MeasuredMethod, concurrency: int) -> dict[str, dict[str, Any]]:
    """Return the results of each method, by name, as JSON-able values."""
    by_name = of_contestants(measured.turns)
    found = figures(measured.turns, dict.fromkeys(by_name, concurrency))
    plain = measured.steps[PLAIN]
    different = agreement.differences(measured.turns, None)
    cells = {}
    for method in methods:
        own = found[method.name]
        texts = sum(len(turn.completions) for turn in by_name[method.name])
        costs = costs_of(measured.steps[method.name], plain, measured.worker_s.get(method.name))
        cells[method.name] = {
            "kind": method.kind,
            "tokens_per_second": own["tokens_per_second"],
            "ratio_to": {
                other: figure("ratio", ratios(by_name[method.name], by_name[other]))
                for other in (PLAIN, LOOKUP, DRAFT)
                if other in by_name
            },
            "tokens_per_round": own["speculation"]["mean_accepted_length"],
            "accepted_by_depth": accepted_by_depth(own["speculation"]["accepted_lengths"]),
            **costs,
            "weight_bytes": method.num_bytes,
            "texts": texts,
            "differing": [one.prompt for one in different if one.contestant == method.name],
            "by_dataset": own["by_dataset"],
            "time_to_first_token_ms": own["time_to_first_token_ms"],
            "num_tokens": own["num_tokens"],
            "speculation": own["speculation"],
        }
    return cells


def accepted_by_depth(accepted_lengths: Sequence[int]) -> list[float]:
    """Return [d] = share of rounds that accepted at least d + 1 drafted tokens.

    accepted_lengths: [i] = rounds in which i were accepted.
    """
    rounds = sum(accepted_lengths)
    at_least = list(accumulate(reversed(accepted_lengths[1:])))[::-1]
    return [round(count / rounds, 4) for count in at_least]


def costs_of(own: Mapping[str, Any], plain: Mapping[str, Any], worker_s: float | None) -> dict[str, float | None]:
    """Return the milliseconds of a method's steps, see NOTES; None for parts that it does not have."""
    between, of_plain = (one["phases_ms"]["wait"] + one["phases_ms"]["host"] for one in (own, plain))
    return {
        "forward_ms": round(own["phases_ms"]["forward"], 3),
        "draft_ms": round(between - of_plain, 3),
        "worker_ms": None if worker_s is None else round(1e3 * worker_s / max(own["num_steps"], 1), 3),
    }


def to_best(turns: Sequence[Turn]) -> tuple[str, Figure] | None:
    """Return the single method with the best median rate, and the ratios of all methods at once to it.

    None if one of the two was not measured.
    """
    own = of_contestants(turns)
    everything = own.pop(EVERYTHING, None)
    if not everything:
        return None
    best = max(own, key=lambda name: median(ratios(own[name], own[PLAIN])))
    return best, figure("ratio", ratios(everything, own[best]))


def figures_of(temperature: str, cells: Mapping[str, dict[str, Any]]) -> dict[str, Figure]:
    """Return the figures by which two reports are compared."""
    found = {}
    for name, cell in cells.items():
        found[f"{temperature} {name} tokens/s"] = figure("tokens/s", cell["tokens_per_second"]["repeats"])
        found[f"{temperature} {name} to plain"] = cell["ratio_to"][PLAIN]
        found[f"{temperature} {name} tokens/round"] = figure("tokens/round", [cell["tokens_per_round"] or 0.0])
    return found


# --- tables
# -----------------------------------------------------------------------------------------------------------------


def method_table(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row for each method at each temperature, a header first."""
    header: Row = (
        *("", "METHOD", "TOKENS/ROUND", "BY DEPTH", "FORWARD MS", "DRAFT MS", "WORKER MS", "MB"),
        *("TOKENS/S", "TO PLAIN", "TO LOOKUP", "TO DRAFT MODEL", "SAME TEXT"),
    )
    return [header, *(_row(at, name, cell) for at, one in results.items() for name, cell in one["methods"].items())]


def _row(temperature: str, name: str, cell: dict[str, Any]) -> Row:
    depths = " ".join(f"{share:.0%}" for share in cell["accepted_by_depth"][:SHOWN_DEPTHS])
    return (
        *(temperature, name, or_dash(cell["tokens_per_round"], "{:.2f}".format), depths or "-"),
        *(or_dash(cell[which], "{:.2f}".format) for which in ("forward_ms", "draft_ms", "worker_ms")),
        or_dash(cell["weight_bytes"] / 1e6 or None, "{:.1f}".format),
        f"{cell['tokens_per_second']['median']:.1f}",
        *(ratio_text(cell["ratio_to"].get(other)) for other in (PLAIN, LOOKUP, DRAFT)),
        "yes" if not cell["differing"] else "NO",
    )


def ratio_text(found: Figure | None) -> str:
    """Return a ratio with the range of its repetitions."""
    return "-" if found is None else f"{found['median']:.2f} ({min(found['repeats']):.2f}..{max(found['repeats']):.2f})"


def dataset_table(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return tokens a round by data set, with a header first.

    A data set with turns of its own also has the ratio to plain decoding.
    """
    cells = [(at, name, cell, one["methods"]) for at, one in results.items() for name, cell in one["methods"].items()]
    datasets = list(dict.fromkeys(dataset for _, _, cell, _ in cells for dataset in cell["by_dataset"]))
    rows: list[Row] = [("", "METHOD", *(dataset.upper() for dataset in datasets))]
    for at, name, cell, methods in cells:
        plain = methods[PLAIN]["by_dataset"]
        rows.append((at, name, *(_of_dataset(cell["by_dataset"][one], plain[one]) for one in datasets)))
    return rows


def _of_dataset(own: dict[str, Any], plain: dict[str, Any]) -> str:
    length = or_dash(own["mean_accepted_length"], "{:.2f}".format)
    if "tokens_per_second" not in own:
        return length
    pairs = zip(own["tokens_per_second"]["repeats"], plain["tokens_per_second"]["repeats"], strict=True)
    return f"{length}, {median(ours / theirs for ours, theirs in pairs):.2f}x"
