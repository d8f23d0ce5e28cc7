"""`specq bench lossless`: drafts change speed and never text."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from bench.report import Report, figure, show, tell
from bench.suite import COUNT, suite
from specq.models import SHOWN_PAIR, default_pair
from specq.samples import shipped_token_ids

TEMPERATURE = 0.8  # of the sampled texts


@suite("lossless")
@click.option("--limit", type=COUNT, default=140, show_default=True, help="Prompts at most.")
@click.option("--max-tokens", type=COUNT, default=128, show_default=True, help="Tokens of each text at most.")
@click.option(
    "--against",
    type=click.Choice(["generate", "transformers", "vllm"]),
    default="generate",
    show_default=True,
    help="See above.",
)
@click.option("--model", default=default_pair, show_default=SHOWN_PAIR, help="The pair, by name, but for generate.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="In which vLLM computes; auto: its own choice, float32 on a CPU.",
)
@click.option(
    "--engine-option", "engine_options", multiple=True, help="For the vllm engine, as NAME=VALUE; may be repeated."
)
def command(
    report: Report,
    *,
    limit: int,
    max_tokens: int,
    against: str,
    model: str,
    dtype: str,
    engine_options: tuple[str, ...],
) -> None:
    """Check on a bundled pair, over real sockets, that drafts change speed and never text.

    generate: on `tiny`, greedy text is compared with transformers' own `generate`, sampled text with plain decoding.
    transformers: on --model, each token of each text, greedy and sampled, must be what the rule for tokens gives from the
    logits that transformers computes in float32.
    vllm: greedy text of the vllm engine is compared with that of vLLM itself, which must be installed.

    A text may differ where the two best scores nearly tie; the exit status is 1 if one differs elsewhere.
    """
    asked = {"limit": limit, "max_tokens": max_tokens, "temperature": TEMPERATURE, "against": against, "model": model}
    asked |= {"dtype": dtype, "engine_options": list(engine_options)} if against == "vllm" else {}
    report.update(settings=asked)
    ways = {
        "generate": lambda: _measure(limit, max_tokens),
        "transformers": lambda: _read(limit, max_tokens, model),
        "vllm": lambda: _compare(limit, max_tokens, model, dtype, engine_options),
    }
    found: dict[str, Any] = {}
    for name, one in ways[against]():
        tell(f"{name}: {one['equal']} of {one['texts']} equal")
        found[name] = one
        report.update(figures={f"{name}, equal texts": figure("share", [one["equal"] / one["texts"]])}, results=found)
    show([("WAY TO SERVE", "EQUAL", "TEXTS", "PASSED"), *(_row(name, one) for name, one in found.items())])
    sys.exit(0 if all(one["passed"] for one in found.values()) else 1)


def _row(name: str, one: dict[str, Any]) -> tuple[object, ...]:
    return (name, one["equal"], one["texts"], "ok" if one["passed"] else "FAIL")


def _measure(limit: int, max_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each way to serve, and how its texts compare."""
    from bench import lossless
    from bench.drafts import make_random_draft

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


def _read(limit: int, max_tokens: int, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way to serve, greedy and sampled, and how its texts compare with transformers token by token."""
    from bench.lossless import serve
    from bench.lossless_tokens import VARIANTS, Reader, check

    prompts, reader = shipped_token_ids(limit, model)[:limit], Reader(model)
    for variant in VARIANTS:
        for temperature in (0.0, TEMPERATURE):
            params = {"max_tokens": max_tokens, "temperature": temperature}
            results = serve(variant, prompts, params, pair=model)
            kind = f"T={temperature:g}" if temperature else "greedy"
            yield f"{kind}, {variant.name}", check(reader, prompts, results, temperature)


def _compare(
    limit: int, max_tokens: int, model: str, dtype: str, engine_options: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way to serve with the vllm engine, and how its greedy texts compare with vLLM's own."""
    from bench.lossless import serve
    from bench.lossless_vllm import check, variants
    from bench.rivals.children import Child

    prompts = shipped_token_ids(limit, model)[:limit]
    tell("vLLM itself")
    with Child("vllm", model, dtype) as child:
        computed_in = str(child.wait_ready()["dtype"])
        theirs = [child.complete(token_ids=prompt, max_tokens=max_tokens) for prompt in prompts]
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    for variant in variants(computed_in, {"engine_options": engine_options}):
        results = serve(variant, prompts, params, pair=model)
        yield f"{computed_in}, {variant.name}", check(prompts, theirs, results, computed_in)
