"""The results of contestants, {variant: {load: figures}}, as rows for the screen and as figures for the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.report import Figure, figure

Row = tuple[object, ...]
Found = Mapping[str, Any]
RATE, PLAIN = "tokens_per_second", "plain"
VLLM, SPECULATION = (
    "vllm",
    {"vllm-spec": "draft model", "vllm-eagle3": "EAGLE-3", "vllm-ngram": "n-grams"},
)  # vLLM's own speculation
ENGINE = "engine "  # prefix of the key with a variant's engine settings
# Columns of the table: a heading, and the figure under it.
COLUMNS = {
    "T": "temperature",
    "SESSIONS": "sessions",
    "TOKENS/S": RATE,
    "BUSY": "busy_tokens_per_second",
    "A USER": "per_user",
    "FIRST MS": "first_token_ms",
    "BETWEEN": "itl_ms",
    "P99": "itl_p99_ms",
    "L": "mean_accepted_length",
    "NODES": "verified_per_round",
    "STEP MS": "step_ms",
    "HOST": "host_ms",
    "WAIT": "wait_ms",
    "DRAFTED/S": "drafted_per_second",
    "STALE": "stale_share",
    "TO PLAIN": "to_plain",
    "INTERVAL": "interval",
}


def table(name: str, found: Found) -> list[Row]:
    """Return a row for each measured variant and load, a header first; empty columns are left out."""
    rows = [_row(name, variant, found, key, one) for variant, key, one in _measured(found)]
    used = [i for i in range(len(COLUMNS) + 1) if any(row[i] != "" for row in rows)]
    header: Row = ("CONTESTANT", *COLUMNS)
    return [tuple(row[i] for i in used) for row in (header, *rows)] if rows else []


def _row(name: str, variant: str, found: Found, key: str, one: Found) -> Row:
    plain = found.get(PLAIN, {}).get(key, {})
    if variant != PLAIN and "to_plain" not in one and RATE in plain:
        one = {**one, "to_plain": round(one[RATE] / plain[RATE], 2)}
    return (f"{name} {variant}", *(one.get(figure_name, "") for figure_name in COLUMNS.values()))


def notes(name: str, found: Found) -> list[str]:
    """Return a line for each variant with known engine settings."""
    return [
        f"{name}, {key}: {', '.join(f'{option} {value}' for option, value in about.items())}"
        for key, about in found.items()
        if key.startswith(ENGINE) and isinstance(about, dict)
    ]


def summary(results: Mapping[str, Found]) -> list[Row]:
    """Return a row for each load that vLLM was measured with.

    It has vLLM's rates, and its best way to draft with the depth. It has the ratios of all others to vLLM plain and to
    vLLM's best.
    """
    plain = {key: one[RATE] for variant, key, one in _measured(results.get(VLLM, {})) if variant == PLAIN}
    others = {
        f"{name} {variant}": {key: one[RATE] for of, key, one in _measured(found) if of == variant}
        for name, found in results.items() if name not in (VLLM, *SPECULATION)
        for variant in dict.fromkeys(variant for variant, _, _ in _measured(found))
    }  # fmt: skip
    others = {name: rates for name, rates in others.items() if set(rates) & set(plain)}
    header: Row = ("SESSIONS", "VLLM", "ITS DRAFTS", "BEST", *(f"{name} TO BOTH" for name in others))
    drafting = {of: results[name] for name, of in SPECULATION.items() if name in results}
    rows = [_compared(key, rate, drafting, list(others.values())) for key, rate in plain.items()]
    return [header, *rows] if rows else []


def _compared(key: str, plain: float, spec: Mapping[str, Found], others: Sequence[Mapping[str, float]]) -> Row:
    rates = (
        (one[RATE], f"{of} {variant}")
        for of, found in spec.items()
        for variant, at, one in _measured(found)
        if at == key
    )
    drafting = max(rates, default=(0.0, "-"))
    best = max(plain, drafting[0])
    ratios = [f"{one[key] / plain:.2f} {one[key] / best:.2f}" if key in one else "" for one in others]
    return (key, plain, *drafting, *ratios)


def figures(name: str, found: Found) -> dict[str, Figure]:
    """Return the rates."""
    return {f"{name} {variant} S={key}": figure("tokens/s", one["rates"]) for variant, key, one in _measured(found)}


def _measured(found: Found) -> Iterator[tuple[str, str, Found]]:
    """Yield (variant, load, figures) of completed runs; a failed contestant has none."""
    for variant, by_load in found.items():
        if isinstance(by_load, dict):
            yield from ((variant, key, one) for key, one in by_load.items() if isinstance(one, dict) and RATE in one)
