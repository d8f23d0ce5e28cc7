"""How much of the target's text the draft predicts, benchmark by benchmark.

A draft chain proposed after a prefix of the target's text is accepted up to its first miss, and up to there it was
conditioned on the target's own tokens. One forward pass of the draft along the target's text therefore gives, for every
round of every chain length, what a speculative decoder would have accepted, and no decoder needs to run. The same holds at
a temperature if both models add the same Gumbel noise, drawn once for each position.
"""

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specq.training.architecture import hidden_states
from specq.training.decoding import generate
from specq.training.settings import Settings
from specq.training.vocabulary import VOCAB_SIZE, stop_ids

DRAFT_LENGTH = 5
LONGEST_PROMPT = 768
SAMPLED_TEMPERATURE = 0.8


@dataclass(frozen=True)
class Rounds:
    """What speculative rounds over some texts would have done."""

    num_new_tokens: int
    accepted_counts: tuple[int, ...]  # drafts accepted, a round
    full_round_counts: tuple[int, ...]  # the same, without the rounds that the end of the text cut short

    def summary(self) -> dict[str, Any]:
        """Return the figures for the report: an accepted length counts the correction or bonus token."""
        counts = np.asarray(self.full_round_counts)
        reached = [int((counts >= position).sum()) for position in range(DRAFT_LENGTH + 1)]
        return {
            "mean_accepted_length": round(self.num_new_tokens / max(len(self.accepted_counts), 1), 3),
            "num_rounds": len(self.accepted_counts),
            "num_new_tokens": self.num_new_tokens,
            "acceptance_by_position": [
                round(after / before, 4) if before else None for before, after in pairwise(reached)
            ],
            "accepted_histogram": np.bincount(counts, minlength=DRAFT_LENGTH + 1).tolist(),
        }


def count_rounds(hits: list[list[bool]]) -> Rounds:
    """Play greedy rounds over texts. hits[i][j]: the draft's choice for token j of text i was the target's."""
    accepted, full, num_tokens = [], [], 0
    for text in hits:
        num_tokens += len(text)
        place = 0
        while place < len(text):
            window = text[place : place + DRAFT_LENGTH]
            run = window.index(False) if False in window else len(window)
            accepted.append(run)
            if False in window or len(window) == DRAFT_LENGTH:
                full.append(run)
            place += run + 1
    return Rounds(num_tokens, tuple(accepted), tuple(full))


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerFast, count: int) -> list[list[int]]:
    """Return the first `count` prompts of a benchmark that are not too long, in the chat template."""
    prompts: list[list[int]] = []
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            messages = [{"role": "user", "content": json.loads(line)["prompt"]}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            token_ids = tokenizer(text)["input_ids"]
            if len(token_ids) <= LONGEST_PROMPT and len(prompts) < count:
                prompts.append(token_ids)
    return prompts


@torch.no_grad()
def draft_hits(
    draft: LlamaForCausalLM,
    prompts: list[list[int]],
    answers: list[list[int]],
    temperature: float,
    noise: torch.Tensor | None,
) -> list[list[bool]]:
    """Return for each token of each answer whether the draft would have chosen it. noise [num_rows, num_new, vocab]."""
    hits = []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        token_ids = torch.tensor([prompt + answer], device=draft.device)
        hidden = hidden_states(draft, token_ids)[0, len(prompt) - 1 : -1]
        logits = functional.linear(hidden, draft.lm_head.weight).float()  # [num_new, vocab]
        if noise is not None:
            logits = logits + temperature * noise[row, : len(answer)]
        hits.append((logits.argmax(-1) == token_ids[0, len(prompt) :]).tolist())
    return hits


def measure(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[list[int]],
    num_new: int,
    temperature: float,
) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the figures of one benchmark at one temperature, and the target's answers."""
    noise = None
    if temperature > 0:
        noise = -torch.empty(len(prompts), num_new, VOCAB_SIZE, device=target.device).exponential_().log()
    answers = generate(
        target,
        prompts,
        num_new=num_new,
        temperatures=[temperature] * len(prompts),
        stops=stop_ids(tokenizer),
        pad_id=tokenizer.pad_token_id,
        noise=noise,
    )
    hits = draft_hits(draft, prompts, answers, temperature, noise)
    return count_rounds(hits).summary(), answers


def measure_benchmarks(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: Settings
) -> dict[str, Any]:
    """Measure every *.jsonl of the benchmark directory, greedily and sampled; print two answers of each."""
    torch.manual_seed(settings.seed + 3)
    report = {}
    for path in sorted(settings.bench.glob("*.jsonl")):
        prompts = read_prompts(path, tokenizer, settings.bench_prompts)
        greedy, answers = measure(target, draft, tokenizer, prompts, settings.bench_tokens, 0.0)
        sampled, _ = measure(target, draft, tokenizer, prompts, settings.bench_tokens, SAMPLED_TEMPERATURE)
        report[path.stem] = {
            "num_prompts": len(prompts),
            "greedy": greedy,
            f"sampled_{SAMPLED_TEMPERATURE}": sampled,
        }
        click.echo(f"{path.stem} {json.dumps(report[path.stem])}")
        for prompt, answer in zip(prompts[:2], answers[:2], strict=True):
            click.echo(f"--- {tokenizer.decode(prompt)}{tokenizer.decode(answer)}")
    return report
