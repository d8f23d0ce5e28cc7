"""`specq bench strategies` and `specq bench shapes`: ways to judge drafts, and shapes of drafts, side by side.

Every pair of models, temperature and variant runs on the same prompts. The same processes serve the variants of a pair,
in turns (variants without drafters have their own processes). Only the options of their jobs differ. Each variant is
compared with plain decoding (no speculation at all) in the same run, in speed and token by token. It is also compared
in speed with the verifier's own lookups.

To add a variant: a line here. `options` are parameters of the jobs, as in `specq.Client.generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.agreement import texts_of
from bench.deployments import NO_DRAFTS, Deployments, Specq, deployment, starter
from bench.figures import Row, figures, or_dash
from bench.report import Figure, Report, figure, show, tell
from bench.scenario import Pair, Settings, parse_pairs
from bench.suite import options, repeatable, serving_options, suite
from bench.turns import Turn, blocks_of, measure, warm_up
from specq.protocol import SamplingParams
from specq.runtime import Number, Tell
from specq.samples import shipped
from specq.verification import STRATEGIES, strategy

PROOFS = ("tests/verification/test_exact.py", "tests/end_to_end/test_laws.py")
NOTES = {
    "ratio_to_plain": "of tokens/s, within a repetition; the median of the repetitions; plain: no drafters and no "
    "lookups",
    "ratio_to_lookup": "the same, to a verifier without drafters that drafts what the text repeats",
    "same_text": "share of completions equal to plain decoding's with the same seed; null where only the distribution "
    "is the same",
    "in_distribution": f"a text that differs may follow the target's distribution all the same; tests show it: "
    f"{', '.join(PROOFS)}",
}
Cell = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GridVariant:
    """One way to serve the same jobs."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    has_drafters: bool = True

    @property
    def strategy(self) -> str:
        return str(self.options.get("strategy", "deterministic"))

    @property
    def mode(self) -> str:
        return str(self.options.get("mode", "async"))

    def is_lossless(self, temperature: float) -> bool:
        return strategy(self.strategy).is_lossless(SamplingParams(temperature=temperature))

    def keeps_text(self, temperature: float) -> bool:
        """Return whether the text, with the same seed, is plain decoding's own.

        If not, at best it has the target's distribution.
        """
        return not strategy(self.strategy).samples_drafts(SamplingParams(temperature=temperature))


PLAIN = GridVariant("plain", NO_DRAFTS, has_drafters=False)
LOOKUP = GridVariant("lookup", has_drafters=False)

# Sixteen nodes, wide at the top: the likeliest child gets the most descendants.
STATIC_TREE = [[0, 0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 2], [1, 0, 0], [1, 1], [2, 0], [3]]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_candidates": 1},
    "best-first": {},
    "candidates-2": {"num_candidates": 2},
    "candidates-4": {"num_candidates": 4},
    "static-tree": {"tree": STATIC_TREE},
}
# SSD's (K, F) from its README: a chain of seven, and three guesses after each of its tokens.
SSD = {"max_depth": 7, "fan_out_hit": [3] * 8, "fan_out_miss": [3] * 8}


def strategies() -> list[GridVariant]:
    """Return plain decoding, lookup alone, and each strategy with drafts of the default shape."""
    return [PLAIN, LOOKUP, *(GridVariant(name, {"strategy": name}) for name in STRATEGIES)]


def shapes() -> list[GridVariant]:
    """Return plain decoding, lookup alone, and each shape of drafts.

    Each shape is drafted ahead of the verdicts and, in synchronous rounds, after them. SSD's way has its fixed
    fan-outs. After a round that was not predicted it goes without drafts, or waits for a chain that is drafted just in
    time. Lookups only supplement `best-first`, where drafters have sent no drafts.
    """
    just_in_time, rounds = ({"mode": mode} for mode in ("jit", "sync"))
    return [
        PLAIN,
        LOOKUP,
        *(GridVariant(name, shape) for name, shape in SHAPES.items()),
        GridVariant("ssd", SSD),
        *(GridVariant(f"{name} jit", shape | just_in_time) for name, shape in {"ssd": SSD, "best-first": {}}.items()),
        *(GridVariant(f"{name} sync", shape | rounds) for name, shape in SHAPES.items()),
    ]


