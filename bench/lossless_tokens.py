"""Is each token of a text the one that the target gives, by transformers' code in float32 on the values that the file has?

A text is read in one forward pass of transformers; at each position specq's rule (the best logit; the best perturbed one if
T > 0) says which token follows what is there. If that is the text's own everywhere, the text is what transformers would have
written. Where it is not, the two tokens' scores are compared: near ties fall either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.agreement import NEAR_TIE
from bench.lossless import Prompt, Variant
from specq.client import Result
from specq.engines.torch import load_network
from specq.models import resolve_model
from specq.protocol import SamplingParams
from specq.verification.sampling import perturbed_scores

VARIANTS = (
    Variant("plain, 1 in flight", 0, 1, mode="plain"),
    Variant("lookup alone, 4 in flight", 0, 4),
    Variant("1 drafter, 4 in flight", 1, 4),
    Variant("a colocated drafter, 1 in flight", 0, 1, colocated=True),
    Variant("a colocated drafter, 16 in flight", 0, 16, colocated=True),
)


class Reader:
    """The target in transformers, and the texts that it has read already."""

    def __init__(self, model: str) -> None:
        self._network = load_network(Path(resolve_model(model, "target")), torch.device("cpu"), "auto").float()
        self._found: dict[tuple[object, ...], list[dict[str, Any]]] = {}

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


def check(reader: Reader, prompts: Sequence[Prompt], results: Sequence[Result], temperature: float) -> dict[str, Any]:
    """Return how many texts and tokens are the target's, and each token that is not; seed i is prompt i's."""
    differing = []
    for seed, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        params = SamplingParams(temperature=temperature, seed=seed)
        differing += [{"prompt": seed, **one} for one in reader.differences(prompt, result.token_ids, params)]
    num_equal = len(results) - len({one["prompt"] for one in differing})
    counts = {name: sum(result.stats[name] for result in results) for name in ("draft_tokens", "accepted_tokens")}
    num_tokens = sum(len(result.token_ids) for result in results)
    passed = all(one["near_tie"] for one in differing)
    found = {"texts": len(results), "equal": num_equal, "tokens": num_tokens, "differing": differing}
    return found | {"passed": passed, **counts}
