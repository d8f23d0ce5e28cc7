"""How many of a target's tokens Medusa heads foresee: rounds played out along the target's own text.

The state of each place comes from one pass of the target along its text; what the heads say there is compared with what came. In a round
the heads speak once, so a tree of their choices is accepted down to the first place whose token is not among those of the tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from specq.engines.torch import MedusaHeads, load_heads
from specq.protocol import Int64Array, ModelInfo
from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.training.acceptance import SAMPLED_TEMPERATURE
from specq.training.architecture import hidden_states
from specq.training.chat_prompts import Chat, bench_prompts
from specq.training.draft import keep_report, load_target
from specq.training.draft_settings import MedusaSettings
from specq.training.ranks import BEYOND, answer_with_noise, rank_figures, ranks_of, show_figures
from specq.training.report import conditions


def evaluate(settings: MedusaSettings) -> None:
    """Measure the 8-bit heads on every benchmark and write the report."""
    target, chat = load_target(settings)
    heads = load_heads(str(settings.out), str(settings.target), _about(target, settings.target), str(settings.device))
    torch.manual_seed(settings.seed)
    report: dict[str, Any] = conditions(settings.device)
    report["num_bytes"] = sum(file.stat().st_size for file in settings.out.iterdir())
    report["acceptance"] = {
        path.stem: _of_benchmark(target, heads, chat, path, settings) for path in sorted(settings.bench.glob("*.jsonl"))
    }
    keep_report(report, settings)


def _about(target: Any, checkpoint: Path) -> ModelInfo:
    """Return of a target what heads must fit."""
    tokenizer = load_tokenizer_files(checkpoint)["tokenizer.json"]
    return ModelInfo(
        name=checkpoint.name,
        fingerprint="",
        dtype="",
        engine="torch",
        vocab_size=target.get_input_embeddings().weight.shape[0],
        num_tokens=num_tokens(tokenizer),
        eos_ids=(),
        max_length=target.config.max_position_embeddings,
        tokenizer_hash=tokenizer_hash(tokenizer),
    )


def _of_benchmark(
    target: Any, heads: MedusaHeads, chat: Chat, path: Path, settings: MedusaSettings
) -> dict[str, dict[str, Any]]:
    """Return the figures of one benchmark, for each way of choosing tokens."""
    prompts, found = bench_prompts(path, chat, settings.bench_prompts), {}
    for temperature in (0.0, SAMPLED_TEMPERATURE):
        ranks = measure_ranks(target, heads, prompts, chat, settings.bench_tokens, temperature)
        found[f"T={temperature:g}"] = figures = rank_figures(ranks)
        show_figures(path.stem, temperature, figures)
    return found


@torch.no_grad()
def measure_ranks(
    target: Any, heads: MedusaHeads, prompts: list[list[int]], chat: Chat, num_new: int, temperature: float
) -> list[Int64Array]:
    """Let the target answer. Return for each answer i64[tokens, heads]: the rank, from 0, that head i, from the state that made token
    p, gives token p + 1 + i; see UNKNOWN and BEYOND. At a temperature both add the same noise."""
    answers, noise = answer_with_noise(target, prompts, chat, num_new, temperature)
    return [
        _ranks(target, heads, prompt, answer, None if noise is None else temperature * noise[row])
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _ranks(
    target: Any, heads: MedusaHeads, prompt: list[int], answer: list[int], noise: torch.Tensor | None
) -> Int64Array:
    """`noise` [tokens, vocab] is added to what is said of each place."""
    hidden = hidden_states(target, torch.tensor([prompt + answer], device=target.device))[0, len(prompt) - 1 : -1]
    logits = heads.logits(hidden)  # [tokens, heads, columns]
    known = np.arange(logits.shape[2], dtype=np.int32) if heads.token_ids is None else heads.token_ids
    ranks = np.full(logits.shape[:2], BEYOND)
    for head in range(heads.num_heads):
        scores = logits[: -head - 1, head]
        ranks[: len(scores), head] = ranks_of(
            scores, known, answer[head + 1 :], None if noise is None else noise[head + 1 :]
        )
    return ranks
