"""How many of a target's tokens a parallel draft model foresees: rounds played out along the target's own text, beside
those of the draft model that it was started from.

One pass of each along a text is enough: the masks behind each token are laid beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from specq.checkpoints import draft_form
from specq.engines.torch import load_network
from specq.protocol import ConfigError, Int64Array
from specq.training.acceptance import SAMPLED_TEMPERATURE, count_rounds, draft_hits
from specq.training.chat_prompts import PromptFormat, bench_prompts
from specq.training.draft import keep_report, load_target
from specq.training.draft_settings import ParallelSettings
from specq.training.parallel_network import Masks, foresee
from specq.training.ranks import BEYOND, answer_with_noise, rank_figures, ranks_of, show_figures
from specq.training.records import bench_paths
from specq.training.report import conditions


def evaluate(settings: ParallelSettings) -> None:
    """Measure the 8-bit draft on every benchmark and write the report."""
    shape = draft_form.draft_shape(settings.out)
    if shape is None or shape.num_places < 2:
        raise ConfigError(
            f"there is no parallel draft model in {settings.out}; run the stage 'draft' first, with the same --out"
        )
    target, chat = load_target(settings)
    draft, start = (load_network(path, settings.device) for path in (settings.out, settings.draft))
    torch.manual_seed(settings.seed)
    report: dict[str, Any] = conditions(settings.device)
    report["num_places"], report["num_parameters"] = shape.num_places, sum(p.numel() for p in draft.parameters())
    report["acceptance"] = {
        path.stem: _of_benchmark(target, draft, start, chat, path, settings) for path in bench_paths(settings.bench)
    }
    keep_report(report, settings)


def _of_benchmark(
    target: Any, draft: Any, start: Any, chat: PromptFormat, path: Path, settings: ParallelSettings
) -> dict[str, dict[str, Any]]:
    """Return the figures of one benchmark, for each way of choosing tokens; "start": the chain of the model that it was
    started from."""
    prompts, found = bench_prompts(path, chat, settings), {}
    for temperature in (0.0, SAMPLED_TEMPERATURE):
        answers, noise = answer_with_noise(target, prompts, chat, settings.bench_tokens, temperature)
        ranks = [
            place_ranks(draft, prompt, answer, None if noise is None else temperature * noise[row])
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        chains = count_rounds(draft_hits(start, prompts, answers, temperature, noise), draft.num_masks + 1)
        figures = {**rank_figures(ranks), "start": chains.summary()}
        show_figures(path.stem, temperature, figures)
        found[f"T={temperature:g}"] = figures
    return found


@torch.no_grad()
def place_ranks(draft: Any, prompt: list[int], answer: list[int], noise: torch.Tensor | None) -> Int64Array:
    """Return i64[tokens + 1, places]: the rank that place i of the pass before token p of the answer gives token p + i;
    see `specq.training.ranks`. `noise` [tokens, vocab] is added to what is said of each token."""
    num_places, length = draft.num_masks + 1, len(answer)
    vocab_size = draft.get_input_embeddings().weight.shape[0] - draft.num_masks
    first = len(prompt) - 1
    pairs = [(first + p, place) for place in range(1, num_places) for p in range(max(length - place, 0))]
    masks = Masks(*torch.tensor(pairs, device=draft.device).reshape(-1, 2).T[:, None])
    texts, foreseen = foresee(draft, torch.tensor([prompt + answer], device=draft.device), masks, vocab_size)
    sizes = [max(length - place, 0) for place in range(1, num_places)]
    known = getattr(draft.lm_head, "token_ids", np.arange(draft.lm_head.weight.shape[0], dtype=np.int32))
    ranks = np.full((length + 1, num_places), BEYOND)
    for place, hidden in enumerate((texts[0, first : first + length], *torch.split(foreseen[0], sizes))):
        scores = draft.lm_head(hidden).float()
        own = ranks_of(scores, known, answer[place:], None if noise is None else noise[place:])
        ranks[: len(own), place] = own
    return ranks
