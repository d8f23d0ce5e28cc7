"""How many of a target's tokens heads foresee: rounds played out along the target's own text.

What a head says at each place of a text, given the text up to there, is compared with what came. In a round a tree of
its choices is accepted down to the first place whose token is not among those of the tree; up to there it was given the
text's own tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from specq.engines import describe
from specq.protocol import Int32Array, Int64Array, ModelInfo
from specq.training.acceptance import SAMPLED_TEMPERATURE
from specq.training.chat_prompts import PromptFormat, bench_prompts
from specq.training.draft import keep_report
from specq.training.draft_settings import RunSettings
from specq.training.ranks import BEYOND, TREES, Trees, answer_with_noise, rank_figures, ranks_of, show_figures
from specq.training.records import bench_paths
from specq.training.report import conditions


class Foresight(Protocol):
    """What heads say along a text; token_ids: of the columns, None where column i is token i."""

    token_ids: Int32Array | None

    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Return [tokens, depths, columns]: what is said, knowing the answer's tokens up to p + i, of token p + 1 + i,
        with the target's states up to that which made token p."""
        ...


def info_of(target: Any, checkpoint: Path) -> ModelInfo:
    """Return of a target what heads must fit."""
    return describe(
        checkpoint,
        engine="torch",
        name=checkpoint.name,
        dtype="",
        vocab_size=target.get_input_embeddings().weight.shape[0],
        max_length=target.config.max_position_embeddings,
        kv_slots=0,
    )


def measure_heads(
    target: Any,
    heads: Foresight,
    chat: PromptFormat,
    settings: RunSettings,
    trees: Trees = TREES,
) -> None:
    """Measure heads, as they were written to `out`, on every benchmark, and write the report; trees: as of
    `rank_figures`."""
    torch.manual_seed(settings.seed)
    report: dict[str, Any] = conditions(settings.device)
    report["num_bytes"] = sum(file.stat().st_size for file in settings.out.iterdir())
    report["acceptance"] = {
        path.stem: _benchmark_figures(target, heads, chat, path, settings, trees)
        for path in bench_paths(settings.bench)
    }
    keep_report(report, settings)


def _benchmark_figures(
    target: Any,
    heads: Foresight,
    chat: PromptFormat,
    path: Path,
    settings: RunSettings,
    trees: Trees,
) -> dict[str, dict[str, Any]]:
    """Return the figures of one benchmark, for each way of choosing tokens."""
    prompts, found = bench_prompts(path, chat, settings), {}
    for temperature in (0.0, SAMPLED_TEMPERATURE):
        ranks = measure_ranks(target, heads, prompts, chat, settings.bench_tokens, temperature)
        found[f"T={temperature:g}"] = figures = rank_figures(ranks, trees)
        show_figures(path.stem, temperature, figures)
    return found


@torch.no_grad()
def measure_ranks(
    target: Any, heads: Foresight, prompts: list[list[int]], chat: PromptFormat, num_new: int, temperature: float
) -> list[Int64Array]:
    """Let the target answer. Return for each answer i64[tokens, heads]: the rank, from 0, that head i, from the state
    that made token p, gives token p + 1 + i; see UNKNOWN and BEYOND. At a temperature both add the same noise."""
    answers, noise = answer_with_noise(target, prompts, chat, num_new, temperature)
    return [
        _ranks(heads, prompt, answer, None if noise is None else temperature * noise[row])
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _ranks(heads: Foresight, prompt: list[int], answer: list[int], noise: torch.Tensor | None) -> Int64Array:
    """`noise` [tokens, vocab] is added to what is said of each place."""
    logits = heads.logits(prompt, answer)
    known = np.arange(logits.shape[2], dtype=np.int32) if heads.token_ids is None else heads.token_ids
    ranks = np.full(logits.shape[:2], BEYOND)
    for head in range(logits.shape[1]):
        scores = logits[: -head - 1, head]
        ranks[: len(scores), head] = ranks_of(
            scores, known, answer[head + 1 :], None if noise is None else noise[head + 1 :]
        )
    return ranks
