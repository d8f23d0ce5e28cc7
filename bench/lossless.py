"""Drafts change speed and never text: the same jobs served in many ways, over real sockets.

The source of drafts varies: text lookup, also in ended jobs, lookahead decoding, one drafter, three, one with random
weights, and the verifier's colocated drafter. The number of jobs in flight is 1 or 16.

transformers reads each text in one forward pass, in float32 on the values in the file. At each position specq's rule
(the best logit, or the best perturbed one if T > 0) gives the right next token. If these are the text's own tokens
everywhere, the text is what transformers would write. Where a token differs, the two tokens' scores are compared: near
ties fall either way.

Texts of the `vllm` engine are compared with those of vLLM itself. It completes each prompt alone, in a separate
process, and returns the logits of its two best tokens at each position. Where a text differs from vLLM's, the distance
of these logits shows why. Arithmetic of that precision cannot separate two logits that are a few of its steps apart.
There vLLM's own text changes with its batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.agreement import NEAR_TIE, PRECISIONS, parting
from bench.deployments import deployment
from bench.scenario import draft_model
from specq.checkpoints import is_gguf
from specq.client import Client, Result
from specq.engines.torch import load_network
from specq.models import resolve_model
from specq.processes.servers import Servers
from specq.protocol import SamplingParams
from specq.verification.sampling import perturbed_scores

STEPS = 4  # two logits of vLLM within this many steps of the precision at the best one are a near tie
COUNTED = ("draft_tokens", "accepted_tokens")

Prompt = list[int]
Best = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Variant:
    """One way to serve the same jobs."""

    name: str
    drafters: int
    in_flight: int
    random_draft: bool = False
    colocated: bool = False  # the verifier drafts by itself
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


VARIANTS = (  # for other pairs than `tiny`
    SAMPLED[0],
    Variant("lookup alone, 4 in flight", 0, 4),
    Variant("1 drafter, 4 in flight", 1, 4),
    Variant("a colocated drafter, 1 in flight", 0, 1, colocated=True),
    Variant("a colocated drafter, 16 in flight", 0, 16, colocated=True),
)


# In which texts are compared with those of the first; all drafts are in use.
WAYS = (
    SAMPLED[0],
    *(
        replace(variant, target={"drafts": "always", **variant.target})
        for variant in (
            Variant("plain, 16 in flight", 0, 16, mode="plain"),
            Variant("lookup alone, 16 in flight", 0, 16),
            Variant("lookahead, 4 in flight", 0, 4, target=LOOKAHEAD_ALONE),
            Variant("1 drafter, 4 in flight", 1, 4),
            Variant("a colocated drafter, 1 in flight", 0, 1, colocated=True),
            Variant("a colocated drafter, lookup and 1 drafter, 16 in flight", 1, 16, colocated=True),
        )
    ),
)


def exact(variant: Variant, pair: str) -> Variant:
    """Return a way to serve in exact arithmetic. Other models than GGUF files have no other."""
    if not is_gguf(resolve_model(pair, "target")):
        return variant
    return replace(variant, target={**variant.target, "engine_options": ('arithmetic="exact"',)})


def serve(variant: Variant, prompts: Sequence[Prompt], params: dict[str, Any], pair: str = "tiny") -> list[Result]:
    """Run all prompts through a broker, a verifier and the variant's drafters, each a process; seed i for prompt i."""
    own = {"draft_model": pair if variant.colocated else "", **variant.target}
    with (
        draft_model("random" if variant.random_draft else pair, pair) as draft,
        Servers(deployment(pair, draft, variant.drafters, has_journal=True, **own)) as servers,
    ):
        servers.wait_ready()
        return _run(servers.client, variant.in_flight, prompts, params | {"mode": variant.mode})


def _run(client: Client, in_flight: int, prompts: Sequence[Prompt], params: dict[str, Any]) -> list[Result]:
    jobs, results = [], []
    for seed, prompt in enumerate(prompts):
        jobs.append(client.submit(token_ids=prompt, seed=seed, **params))
        if len(jobs) >= in_flight:
            results.append(jobs.pop(0).result(600))
    return results + [job.result(600) for job in jobs]


def passed(variant: Variant, found: dict[str, Any]) -> bool:
    """Return whether every difference is a near tie, and the drafters worked as this variant requires."""
    same = all(case["near_tie"] for case in found["differing"])
    has_drafts = (variant.drafters or variant.colocated) and not variant.random_draft
    if not has_drafts:  # then only the verifier's lookups may help
        return same
    return same and 0 < found["accepted_tokens"] < found["draft_tokens"]


