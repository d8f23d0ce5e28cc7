"""Strategies or draft shapes side by side: every pair of models, every temperature, every variant, on the same prompts.

The variants of a pair are served by the same processes (those without drafters by processes of their own) and take turns,
as `measure` has it; only what their jobs ask for differs. Each is compared with plain decoding (no speculation at all) in the
same run, in speed and token by token, and in speed with the verifier's own lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from bench.contestants import Specq
from bench.figures import Row, figures, or_dash
from bench.measure import Turn, measure
from bench.pairs import Pair, draft_model
from bench.settings import Settings
from bench.variants import LOOKUP, PLAIN, Variant
from specq.processes.servers import Servers, pair_config
from specq.protocol import ConfigError
from specq.samples import Prompt, codec_of, load_prompts

Tell = Callable[[str], None]
PROOFS = ("tests/verification/test_exact.py", "tests/end_to_end/test_laws.py")
NOTES = {
    "ratio_to_plain": "of tokens/s, within a repetition; the median of the repetitions; plain: no drafters and no lookups",
    "ratio_to_lookup": "the same, to a verifier without drafters that drafts what the text repeats",
    "same_text": "share of completions equal to plain decoding's with the same seed; null where only the distribution is the same",
    "in_distribution": f"a text that differs may follow the target's distribution all the same; tests show it: {', '.join(PROOFS)}",
}


def run_grid(
    pairs: Sequence[Pair], variants: Sequence[Variant], temperatures: Sequence[float], settings: Settings, tell: Tell
) -> dict[str, Any]:
    """Measure all variants, plain decoding among them, on all pairs; return settings and cells as JSON-able values."""
    cells = [
        cell
        for pair in pairs
        for cell in _run_pair(pair, variants, temperatures, replace(settings, model=pair.target), tell)
    ]
    about = {
        name: value
        for name, value in asdict(settings).items()
        if name not in ("model", "draft_model", "k", "temperature")
    }
    return {
        "settings": about | {"temperatures": list(temperatures)},
        "pairs": [asdict(pair) for pair in pairs],
        "variants": {variant.name: variant.options for variant in variants},
        "without_drafters": [variant.name for variant in variants if not variant.has_drafters],
        "cells": cells,
        "notes": NOTES,
    }


def _run_pair(
    pair: Pair, variants: Sequence[Variant], temperatures: Sequence[float], settings: Settings, tell: Tell
) -> list[dict[str, Any]]:
    prompts = load_prompts(settings.datasets, settings.num_prompts, codec_of(pair.target))
    if not prompts:
        raise ConfigError(f"no prompts in {', '.join(settings.datasets)}")
    with (
        draft_model(pair.draft) as draft,
        Servers(pair_config(pair.target, draft, settings.drafters, settings.keys)) as servers,
        Servers(pair_config(pair.target, draft, 0, settings.keys)) as alone,
    ):
        tell(f"waiting for specq's processes ({pair.name})")
        for started in (servers, alone):
            started.wait_ready()
        clients = {True: servers.client, False: alone.client}
        contestants = [Specq(v.name, clients[v.has_drafters], settings.concurrency, v.options) for v in variants]
        cells = []
        for temperature in temperatures:
            tell(f"{pair.name} at temperature {temperature:g}")
            turns = measure(contestants, prompts, replace(settings, temperature=temperature), tell)
            cells += [
                {"pair": pair.name, "temperature": temperature, **cell}
                for cell in cells_of(turns, variants, temperature)
            ]
    return cells


def cells_of(turns: Sequence[Turn], variants: Sequence[Variant], temperature: float) -> list[dict[str, Any]]:
    """Return one cell for each variant: what it is, its figures, and how it compares with plain decoding."""
    found = figures(turns, dict.fromkeys((variant.name for variant in variants), 1))
    return [_cell(variant, found[variant.name], turns, temperature) for variant in variants]


def _cell(variant: Variant, own: dict[str, Any], turns: Sequence[Turn], temperature: float) -> dict[str, Any]:
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
    """Return the share of a contestant's completions, of all repetitions, that are plain decoding's first of the prompt."""
    plain: dict[Prompt, list[int]] = {}
    for prompt, tokens in _texts(turns, PLAIN.name):
        plain.setdefault(prompt, tokens)
    same = [tokens == plain[prompt] for prompt, tokens in _texts(turns, name)]
    return round(sum(same) / len(same), 4)


def _texts(turns: Sequence[Turn], name: str) -> list[tuple[Prompt, list[int]]]:
    return [
        (prompt, completion.token_ids)
        for turn in turns
        if turn.contestant == name
        for prompt, completion in zip(turn.prompts, turn.completions, strict=True)
    ]


# --- tables -------------------------------------------------------------------------------------------------------


def strategy_table(cells: Sequence[dict[str, Any]]) -> list[Row]:
    """Return cells as rows for the screen, a header first: acceptance, speed and losslessness."""
    header = (
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
    )
    return [
        header,
        *((*_where(c), "yes" if c["lossless"] else "NO", *_acceptance(c), *_speed(c), _same(c)) for c in cells),
    ]


def shape_table(cells: Sequence[dict[str, Any]]) -> list[Row]:
    """Return cells as rows for the screen, a header first: speed, acceptance and what the verified trees were like."""
    header = (
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
