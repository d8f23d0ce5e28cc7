"""Check on the bundled pair, over real sockets, that drafts change speed and never text.

    python scripts/lossless.py --out docs/results/lossless.json

Greedy text is compared with transformers' own `generate`; sampled text (T = 0.8, a seed a prompt) with specq's own plain
decoding, which is no speculation at all. What drafts varies: the verifier's lookups alone, one drafter, three, one of random
weights, the verifier itself; so do the jobs in flight: 1 and 16. A text that differs is explained: the gap of the two best
(perturbed) scores at the first differing token, by transformers.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoModelForCausalLM

import specq
from specq.bench.machine import describe
from specq.bench.prompts import load_prompts
from specq.client.result import Result
from specq.config.addresses import free_address
from specq.config.loading import load
from specq.models import resolve_model
from specq.protocol.params import SamplingParams
from specq.text.codec import TextCodec, load_tokenizer_files
from specq.verification.sampling import perturbed_scores
from workers.up import Group, members

NEAR_TIE = 1e-4
Prompt = list[int]


@dataclass(frozen=True)
class Variant:
    """One way to serve the same jobs."""

    name: str
    drafters: int
    in_flight: int
    random_draft: bool = False
    own: bool = False  # the verifier drafts for itself
    mode: str = "async"


GREEDY = (
    Variant("greedy, 2 drafters, 16 in flight", 2, 16),
    Variant("greedy, the verifier's own drafter, 16 in flight", 0, 16, own=True),
)
SAMPLED = (
    Variant("plain, 1 in flight", 0, 1, mode="plain"),
    Variant("lookup alone, 1 in flight", 0, 1),
    Variant("lookup alone, 16 in flight", 0, 16),
    Variant("1 drafter, 1 in flight", 1, 1),
    Variant("1 drafter, 16 in flight", 1, 16),
    Variant("3 drafters, 16 in flight", 3, 16),
    Variant("1 drafter of random weights, 16 in flight", 1, 16, random_draft=True),
    Variant("the verifier's own drafter, 1 in flight", 0, 1, own=True),
    Variant("the verifier's own drafter, 16 in flight", 0, 16, own=True),
    Variant("the verifier's own drafter and 1 drafter, 16 in flight", 1, 16, own=True),
)


def read_prompts(limit: int) -> list[list[int]]:
    """Return the shipped benchmark prompts as token ids, in the chat template."""
    codec = TextCodec(load_tokenizer_files(resolve_model("tiny", "target")))
    return [list(prompt.token_ids) for prompt in load_prompts(("gsm8k", "humaneval"), limit, codec)][:limit]


def random_draft(directory: Path) -> str:
    """Make a draft model of the bundled shape with random weights; return its directory."""
    source = Path(resolve_model("tiny", "draft"))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    return str(directory)


def serve(variant: Variant, prompts: list[Prompt], params: dict[str, Any], draft: str) -> list[Result]:
    """Run all prompts through a broker, a verifier and the variant's drafters, each a process; seed i for prompt i."""
    config = load()
    config = replace(
        config,
        up=replace(config.up, drafters=variant.drafters),
        broker=replace(config.broker, bind=free_address()),
        target=replace(config.target, draft_model="tiny" if variant.own else ""),
        draft=replace(config.draft, model=draft if variant.random_draft else "tiny"),
    )
    with Group(members(config, ["--log-level", "error"])) as group:
        group.wait_ready(timeout_s=120)
        with specq.Client(group.address) as client:
            return _run(client, variant.in_flight, prompts, params | {"mode": variant.mode})


def _run(client: specq.Client, in_flight: int, prompts: list[Prompt], params: dict[str, Any]) -> list[Result]:
    jobs, results = [], []
    for seed, prompt in enumerate(prompts):
        jobs.append(client.submit(token_ids=prompt, seed=seed, **params))
        if len(jobs) >= in_flight:
            results.append(jobs.pop(0).result(600))
    return results + [job.result(600) for job in jobs]


def reference(model: Any, prompts: list[Prompt], max_tokens: int) -> list[list[int]]:
    """Return what transformers' greedy `generate` says after each prompt."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def explain(model: Any, prompt: Prompt, wanted: list[int], got: list[int], params: SamplingParams) -> dict[str, Any]:
    """Return where two texts part, and the gap of the two best scores there (perturbed ones if T > 0)."""
    at = next((i for i, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
    context = prompt + wanted[:at]
    with torch.inference_mode():
        logits = model(torch.tensor([context])).logits[0, -1:].float()
    best = perturbed_scores(logits, [params], [len(context)])[0].topk(2).values
    gap = float(best[0] - best[1])
    return {"token": at, "gap": gap, "near_tie": gap < NEAR_TIE}


def compare(
    model: Any, prompts: list[Prompt], wanted: list[list[int]], results: list[Result], temperature: float
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
    if not (variant.drafters or variant.own) or variant.random_draft:  # then only the verifier's lookups help, if any
        return same
    return same and 0 < report["accepted_tokens"] < report["draft_tokens"]


@click.command()
@click.option("--limit", default=140, help="Prompts at most.")
@click.option("--max-tokens", default=128)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Where to keep the report, as JSON.")
def main(limit: int, max_tokens: int, out: Path | None) -> None:
    """Run all checks; the exit status is 1 if one fails."""
    prompts = read_prompts(limit)
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny", "target"), dtype=torch.float32).eval()
    reports: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        draft = random_draft(Path(scratch))
        wanted = reference(model, prompts, max_tokens)
        for variant in GREEDY:
            results = serve(variant, prompts, {"max_tokens": max_tokens}, draft)
            reports[variant.name] = compare(model, prompts, wanted, results, 0.0)
        sampled = {"max_tokens": max_tokens, "temperature": 0.8}
        for variant in SAMPLED:
            results = serve(variant, prompts, sampled, draft)
            if variant is SAMPLED[0]:
                wanted = [result.token_ids for result in results]
            reports[variant.name] = compare(model, prompts, wanted, results, 0.8)
            click.echo(f"{variant.name}: {reports[variant.name]}")
    variants = {variant.name: variant for variant in (*GREEDY, *SAMPLED)}
    for name, report in reports.items():
        report["passed"] = passed(variants[name], report)
        click.echo(f"{'ok  ' if report['passed'] else 'FAIL'} {name}: {report['equal']} of {report['texts']} equal")
    if out is not None:
        record = describe(" ".join(("python", *sys.argv))) | {"reports": reports}
        out.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(0 if all(report["passed"] for report in reports.values()) else 1)


if __name__ == "__main__":
    main()
