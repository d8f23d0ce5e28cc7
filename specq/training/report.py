"""The evaluation of a finished pair, as a dictionary ready for JSON, and the export of its files.

It shows how much of the target's text the draft predicts, benchmark by benchmark.

A draft chain proposed after a prefix of the target's text is accepted up to its first miss. Up to there it was
conditioned on the target's own tokens. So one forward pass of the draft along the target's text gives the accepted
length for every round of every chain length. No decoder needs to run. The same holds at a temperature if both models
add the same Gumbel noise, drawn once for each position.
"""

from __future__ import annotations

import datetime as dt
import json
import platform
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specq.training.architecture import hidden_states, load_model, weight_bytes
from specq.training.corpus import load_dataset, load_tokenizer, stop_ids
from specq.training.decoding import generate
from specq.training.pretrain import held_out_losses
from specq.training.progress import Progress
from specq.training.records import PROMPTS, bench_paths, read_records
from specq.training.settings import PairSettings

DRAFT_LENGTH = 5
LONGEST_PROMPT = 768
SAMPLED_TEMPERATURE = 0.8


@dataclass(frozen=True)
class PlayedRounds:
    """The results of simulated speculative rounds over some texts."""

    draft_length: int
    num_new_tokens: int
    accepted_counts: tuple[int, ...]  # accepted drafts of each round
    full_round_counts: tuple[int, ...]  # the same, without the rounds that the end of the text cut short

    def summary(self) -> dict[str, Any]:
        """Return the figures for the report: an accepted length counts the correction or bonus token."""
        counts = np.asarray(self.full_round_counts)
        reached = [int((counts >= position).sum()) for position in range(self.draft_length + 1)]
        return {
            "mean_accepted_length": round(self.num_new_tokens / max(len(self.accepted_counts), 1), 3),
            "num_rounds": len(self.accepted_counts),
            "num_new_tokens": self.num_new_tokens,
            "acceptance_by_position": [
                round(after / before, 4) if before else None for before, after in pairwise(reached)
            ],
            "accepted_histogram": np.bincount(counts, minlength=self.draft_length + 1).tolist(),
        }


def count_rounds(hits: list[list[bool]], draft_length: int = DRAFT_LENGTH) -> PlayedRounds:
    """Play rounds of `draft_length` drafts over texts.

    hits: [i][j] is whether the draft's choice for token j of text i equals the target's.
    """
    accepted, full, num_tokens = [], [], 0
    for text in hits:
        num_tokens += len(text)
        place = 0
        while place < len(text):
            window = text[place : place + draft_length]
            run = window.index(False) if False in window else len(window)
            accepted.append(run)
            if False in window or len(window) == draft_length:
                full.append(run)
            place += run + 1
    return PlayedRounds(draft_length, num_tokens, tuple(accepted), tuple(full))


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerFast, count: int) -> list[list[int]]:
    """Return the first `count` prompts of a benchmark that are not too long, in the chat template."""
    prompts: list[list[int]] = []
    for record in read_records(path, PROMPTS):
        messages = [{"role": "user", "content": record["prompt"]}]
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
    """Return for each token of each answer whether the draft would choose it. noise [num_rows, num_new, vocab].

    A draft's head may know only some tokens (`specq.engines.torch.draft_network`).
    """
    known = torch.from_numpy(getattr(draft.lm_head, "token_ids", np.arange(draft.lm_head.weight.shape[0])))
    known, hits = known.long().to(draft.device), []
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        token_ids = torch.tensor([prompt + answer], device=draft.device)
        hidden = hidden_states(draft, token_ids)[0, len(prompt) - 1 : -1]
        logits = functional.linear(hidden, draft.lm_head.weight).float()  # [num_new, known]
        if noise is not None:
            logits = logits + temperature * noise[row, : len(answer)][:, known]
        hits.append((known[logits.argmax(-1)] == token_ids[0, len(prompt) :]).tolist())
    return hits


def answer_with_noise(
    target: Any,
    prompts: list[list[int]],
    num_new: int,
    temperature: float,
    *,
    stops: Sequence[int],
    pad_id: int,
) -> tuple[list[list[int]], torch.Tensor | None]:
    """Let the target answer; return the answers, and the noise f32[prompts, num_new, vocab] of sampling, if any."""
    noise = None
    if temperature > 0:
        vocab = target.lm_head.weight.shape[0]
        noise = -torch.empty(len(prompts), num_new, vocab, device=target.device).exponential_().log()
    answers = generate(
        target,
        prompts,
        num_new=num_new,
        temperatures=[temperature] * len(prompts),
        stops=stops,
        pad_id=pad_id,
        noise=noise,
        goes_on=Progress().of_answers(len(prompts), num_new),
    )
    return answers, noise


