"""How many of a target's tokens heads foresee: rounds played out along the target's own text.

What a head says at each place of a text, given the text up to there, is compared with what came. In a round a tree of its choices is accepted
down to the first place whose token is not among those of the tree; up to there it was given the text's own tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import click
import numpy as np
import torch

from specq.protocol import Int32Array, Int64Array, ModelInfo
from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.training.acceptance import SAMPLED_TEMPERATURE, Rounds
from specq.training.chat_prompts import Chat, bench_prompts
from specq.training.decoding import generate
from specq.training.draft_settings import RunSettings

UNKNOWN = 1 << 30  # the rank of a token that the heads do not know
BEYOND = -1  # the rank of what stands behind the text's end
SHOWN_RANKS = (1, 3, 10)
# A tree has the paths for which the product of all (rank + 1) is at most its width; 1: the chain of first choices.
CHAIN, TREE = 1, 10


class Foresight(Protocol):
    """What heads say along a text; token_ids: of the columns, None where column i is token i."""

    token_ids: Int32Array | None

    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        """Return [tokens, depths, columns]: what is said, knowing the answer's tokens up to p + i, of token p + 1 + i, with the target's
        states up to that which made token p."""
        ...


def info_of(target: Any, checkpoint: Path) -> ModelInfo:
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


def benchmark_figures(
    target: Any,
    heads: Foresight,
    chat: Chat,
    path: Path,
    settings: RunSettings,
    trees: Mapping[str, tuple[int, int | None]],
) -> dict[str, dict[str, Any]]:
    """Return the figures of one benchmark, for each way of choosing tokens; trees: a width and a depth of each, None: of all."""
    prompts, found = bench_prompts(path, chat, settings.bench_prompts), {}
    for temperature in (0.0, SAMPLED_TEMPERATURE):
        ranks = measure_ranks(target, heads, prompts, chat, settings.bench_tokens, temperature)
        found[f"T={temperature:g}"] = figures = {
            **{
                name: count_rounds([of_text[:, :depth] for of_text in ranks], width).summary()
                for name, (width, depth) in trees.items()
            },
            "among_first": among_first(ranks),
        }
        lengths = {name: figures[name]["mean_accepted_length"] for name in trees}
        depths = figures["chain"]["acceptance_by_position"]
        click.echo(f"{path.stem} T={temperature:g}: tokens a round {lengths}, accepted by depth {depths}")
    return found


@torch.no_grad()
def measure_ranks(
    target: Any, heads: Foresight, prompts: list[list[int]], chat: Chat, num_new: int, temperature: float
) -> list[Int64Array]:
    """Let the target answer. Return for each answer i64[tokens, heads]: the rank, from 0, that head i, from the state that made token
    p, gives token p + 1 + i; see UNKNOWN and BEYOND. At a temperature both add the same noise."""
    noise = None
    if temperature > 0:
        vocab = target.lm_head.weight.shape[0]
        noise = -torch.empty(len(prompts), num_new, vocab, device=target.device).exponential_().log()
    answers = generate(
        target,
        prompts,
        num_new=num_new,
        temperatures=[temperature] * len(prompts),
        stops=chat.stops,
        pad_id=chat.stops[0],
        noise=noise,
    )
    return [
        _ranks(heads, prompt, answer, None if noise is None else temperature * noise[row])
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _ranks(heads: Foresight, prompt: list[int], answer: list[int], noise: torch.Tensor | None) -> Int64Array:
    """`noise` [tokens, vocab] is added to what is said of each place."""
    logits = heads.logits(prompt, answer)
    known = np.arange(logits.shape[2]) if heads.token_ids is None else heads.token_ids
    columns = torch.from_numpy(np.searchsorted(known, answer).clip(max=len(known) - 1)).to(logits.device)
    is_known = torch.from_numpy(np.isin(answer, known)).to(logits.device)
    ranks = torch.full(logits.shape[:2], BEYOND, dtype=torch.int64)
    for head in range(logits.shape[1]):
        scores, of_next = logits[: -head - 1, head], columns[head + 1 :]  # [tokens - head - 1, columns]
        if noise is not None:
            scores = scores + noise[head + 1 : len(answer)][:, torch.from_numpy(known).long().to(noise.device)]
        rank = (scores > scores.gather(1, of_next[:, None])).sum(1)
        ranks[: len(rank), head] = torch.where(is_known[head + 1 :], rank, UNKNOWN).cpu()
    return ranks.numpy()


def count_rounds(ranks: list[Int64Array], width: int) -> Rounds:
    """Play rounds with the tree of a width, over texts; the first token of each is the target's alone."""
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
    return Rounds(ranks[0].shape[1] if ranks else 0, num_tokens, tuple(accepted), tuple(full))


def among_first(ranks: list[Int64Array]) -> dict[str, list[float | None]]:
    """Return for some numbers how often, depth by depth, the target's token is among so many first choices, over all places; None where no
    text goes so far."""
    known = [of_depth[of_depth != BEYOND] for of_depth in np.concatenate(ranks).T]
    return {
        str(count): [round(float((own < count).mean()), 4) if len(own) else None for own in known]
        for count in SHOWN_RANKS
    }
