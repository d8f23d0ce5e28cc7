"""`specq bench lossless`: drafts change speed and never text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from specq.bench.prompts import shipped_token_ids
from specq.bench.report import Report, figure, show, tell
from specq.bench.suite import COUNT, suite

TEMPERATURE = 0.8  # of the sampled texts


@suite("lossless")
@click.option("--limit", type=COUNT, default=140, show_default=True, help="Prompts at most.")
@click.option("--max-tokens", type=COUNT, default=128, show_default=True, help="Tokens of each text at most.")
def command(report: Report, *, limit: int, max_tokens: int) -> None:
    """Check on the bundled pair, over real sockets, that drafts change speed and never text.

    Greedy text is compared with transformers' own `generate`, sampled text with plain decoding. A text may differ where the
    two best scores nearly tie; the exit status is 1 if one differs elsewhere.
    """
    report.update(settings={"limit": limit, "max_tokens": max_tokens, "temperature": TEMPERATURE})
    found: dict[str, Any] = {}
    for name, one in _measure(limit, max_tokens):
        tell(f"{name}: {one['equal']} of {one['texts']} equal")
        found[name] = one
        report.update(figures={f"{name}, equal texts": figure("share", [one["equal"] / one["texts"]])}, results=found)
    show([("WAY TO SERVE", "EQUAL", "TEXTS", "PASSED"), *(_row(name, one) for name, one in found.items())])
    sys.exit(0 if all(one["passed"] for one in found.values()) else 1)


def _row(name: str, one: dict[str, Any]) -> tuple[object, ...]:
    return (name, one["equal"], one["texts"], "ok" if one["passed"] else "FAIL")


def _measure(limit: int, max_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each way to serve, and how its texts compare."""
    from specq.bench import lossless
    from specq.bench.drafts import make_random_draft

    prompts, model = shipped_token_ids(limit)[:limit], lossless.load_reference()
    wanted = lossless.reference(model, prompts, max_tokens)
    with TemporaryDirectory(prefix="specq-random-draft-") as draft:
        make_random_draft("tiny", Path(draft))
        for variant in (*lossless.GREEDY, *lossless.SAMPLED):
            temperature = 0.0 if variant in lossless.GREEDY else TEMPERATURE
            results = lossless.serve(variant, prompts, {"max_tokens": max_tokens, "temperature": temperature}, draft)
            if variant is lossless.SAMPLED[0]:
                wanted = [result.token_ids for result in results]
            found = lossless.compare(model, prompts, wanted, results, temperature)
            yield variant.name, found | {"passed": lossless.passed(variant, found)}
