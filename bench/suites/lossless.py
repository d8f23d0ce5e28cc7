"""`specq bench lossless`: drafts change speed and never text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import click

from bench.report import Report, figure, show, tell
from bench.suite import COUNT, option, repeatable, suite
from specq.models import SHOWN_PAIR, default_pair
from specq.runtime import Number
from specq.samples import shipped_token_ids


@suite("lossless")
@option("--limit", COUNT, 140, "Maximum number of prompts.")
@option("--max-tokens", COUNT, 128, "Maximum tokens of each text.")
@option("--against", click.Choice(["generate", "transformers", "plain", "vllm"]), "generate", "Reference: see above.")
@option("--model", str, default_pair, "The pair, by name. Not used with generate.", show_default=SHOWN_PAIR)
@option(
    "--dtype",
    click.Choice(["auto", "float32", "float16", "bfloat16"]),
    "auto",
    "Number format of vLLM. auto: vLLM's choice, float32 on a CPU.",
)
@repeatable("--temperature temperatures", Number(0), (0.0, 0.8), "Sampling temperature. Not used with vllm.")
@repeatable("--engine-option engine_options", str, (), "Option of the vllm engine, as NAME=VALUE.", show_default=False)
def command(
    report: Report,
    *,
    limit: int,
    max_tokens: int,
    against: str,
    model: str,
    dtype: str,
    temperatures: tuple[float, ...],
    engine_options: tuple[str, ...],
) -> None:
    """Check on a bundled pair, over real sockets, that drafts change speed and never text.

    transformers: on --model, each token of each text, greedy and sampled, must follow the rule for tokens. The rule
    uses the logits that transformers computes in float32. For greedy text this is the output of its `generate`.
    GGUF files are served in exact arithmetic.

    plain: on --model, in its default arithmetic, each text must be that of plain decoding, one at a time.

    generate: the same on `tiny`, in more ways to serve.

    vllm: greedy text of the vllm engine is compared with that of vLLM itself, which must be installed.

    A text may differ where the two best scores nearly tie. The exit status is 1 if one differs elsewhere.
    """
    asked = {"limit": limit, "max_tokens": max_tokens, "temperature": temperatures, "against": against, "model": model}
    asked |= {"dtype": dtype, "engine_options": list(engine_options)} if against == "vllm" else {}
    report.update(settings=asked)
    if against == "vllm" and find_spec("vllm") is None:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    ways = {
        "generate": lambda: _read(limit, max_tokens, "tiny", temperatures, is_tiny=True),
        "transformers": lambda: _read(limit, max_tokens, model, temperatures),
        "plain": lambda: _compare_plain(limit, max_tokens, model, temperatures),
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


def _read(
    limit: int, max_tokens: int, model: str, temperatures: Sequence[float], *, is_tiny: bool = False
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way to serve, greedy and sampled, with a comparison of its texts with transformers token by token."""
    from bench import lossless

    prompts, reader = shipped_token_ids(limit, model)[:limit], lossless.Reader(model)
    for temperature in temperatures:
        own = lossless.SAMPLED if temperature else lossless.GREEDY
        for variant in own if is_tiny else lossless.VARIANTS:
            params = {"max_tokens": max_tokens, "temperature": temperature}
            results = lossless.serve(lossless.exact(variant, model), prompts, params, model)
            found = lossless.check(reader, prompts, results, temperature, max_tokens)
            is_passed = lossless.passed(variant, found) if is_tiny else found["passed"]
            kind = "" if is_tiny else f"T={temperature:g}, " if temperature else "greedy, "
            yield kind + variant.name, found | {"passed": is_passed}


def _compare_plain(
    limit: int, max_tokens: int, model: str, temperatures: Sequence[float]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way to serve, greedy and sampled, with a comparison of its texts with those of plain decoding."""
    from bench import lossless

    prompts, (plain, *others) = shipped_token_ids(limit, model)[:limit], lossless.WAYS
    for temperature in temperatures:
        params = {"max_tokens": max_tokens, "temperature": temperature}
        wanted = lossless.serve(plain, prompts, params, model)
        for variant in others:
            results = lossless.serve(variant, prompts, params, model)
            yield f"T={temperature:g}, {variant.name}", lossless.check_plain(wanted, results)


def _compare(
    limit: int, max_tokens: int, model: str, dtype: str, engine_options: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each way to serve with the vllm engine, with a comparison of its greedy texts with vLLM's own."""
    from bench.lossless import check_vllm, serve, vllm_variants
    from bench.rivals.children import Child

    prompts = shipped_token_ids(limit, model)[:limit]
    tell("vLLM itself")
    with Child("vllm", model, dtype) as child:
        computed_in = str(child.wait_ready()["dtype"])
        theirs = [child.complete(token_ids=prompt, max_tokens=max_tokens) for prompt in prompts]
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    for variant in vllm_variants(computed_in, {"engine_options": engine_options}):
        results = serve(variant, prompts, params, model)
        yield f"{computed_in}, {variant.name}", check_vllm(prompts, theirs, results, computed_in)
