"""Are greedy texts of the `vllm` engine those of vLLM itself?

vLLM completes each prompt alone, in a process of its own, and tells the logits of its two best tokens at each place. Where a text of
specq leaves vLLM's, their distance says why: arithmetic of that precision cannot tell two logits apart that are a few of its steps from
each other, and vLLM's own text changes there with the size of its batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.agreement import PRECISIONS, parting
from bench.lossless import Prompt, Variant
from bench.lossless_tokens import VARIANTS as TORCH_VARIANTS
from specq.client import Result

STEPS = 4  # of the precision at the best logit, within which two logits count as a near tie

Best = Sequence[tuple[int, float]]


def variants(dtype: str, options: Mapping[str, Any]) -> tuple[Variant, ...]:
    """Return the ways to serve with the vllm engine, all drafts in use; `options` are further ones of the verifier."""
    target = {"engine": "vllm", "dtype": dtype, "drafts": "always", **options}
    return tuple(replace(variant, target=target) for variant in TORCH_VARIANTS)


def step_of(logit: float, dtype: str) -> float:
    """Return the distance of a logit to the next larger one that a precision can tell."""
    return math.ldexp(1.0, math.frexp(logit)[1] - PRECISIONS[dtype])


def first_difference(said: Sequence[int], wanted: Sequence[int], best: Sequence[Best], dtype: str) -> dict[str, Any]:
    """Return where a text first leaves vLLM's: the place, both tokens, the gap of vLLM's two best logits there, that gap in steps of the
    precision, and whether it is a near tie of just these two; {} where the texts are equal."""
    at = parting(said, wanted)
    if at == len(said) == len(wanted):
        return {}
    if at == min(len(said), len(wanted)):
        return {"token": at, "said": len(said), "wanted": len(wanted), "near_tie": False}  # one ends before the other
    (first, high), (second, low) = best[at]
    steps = (high - low) / step_of(high, dtype)
    is_tie = {said[at], wanted[at]} == {first, second} and steps <= STEPS
    found = {"token": at, "said": said[at], "wanted": wanted[at], "gap": high - low, "steps": round(steps, 2)}
    return found | {"near_tie": is_tie}


def check(
    prompts: Sequence[Prompt], theirs: Sequence[Mapping[str, Any]], results: Sequence[Result], dtype: str
) -> dict[str, Any]:
    """Return how many texts are vLLM's, and the first difference of each that is not; `theirs` as of `rivals.vllm.Vllm.complete`."""
    differing = [
        {"prompt": number, **found}
        for number, (_, own, result) in enumerate(zip(prompts, theirs, results, strict=True))
        if (found := first_difference(result.token_ids, own["token_ids"], own["best"], dtype))
    ]
    counts = {name: sum(result.stats[name] for result in results) for name in ("draft_tokens", "accepted_tokens")}
    found = {"texts": len(results), "equal": len(results) - len(differing), "differing": differing}
    return found | {"passed": all(one["near_tie"] for one in differing), **counts}