class Reader:
    """The target in transformers, with a cache of the texts that it has read."""

    def __init__(self, model: str) -> None:
        self._network = load_network(Path(resolve_model(model, "target")), torch.device("cpu"), "auto").float()
        self._found: dict[tuple[object, ...], list[dict[str, Any]]] = {}
        ending = self._network.generation_config.eos_token_id
        self._endings = {*(ending if isinstance(ending, list) else [ending])} - {None}

    def ends_well(self, token_ids: Sequence[int], max_tokens: int) -> bool:
        """Return whether a text ends as in `generate`: at the first end of text, else after `max_tokens` tokens."""
        is_ended = bool(token_ids) and token_ids[-1] in self._endings
        return not self._endings & {*token_ids[:-1]} and (is_ended or len(token_ids) == max_tokens)

    def differences(self, prompt: Prompt, token_ids: Sequence[int], params: SamplingParams) -> list[dict[str, Any]]:
        """Return the tokens that differ from the target's: where, which two, and the gap of their scores."""
        key = (*prompt, None, *token_ids, params.temperature, params.seed)
        if key not in self._found:
            self._found[key] = self._read(prompt, list(token_ids), params)
        return self._found[key]

    def _read(self, prompt: Prompt, token_ids: list[int], params: SamplingParams) -> list[dict[str, Any]]:
        with torch.inference_mode():
            logits = self._network(torch.tensor([prompt + token_ids[:-1]])).logits[0, len(prompt) - 1 :].float()
        positions = [len(prompt) + i for i in range(len(token_ids))]
        scores = perturbed_scores(logits, [params] * len(token_ids), positions)  # [num_tokens, vocab]
        best = scores.argmax(-1).tolist()
        return [
            {"token": i, "said": said, "target": target, "gap": gap, "near_tie": gap < NEAR_TIE}
            for i, (said, target) in enumerate(zip(token_ids, best, strict=True))
            if said != target
            for gap in [float(scores[i, target] - scores[i, said])]
        ]


def check(
    reader: Reader, prompts: Sequence[Prompt], results: Sequence[Result], temperature: float, max_tokens: int
) -> dict[str, Any]:
    """Return how many texts and tokens are the target's, and each token and end that is not; seed i is prompt i's."""
    differing = []
    for seed, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        params = SamplingParams(temperature=temperature, seed=seed)
        differing += [{"prompt": seed, **one} for one in reader.differences(prompt, result.token_ids, params)]
        if not reader.ends_well(result.token_ids, max_tokens):
            differing.append({"prompt": seed, "token": len(result.token_ids), "near_tie": False})
    found = {"tokens": sum(len(result.token_ids) for result in results)}
    return found | _tally(results, differing)


def _tally(results: Sequence[Result], differing: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how many texts are equal, the differences, and the draft counts.

    `passed` is true if each difference is a near tie.
    """
    equal = len(results) - len({one["prompt"] for one in differing})
    counts = {name: sum(result.stats[name] for result in results) for name in COUNTED}
    is_passed = all(one["near_tie"] for one in differing)
    return {"texts": len(results), "equal": equal, "differing": differing, "passed": is_passed, **counts}


def check_plain(wanted: Sequence[Result], results: Sequence[Result]) -> dict[str, Any]:
    """Return how many texts are those of plain decoding, and where each other one first differs."""
    differing = [
        {"prompt": number, "token": parting(own.token_ids, result.token_ids), "near_tie": False}
        for number, (own, result) in enumerate(zip(wanted, results, strict=True))
        if own.token_ids != result.token_ids
    ]
    return {"tokens": sum(len(result.token_ids) for result in results)} | _tally(results, differing)


# --- vLLM -------------------------------------------------------------------------------------------------------------


def vllm_variants(dtype: str, options: Mapping[str, Any]) -> tuple[Variant, ...]:
    """Return the ways to serve with the vllm engine, with all drafts in use; `options`: further verifier options."""
    target = {"engine": "vllm", "dtype": dtype, "drafts": "always", **options}
    return tuple(replace(variant, target=target) for variant in VARIANTS)


def step_of(logit: float, dtype: str) -> float:
    """Return the distance of a logit to the next larger one in a precision."""
    return math.ldexp(1.0, math.frexp(logit)[1] - PRECISIONS[dtype])


def first_difference(said: Sequence[int], wanted: Sequence[int], best: Sequence[Best], dtype: str) -> dict[str, Any]:
    """Return where a text first differs from vLLM's; {} for equal texts.

    The result has the position, both tokens, and the gap of vLLM's two best logits there. It has that gap in steps of
    the precision, and whether it is a near tie of just these two tokens.
    """
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


def check_vllm(
    prompts: Sequence[Prompt], theirs: Sequence[Mapping[str, Any]], results: Sequence[Result], dtype: str
) -> dict[str, Any]:
    """Return how many texts are vLLM's, and the first difference of each other text.

    theirs: as from `rivals.vllm.Vllm.complete`.
    """
    differing = [
        {"prompt": number, **found}
        for number, (_, own, result) in enumerate(zip(prompts, theirs, results, strict=True))
        if (found := first_difference(result.token_ids, own["token_ids"], own["best"], dtype))
    ]
    return _tally(results, differing)