# --- measuring ----------------------------------------------------------------------------------------------------

grid_options = options(
    serving_options,
    repeatable("--temperature", Number(0), (0.0, 0.8), "Sampling temperature (0: greedy)."),
    repeatable(
        "--pair", str, (), "Pair of models, where DRAFT may be weak, weak:NOISE or "
            "random.", metavar="NAME=TARGET,DRAFT",
        show_default="tiny and weak",
    ),
)  # fmt: skip


@suite("strategies")
@grid_options
def strategies_command(report: Report, **options: Any) -> None:
    """Measure each strategy beside plain decoding and lookup alone: acceptance, speed, and equality of texts."""
    _measure_grid(report, strategies(), strategy_table, **options)


@suite("shapes")
@grid_options
def shapes_command(report: Report, **options: Any) -> None:
    """Measure each shape of drafts beside plain decoding and lookup alone: speed, acceptance, verified trees."""
    _measure_grid(report, shapes(), shape_table, **options)


def _measure_grid(
    report: Report, variants: Sequence[GridVariant], make_table: Callable[[Sequence[Cell]], list[Row]], *,
    dataset: tuple[str, ...], numseqs: int, pair: tuple[str, ...], temperature: tuple[float, ...], **given: Any,
) -> None:  # fmt: skip
    """Measure the variants on all pairs at all temperatures; report and print the cells."""
    settings, pairs = Settings(datasets=dataset or tuple(shipped()), num_prompts=numseqs, **given), parse_pairs(pair)
    cells = [
        cell
        for one in pairs
        for cell in _run_pair(one, variants, temperature, replace(settings, model=one.target), tell)
    ]
    about = {"temperatures": list(temperature), "num_prompts": numseqs, "datasets": settings.datasets}
    results = {
        "pairs": [asdict(one) for one in pairs],
        "variants": {variant.name: variant.options for variant in variants},
        "without_drafters": [variant.name for variant in variants if not variant.has_drafters],
        "cells": cells,
        "notes": NOTES,
    }
    report.update(settings=given | about, figures=_figures(cells), results=results)
    differs = any(cell["same_text"] is None for cell in cells)
    show(make_table(cells), [f"in distribution: {NOTES['in_distribution']}"] if differs else [])


def _figures(cells: Sequence[Cell]) -> dict[str, Figure]:
    return {
        f"{cell['pair']} T={cell['temperature']:g} {cell['variant']} tokens/s": figure(
            "tokens/s", cell["tokens_per_second"]["repeats"]
        )
        for cell in cells
    }


def _run_pair(
    pair: Pair, variants: Sequence[GridVariant], temperatures: Sequence[float], settings: Settings, tell: Tell
) -> list[Cell]:
    prompts, cells = settings.prompts(), list[Cell]()
    starters = {
        group: starter(
            lambda draft, count=count: deployment(pair.target, draft, count, keys=settings.keys, has_journal=True),  # type: ignore[misc]
            pair.draft,
        )
        for group, count in (("with drafters", settings.drafters), ("alone", 0))
    }
    with Deployments() as deployments:
        tell(f"waiting for specq's processes ({pair.name})")
        running = deployments.serve(starters)
        everybody = [
            Specq(one.name, running["with drafters" if one.has_drafters else "alone"].client, 0, one.options)
            for one in variants
        ]
        for temperature in temperatures:
            tell(f"{pair.name} at temperature {temperature:g}")
            now = replace(settings, temperature=temperature)
            warm_up(everybody, prompts, now, tell)
            turns = measure(everybody, blocks_of([prompts] * now.repeats, now.concurrency), now, tell)
            about = {"pair": pair.name, "temperature": temperature}
            cells += [about | cell for cell in cells_of(turns, variants, temperature)]
    return cells


# --- cells --------------------------------------------------------------------------------------------------------


