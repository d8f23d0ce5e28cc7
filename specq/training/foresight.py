"""How many of a target's tokens heads predict: rounds played along the target's own text.

Each head's prediction at a position, given the text up to there, is compared with the actual token. A round predicts
once, for several positions. It accepts a tree of the head's choices down to the first position whose token is not in
the tree. Up to there it was given the text's own tokens.

Ranks i64[tokens, places] belong to one text. They are the predicted rank, from 0, of the token at each place of a round
that begins there. UNKNOWN and BEYOND are special values.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
import torch

from specq.engines import describe
from specq.protocol import Int32Array, Int64Array, ModelInfo
from specq.training.chat_prompts import PromptFormat, bench_prompts
from specq.training.draft import keep_report
from specq.training.records import bench_paths
from specq.training.report import SAMPLED_TEMPERATURE, PlayedRounds, answer_with_noise, conditions
from specq.training.settings import RunSettings

UNKNOWN = 1 << 30  # rank of a token that the head does not know
BEYOND = -1  # rank of a position after the text's end
# A tree has the paths whose product of all (rank + 1) is at most its width; 1: the chain of first choices.
CHAIN, TREE = 1, 10
Trees = Mapping[str, tuple[int, int | None]]
TREES: Trees = {"chain": (CHAIN, None), "tree": (TREE, None)}
SHOWN_RANKS = (1, 3, 10)


def ranks_of(scores: torch.Tensor, known: Int32Array, token_ids: list[int], noise: torch.Tensor | None) -> Int64Array:
    """Return i64[n]: the rank of each token among scores [n, columns].

    known   the columns' tokens, ascending.
    noise   [any, vocab], added to the scores.
    """
    columns = torch.from_numpy(np.searchsorted(known, token_ids).clip(max=len(known) - 1)).to(scores.device)
    is_known = torch.from_numpy(np.isin(token_ids, known)).to(scores.device)
    if noise is not None:
        scores = scores + noise[: len(scores)][:, torch.from_numpy(known).long().to(noise.device)]
    ranks = (scores > scores.gather(1, columns[:, None])).sum(1)
    found: Int64Array = torch.where(is_known, ranks, UNKNOWN).cpu().numpy()
    return found


def rank_figures(ranks: list[Int64Array], trees: Trees = TREES) -> dict[str, Any]:
    """Return the figures of a report: rounds by named trees, and how often the token is among the first choices.

    trees: each a width and a depth. A depth of None means all places.
    """
    rounds = {
        name: count_rounds([of_text[:, :depth] for of_text in ranks], width).summary()
        for name, (width, depth) in trees.items()
    }
    return {**rounds, "among_first": among_first(ranks)}


def show_figures(name: str, temperature: float, figures: dict[str, Any]) -> None:
    """Print the figures of one benchmark at one temperature."""
    lengths = {
        kind: found["mean_accepted_length"] for kind, found in figures.items() if "mean_accepted_length" in found
    }
    depths = figures["chain"]["acceptance_by_position"]
    click.echo(f"{name} T={temperature:g}: tokens a round {lengths}, accepted by depth {depths}")


def count_rounds(ranks: list[Int64Array], width: int) -> PlayedRounds:
    """Play rounds with a tree of this width, over texts; the first token of each text is always the target's."""
    accepted, full, num_tokens = [], [], 0
    for of_text in ranks:
        place, last = 0, len(of_text) - 1
        num_tokens += max(last, 0)
        while place < last:
            fits = np.cumprod(np.minimum(of_text[place] + 1.0, UNKNOWN)) <= width
            is_there = of_text[place] != BEYOND
            run = int((fits & is_there).cumprod().sum())
            accepted.append(run)
            if is_there.all() or (~fits & is_there).any():
                full.append(run)
            place += run + 1
    return PlayedRounds(ranks[0].shape[1] if ranks else 0, num_tokens, tuple(accepted), tuple(full))


def among_first(ranks: list[Int64Array]) -> dict[str, list[float | None]]:
    """Return how often, depth by depth, the target's token is among the first choices, over all positions.

    The keys are numbers of choices. None: no text is long enough.
    """
    known = [of_depth[of_depth != BEYOND] for of_depth in np.concatenate(ranks).T]
    return {
        str(count): [round(float((own < count).mean()), 4) if len(own) else None for own in known]
        for count in SHOWN_RANKS
    }


class Foresight(Protocol):
    """The predictions of heads along a text; token_ids: of the columns, None where column i is token i."""

    token_ids: Int32Array | None

    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Return logits [tokens, depths, columns] for each token p of the answer.

        Entry i predicts token p + 1 + i, given the answer's tokens up to p + i and the target's states up to the one
        that made token p.
        """
        ...


def info_of(target: Any, checkpoint: Path) -> ModelInfo:
    """Return the description of a target that heads must fit."""
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
    """Measure the heads in `out` on every benchmark, and write the report; `trees` as in `rank_figures`."""
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
    """Return the figures of one benchmark, for each sampling method."""
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
    """Let the target answer; return ranks i64[tokens, heads] for each answer.

    Entry i is the rank, from 0, that head i gives token p + 1 + i, from the state that made token p. See UNKNOWN and
    BEYOND. At a temperature both add the same noise.
    """
    answers, noise = answer_with_noise(target, prompts, num_new, temperature, stops=chat.stops, pad_id=chat.stops[0])
    return [
        _ranks(heads, prompt, answer, None if noise is None else temperature * noise[row])
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _ranks(heads: Foresight, prompt: list[int], answer: list[int], noise: torch.Tensor | None) -> Int64Array:
    """Return the ranks of one answer; `noise` [tokens, vocab] is added to the logits of each position."""
    logits = heads.logits(prompt, answer)
    known = np.arange(logits.shape[2], dtype=np.int32) if heads.token_ids is None else heads.token_ids
    ranks = np.full(logits.shape[:2], BEYOND)
    for head in range(logits.shape[1]):
        scores = logits[: -head - 1, head]
        ranks[: len(scores), head] = ranks_of(
            scores, known, answer[head + 1 :], None if noise is None else noise[head + 1 :]
        )
    return ranks
