"""How many of a target's tokens Medusa heads foresee: rounds played out along the target's own text.

The state of each place comes from one pass of the target along its text; what the heads say there is compared with what came. In a round
the heads speak once, so a tree of their choices is accepted down to the first place whose token is not among those of the tree.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from specq.engines.torch import MedusaHeads, load_heads
from specq.protocol import Int64Array, ModelInfo
from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.training.acceptance import SAMPLED_TEMPERATURE, Rounds
from specq.training.architecture import hidden_states
from specq.training.chat_prompts import Chat, bench_prompts
from specq.training.decoding import generate
from specq.training.draft import keep_report, load_target
from specq.training.draft_settings import MedusaSettings
from specq.training.report import conditions

UNKNOWN = 1 << 30  # the rank of a token that the heads do not know
BEYOND = -1  # the rank of what stands behind the text's end
# A tree has the paths for which the product of all (rank + 1) is at most this; 1: the chain of first choices.
WIDTHS = {"chain": 1, "tree": 10}
SHOWN_RANKS = (1, 3, 10)


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
        found[f"T={temperature:g}"] = figures = {
            **{name: count_rounds(ranks, width).summary() for name, width in WIDTHS.items()},
            "among_first": among_first(ranks),
        }
        lengths = {name: figures[name]["mean_accepted_length"] for name in WIDTHS}
        depths = figures["chain"]["acceptance_by_position"]
        click.echo(f"{path.stem} T={temperature:g}: tokens a round {lengths}, accepted by depth {depths}")
    return found


@torch.no_grad()
def measure_ranks(
    target: Any, heads: MedusaHeads, prompts: list[list[int]], chat: Chat, num_new: int, temperature: float
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
        _ranks(target, heads, prompt, answer, None if noise is None else temperature * noise[row])
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _ranks(
    target: Any, heads: MedusaHeads, prompt: list[int], answer: list[int], noise: torch.Tensor | None
) -> Int64Array:
    """`noise` [tokens, vocab] is added to what is said of each place."""
    hidden = hidden_states(target, torch.tensor([prompt + answer], device=target.device))[0, len(prompt) - 1 : -1]
    logits = heads.logits(hidden)  # [tokens, heads, columns]
    known = np.arange(logits.shape[2]) if heads.token_ids is None else heads.token_ids
    columns = torch.from_numpy(np.searchsorted(known, answer).clip(max=len(known) - 1)).to(logits.device)
    is_known = torch.from_numpy(np.isin(answer, known)).to(logits.device)
    ranks = torch.full(logits.shape[:2], BEYOND, dtype=torch.int64)
    for head in range(heads.num_heads):
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


def among_first(ranks: list[Int64Array]) -> dict[str, list[float]]:
    """Return for some numbers how often, head by head, the target's token is among so many first choices, over all places."""
    joined = np.concatenate(ranks)
    return {
        str(count): [round(float((of_head[of_head != BEYOND] < count).mean()), 4) for of_head in joined.T]
        for count in SHOWN_RANKS
    }