def cells_of(turns: Sequence[Turn], variants: Sequence[GridVariant], temperature: float) -> list[dict[str, Any]]:
    """Return one cell for each variant: its name, its figures, and the comparison with plain decoding."""
    found = figures(turns, dict.fromkeys((variant.name for variant in variants), 1))
    return [_cell(variant, found[variant.name], turns, temperature) for variant in variants]


def _cell(variant: GridVariant, own: dict[str, Any], turns: Sequence[Turn], temperature: float) -> dict[str, Any]:
    speculation = own["speculation"]
    names = ("acceptance_rate", "mean_accepted_length", "nodes_per_round", "leaves", "depth", "acceptance_by_depth")
    return {
        "variant": variant.name,
        "strategy": variant.strategy,
        "mode": variant.mode,
        "lossless": variant.is_lossless(temperature),
        "tokens_per_second": own["tokens_per_second"],
        "ratio_to_plain": own["ratio_to"].get(PLAIN.name, 1.0),
        "ratio_to_lookup": own["ratio_to"].get(LOOKUP.name) if variant.name != LOOKUP.name else 1.0,
        "same_text": same_text(turns, variant.name) if variant.keeps_text(temperature) else None,
        "num_tokens": own["num_tokens"],
        **{name: speculation[name] for name in names},
        "speculation": speculation,
    }


def same_text(turns: Sequence[Turn], name: str) -> float:
    """Return the share of a contestant's completions that equal plain decoding's first one for the prompt."""
    plain, own = texts_of(turns, PLAIN.name), texts_of(turns, name)
    same = [tokens == plain[prompt][0] for prompt, texts in own.items() for tokens in texts]
    return round(sum(same) / len(same), 4)


# --- tables -------------------------------------------------------------------------------------------------------


def strategy_table(cells: Sequence[dict[str, Any]]) -> list[Row]:
    """Return cells as rows for the screen, a header first: acceptance, speed and losslessness."""
    header = (
        *(
            "PAIR",
            "T",
            "STRATEGY",
            "LOSSLESS",
            "ACCEPTED",
            "TOKENS/ROUND",
            "TOKENS/S",
            "VS PLAIN",
            "VS LOOKUP",
            "SAME TEXT",
        ),
    )
    return [
        header,
        *((*_where(c), "yes" if c["lossless"] else "NO", *_acceptance(c), *_speed(c), _same(c)) for c in cells),
    ]


def shape_table(cells: Sequence[dict[str, Any]]) -> list[Row]:
    """Return cells as rows for the screen, a header first: speed, acceptance and the shape of the verified trees."""
    header = (
        *(
            "PAIR",
            "T",
            "SHAPE",
            "ACCEPTED",
            "TOKENS/ROUND",
            "NODES/ROUND",
            "LEAVES",
            "DEPTH",
            "TOKENS/S",
            "VS PLAIN",
            "VS LOOKUP",
            "SAME TEXT",
        ),
    )
    return [header, *((*_where(c), *_acceptance(c), *_tree(c), *_speed(c), _same(c)) for c in cells)]


def _where(cell: dict[str, Any]) -> Row:
    return (cell["pair"], f"{cell['temperature']:g}", cell["variant"])


def _acceptance(cell: dict[str, Any]) -> Row:
    return (or_dash(cell["acceptance_rate"], "{:.0%}".format), or_dash(cell["mean_accepted_length"], "{:.2f}".format))


def _tree(cell: dict[str, Any]) -> Row:
    return tuple(or_dash(cell[name] or None, "{:.2f}".format) for name in ("nodes_per_round", "leaves", "depth"))


def _speed(cell: dict[str, Any]) -> Row:
    to_lookup = or_dash(cell["ratio_to_lookup"], "{:.2f}x".format)
    return (f"{cell['tokens_per_second']['median']:.1f}", f"{cell['ratio_to_plain']:.2f}x", to_lookup)


def _same(cell: dict[str, Any]) -> str:
    return or_dash(cell["same_text"], "{:.0%}".format) if cell["same_text"] is not None else "in distribution"