def measure(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: list[list[int]],
    *,
    num_new: int,
    temperature: float,
    stops: Sequence[int],
    pad_id: int,
    draft_lengths: Sequence[int] = (DRAFT_LENGTH,),
) -> tuple[dict[str, dict[str, Any]], list[list[int]]]:
    """Return the figures of one benchmark at one temperature, by chain length, and the target's answers."""
    answers, noise = answer_with_noise(target, prompts, num_new, temperature, stops=stops, pad_id=pad_id)
    hits = draft_hits(draft, prompts, answers, temperature, noise)
    return {str(length): count_rounds(hits, length).summary() for length in draft_lengths}, answers


def measure_benchmarks(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: PairSettings
) -> dict[str, Any]:
    """Measure every *.jsonl of the benchmark directory, greedily and sampled; print two answers of each."""
    torch.manual_seed(settings.seed + 3)
    report = {}
    for path in bench_paths(settings.bench):
        prompts = read_prompts(path, tokenizer, settings.bench_prompts)
        ends: Any = {"stops": stop_ids(tokenizer), "pad_id": tokenizer.pad_token_id}
        num_new, length = settings.bench_tokens, str(DRAFT_LENGTH)
        greedy, answers = measure(target, draft, prompts, num_new=num_new, temperature=0.0, **ends)
        sampled, _ = measure(target, draft, prompts, num_new=num_new, temperature=SAMPLED_TEMPERATURE, **ends)
        report[path.stem] = {
            "num_prompts": len(prompts),
            "greedy": greedy[length],
            f"sampled_{SAMPLED_TEMPERATURE}": sampled[length],
        }
        click.echo(f"{path.stem} {json.dumps(report[path.stem])}")
        for prompt, answer in zip(prompts[:2], answers[:2], strict=True):
            click.echo(f"--- {tokenizer.decode(prompt)}{tokenizer.decode(answer)}")
    return report


def hardware_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def evaluate_pair(settings: PairSettings) -> dict[str, Any]:
    """Evaluate the rounded weights and write the report into the work directory (and to `results`, if given)."""
    tokenizer = load_tokenizer(settings.tokenizer_folder)
    target, draft = (load_model(folder, settings.device) for folder in (settings.target_folder, settings.draft_folder))
    report = conditions(settings.device)
    report |= {
        "draft_shape": settings.draft_shape,
        "draft_length": DRAFT_LENGTH,
        "max_new_tokens": settings.bench_tokens,
    }
    report["target"] = _figures(target, settings.target_folder, tokenizer, settings)
    report["draft"] = _figures(draft, settings.draft_folder, tokenizer, settings)
    report["acceptance"] = measure_benchmarks(target, draft, tokenizer, settings)
    write_report(report, settings)
    return report


def conditions(device: torch.device) -> dict[str, Any]:
    """Return the date, hardware, versions and command of a measurement."""
    return {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "hardware": hardware_name(device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": shlex.join(["specq", *sys.argv[1:]]),
    }


def _figures(
    model: LlamaForCausalLM, folder: Path, tokenizer: PreTrainedTokenizerFast, settings: PairSettings
) -> dict[str, Any]:
    """Return the size of a model and its losses on held-out documents."""
    losses = held_out_losses(model, load_dataset(settings.dataset_file), settings, tokenizer.pad_token_id)
    return {
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "weight_bytes": weight_bytes(folder),
        "held_out_loss": {shard: round(loss, 4) for shard, loss in losses.items()},
    }


def write_report(report: dict[str, Any], settings: PairSettings) -> None:
    """Write the report as JSON."""
    text = json.dumps(report, indent=2) + "\n"
    (settings.work / f"results-{settings.draft_shape}.json").write_text(text, encoding="utf-8")
    if settings.results is not None:
        settings.results.parent.mkdir(parents=True, exist_ok=True)
        settings.results.write_text(text, encoding="utf-8")


def export_pair(settings: PairSettings) -> None:
    """Copy the two model directories to `out`/target and `out`/draft."""
    for source, name in ((settings.target_folder, "target"), (settings.draft_folder, "draft")):
        destination = settings.out / name
        destination.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            shutil.copyfile(file, destination / file.name)
