"""Drafts change speed and never text: the same jobs served in many ways, over real sockets, on the bundled pair.

Greedy text is compared with transformers' own `generate`; sampled text (a seed a prompt) with specq's own plain decoding,
which is no speculation at all. What drafts varies: what the verifier finds in the text alone, and in ended jobs, lookahead decoding, one drafter, three, one of random weights,
the verifier's colocated drafter; so do the jobs in flight: 1 and 16. A text that differs is explained: the gap of the two
best (perturbed) scores at the first differing token, by transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.agreement import NEAR_TIE, parting
from specq.client import Client, Result
from specq.config import Config
from specq.models import resolve_model
from specq.processes.servers import Servers, pair_config
from specq.protocol import SamplingParams
from specq.verification.sampling import perturbed_scores

Prompt = list[int]


@dataclass(frozen=True)
class Variant:
    """One way to serve the same jobs."""

    name: str
    drafters: int
    in_flight: int
    random_draft: bool = False
    colocated: bool = False  # the verifier drafts for itself
    target: Mapping[str, Any] = field(default_factory=dict)  # further options of the verifier
    mode: str = "async"


LOOKAHEAD = {"lookahead": True, "drafts": "always"}
LOOKAHEAD_ALONE = {**LOOKAHEAD, "prompt_lookup": "none"}
GREEDY = (
    Variant("greedy, lookahead, 16 in flight", 0, 16, target=LOOKAHEAD_ALONE),
    Variant("greedy, 2 drafters, 16 in flight", 2, 16),
    Variant("greedy, a colocated drafter, 16 in flight", 0, 16, colocated=True),
)
SAMPLED = (
    Variant("plain, 1 in flight", 0, 1, mode="plain"),
    Variant("lookup alone, 1 in flight", 0, 1),
    Variant("lookup alone, 16 in flight", 0, 16),
    Variant("lookup and ended jobs, 16 in flight", 0, 16, target={"shared_tokens": 100_000}),
    Variant("lookahead, 1 in flight", 0, 1, target=LOOKAHEAD_ALONE),
    Variant("lookahead, 16 in flight", 0, 16, target=LOOKAHEAD_ALONE),
    Variant(
        "lookahead, lookup, a colocated drafter and 1 drafter, 16 in flight", 1, 16, colocated=True, target=LOOKAHEAD
    ),
    Variant("1 drafter, 1 in flight", 1, 1),
    Variant("1 drafter, 16 in flight", 1, 16),
    Variant("3 drafters, 16 in flight", 3, 16),
    Variant("1 drafter of random weights, 16 in flight", 1, 16, random_draft=True),
    Variant("a colocated drafter, 1 in flight", 0, 1, colocated=True),
    Variant("a colocated drafter, 16 in flight", 0, 16, colocated=True),
    Variant("a colocated drafter and 1 drafter, 16 in flight", 1, 16, colocated=True),
)


def load_reference() -> Any:
    """Return the bundled target in transformers."""
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(resolve_model("tiny", "target"), dtype=torch.float32).eval()


def serve(
    variant: Variant, prompts: Sequence[Prompt], params: dict[str, Any], random_draft: str = "", pair: str = "tiny"
) -> list[Result]:
    """Run all prompts through a broker, a verifier and the variant's drafters, each a process; seed i for prompt i."""
    with Servers(_config(variant, random_draft, pair)) as servers:
        servers.wait_ready()
        return _run(servers.client, variant.in_flight, prompts, params | {"mode": variant.mode})


def _config(variant: Variant, random_draft: str, pair: str) -> Config:
    config = pair_config(pair, random_draft if variant.random_draft else pair, variant.drafters)
    target = {"draft_model": pair if variant.colocated else "", **variant.target}
    return replace(config, target=replace(config.target, **target))


def _run(client: Client, in_flight: int, prompts: Sequence[Prompt], params: dict[str, Any]) -> list[Result]:
    jobs, results = [], []
    for seed, prompt in enumerate(prompts):
        jobs.append(client.submit(token_ids=prompt, seed=seed, **params))
        if len(jobs) >= in_flight:
            results.append(jobs.pop(0).result(600))
    return results + [job.result(600) for job in jobs]


def reference(model: Any, prompts: Sequence[Prompt], max_tokens: int) -> list[list[int]]:
    """Return what transformers' greedy `generate` says after each prompt."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def explain(model: Any, prompt: Prompt, wanted: list[int], got: list[int], params: SamplingParams) -> dict[str, Any]:
    """Return where two texts part, and the gap of the two best scores there (perturbed ones if T > 0)."""
    at = parting(wanted, got)
    context = prompt + wanted[:at]
    with torch.inference_mode():
        logits = model(torch.tensor([context])).logits[0, -1:].float()
    best = perturbed_scores(logits, [params], [len(context)])[0].topk(2).values
    gap = float(best[0] - best[1])
    return {"token": at, "gap": gap, "near_tie": gap < NEAR_TIE}


def compare(
    model: Any, prompts: Sequence[Prompt], wanted: Sequence[list[int]], results: Sequence[Result], temperature: float
) -> dict[str, Any]:
    """Return how many texts are equal, each difference explained, and what the drafters did."""
    differing = []
    for seed, (prompt, text, result) in enumerate(zip(prompts, wanted, results, strict=True)):
        if text != result.token_ids:
            params = SamplingParams(temperature=temperature, seed=seed)
            differing.append({"prompt": seed, **explain(model, prompt, text, result.token_ids, params)})
    names = ("rounds", "drafted", "draft_tokens", "accepted_tokens")
    counts = {name: sum((result.stats | result.internal)[name] for result in results) for name in names}
    return {"texts": len(results), "equal": len(results) - len(differing), "differing": differing, **counts}


def passed(variant: Variant, report: dict[str, Any]) -> bool:
    """Is every difference a near-tie, and did the drafters do what the check is about?"""
    same = all(case["near_tie"] for case in report["differing"])
    has_drafts = (variant.drafters or variant.colocated) and not variant.random_draft
    if not has_drafts:  # then only the verifier's lookups help, if any
        return same
    return same and 0 < report["accepted_tokens"] < report["draft_tokens"]
