"""Greedy text of the inflated pair against the small one's, and speculation with both models in one process."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from specq.bench.prompts import load_prompts
from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.proposers import Expansion
from specq.proposers.draft_model import DraftModel
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, Judgement, SessionStep, Tree
from specq.text.codec import TextCodec, load_tokenizer_files

GREEDY = SamplingParams(logprobs=2)


def prompts(limit: int) -> list[list[int]]:
    """Return GSM8K and HumanEval prompts as token ids."""
    codec = TextCodec(load_tokenizer_files(resolve_model("tiny", "target")))
    return [list(prompt.token_ids) for prompt in load_prompts(("gsm8k", "humaneval"), limit, codec)]


def compare_text(small: TorchEngine, large: TorchEngine, texts: list[list[int]], count: int) -> dict[str, Any]:
    """Greedy text of both, one session a step; at each first difference, the gap of the small one's best two logits."""
    gaps = []
    for prompt in texts:
        own, own_gaps = generate(small, prompt, count)
        other, _ = generate(large, prompt, count)
        at = next((i for i, (a, b) in enumerate(zip(own, other, strict=True)) if a != b), None)
        if at is not None:
            gaps.append(round(own_gaps[at], 4))
    return {"texts": len(texts), "tokens": count, "differing": len(gaps), "gaps": sorted(gaps)}


def generate(engine: TorchEngine, prompt: list[int], count: int) -> tuple[list[int], list[float]]:
    """Return plain greedy text, and the gap of the best two logits at each token."""
    text, gaps, start = list(prompt), [], engine.open(0, np.array(prompt, np.int32))
    while len(text) < len(prompt) + count:
        (judgement,) = engine.step([SessionStep(0, start, np.array(text[start:], np.int32), GREEDY)])
        assert judgement.logprobs is not None
        gaps.append(float(judgement.logprobs.top[0, 0] - judgement.logprobs.top[0, 1]))
        start = len(text)
        text += judgement.token_ids.tolist()
    engine.close(0)
    return text[len(prompt) :], gaps


def speculate(
    engine: TorchEngine, draft: DraftModel | None, texts: list[list[int]], count: int, depth: int
) -> dict[str, Any]:
    """Decode texts one at a time, each round a chain of `depth` and its verification; without `draft`, plainly."""
    params = SamplingParams()
    rounds = tokens = 0
    seconds = {"draft": 0.0, "verify": 0.0}
    for prompt in texts:
        text = list(prompt)
        start = engine.open(0, np.array(prompt, np.int32))
        if draft is not None:
            draft.open(0, np.array(prompt, np.int32), params)
        judgement = _verify(engine, text, start, NO_TREE)  # the prompt, before the clock starts
        start = _commit(draft, text, judgement)
        if draft is not None:
            _chain(draft, 1)  # the drafter's own prompt
        while len(text) < len(prompt) + count:
            began = time.perf_counter()
            tree = _chain(draft, depth) if draft is not None else NO_TREE
            drafted = time.perf_counter()
            judgement = _verify(engine, text, start, tree)
            start = _commit(draft, text, judgement)
            seconds["draft"] += drafted - began
            seconds["verify"] += time.perf_counter() - drafted
            rounds += 1
            tokens += len(judgement.token_ids)
        engine.close(0)
        if draft is not None:
            draft.close(0)
    total = sum(seconds.values())
    return {
        "depth": depth if draft is not None else 0, "tokens_s": round(tokens / total, 1),
        "mean_accepted_length": round(tokens / rounds, 3),
        "draft_ms": round(seconds["draft"] / rounds * 1e3, 3), "verify_ms": round(seconds["verify"] / rounds * 1e3, 3),
    }  # fmt: skip


def _verify(engine: TorchEngine, text: list[int], start: int, tree: Tree) -> Judgement:
    (judgement,) = engine.step([SessionStep(0, start, np.array(text[start:], np.int32), SamplingParams(), tree)])
    return judgement


def _commit(draft: DraftModel | None, text: list[int], judgement: Judgement) -> int:
    """Take a verdict; return the length of the engine's KV."""
    start = len(text) + len(judgement.path)
    text += judgement.token_ids.tolist()
    if draft is not None:
        draft.commit(0, judgement.token_ids, list(judgement.path))
    return start


def _chain(draft: DraftModel, depth: int) -> Tree:
    """Draft a chain whose node ids are its levels; what an earlier chain left is not followed on."""
    (levels,) = draft.expand_chain([Expansion(0, -1, tuple(range(depth)))], depth)
    token_ids = np.array([int(children.token_ids[0]) for children in levels], np.int32)
    return Tree(token_ids, np.arange(len(token_ids), dtype=np.int32) - 1, np.zeros(len(token_ids), np.float32))
