"""The target's own outputs, on which the draft is distilled.

Prompts come from the training documents. Some arithmetic prompts get new numbers. Some prompts of every kind are cut
short, and the target writes the rest of the question and the answer. Otherwise it would often repeat answers that it
has read.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import click
import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from specq.protocol import ConfigError
from specq.training.architecture import load_model
from specq.training.corpus import END_OF_TEXT, Dataset, load_dataset, load_tokenizer, stop_ids, token_id
from specq.training.decoding import generate
from specq.training.settings import PairSettings

# shard -> share of the rollouts; shards without a prompt get none, unnamed ones 0.02
ROLLOUT_SHARES: dict[str, float] = {
    "math_gsm8k_train": 0.30,
    "math_misc": 0.04,
    "math_synthetic": 0.05,
    "code_mbpp_train": 0.08,
    "code_gpteacher": 0.10,
    "code_stdlib_functions": 0.08,
    "instruct_ultrafeedback": 0.04,
    "instruct_gpteacher_roleplay": 0.10,
    "instruct_misc": 0.05,
    "instruct_t0_permissive": 0.05,
}
DEFAULT_SHARE = 0.02
TEMPERATURES = (0.0, 0.0, 0.7, 0.8, 1.0)
CUT_SHARE = 0.25
RENUMBER_SHARE = 0.6
LONGEST_PROMPT = 320
BATCH_ROWS = 2048


@dataclass(frozen=True)
class Rollouts:
    """Prompts with the target's continuations, as one flat array."""

    token_ids: np.ndarray  # [num_tokens] uint16, or int32 for a larger vocabulary
    bounds: np.ndarray  # [num_rollouts + 1] int64
    prompt_sizes: np.ndarray  # [num_rollouts] int32

    def rollout(self, index: int) -> np.ndarray:
        """Return the ids of one prompt and its continuation."""
        return self.token_ids[self.bounds[index] : self.bounds[index + 1]]

    @property
    def num_answered(self) -> int:
        """How many tokens the target has generated."""
        return int(len(self.token_ids) - self.prompt_sizes.sum())

    def answered(self) -> np.ndarray:
        """Return the tokens that the target has generated, one answer after the other."""
        sizes = np.diff(self.bounds)
        place = np.arange(len(self.token_ids)) - np.repeat(self.bounds[:-1], sizes)
        said: np.ndarray = self.token_ids[place >= np.repeat(self.prompt_sizes, sizes)]
        return said


@dataclass(frozen=True)
class RolloutPrompt:
    """A prompt to roll out: ids, whether it is cut so that only <|endoftext|> ends it, and the temperature."""

    token_ids: tuple[int, ...]
    is_cut: bool
    temperature: float


def draw_prompts(
    dataset: Dataset, tokenizer: PreTrainedTokenizerFast, count: int, rng: np.random.Generator
) -> list[RolloutPrompt]:
    """Draw about `count` prompts by `ROLLOUT_SHARES`, without repeated greedy ones."""
    digits = np.asarray(tokenizer.convert_tokens_to_ids(list("0123456789")))
    prompted = [name for name in dataset.shards if dataset.context_sizes[dataset.members(name, held_out=False)].any()]
    shares = np.asarray([ROLLOUT_SHARES.get(shard, DEFAULT_SHARE) for shard in prompted])
    prompts: dict[RolloutPrompt, None] = {}
    for shard, share in zip(prompted, shares / shares.sum(), strict=True):
        for index in rng.choice(dataset.members(shard, held_out=False), max(round(count * share), 1)):
            renumber = shard.startswith("math") and rng.random() < RENUMBER_SHARE
            context = np.asarray(dataset.context(index)[:LONGEST_PROMPT])
            if len(context) > 8:
                prompts[_vary(context, digits if renumber else None, rng)] = None
    return list(prompts)


def _vary(context: np.ndarray, digits: np.ndarray | None, rng: np.random.Generator) -> RolloutPrompt:
    """Redraw the digits of a prompt, if `digits` is given, and sometimes cut it."""
    if digits is not None:
        is_digit = np.isin(context, digits)
        context = np.where(is_digit, rng.choice(digits[1:], len(context)), context)
    is_cut = len(context) == LONGEST_PROMPT or rng.random() < CUT_SHARE
    if is_cut:
        context = context[: rng.integers(4, len(context))]
    return RolloutPrompt(tuple(context.tolist()), is_cut, float(rng.choice(TEMPERATURES)))


def roll_out(settings: PairSettings) -> int:
    """Generate and save the rollouts; return the number of new tokens."""
    torch.manual_seed(settings.seed + 1)
    rng = np.random.default_rng(settings.seed + 1)
    tokenizer, dataset = load_tokenizer(settings.tokenizer_folder), load_dataset(settings.dataset_file)
    model = load_model(settings.target_folder, settings.device)
    prompts = draw_prompts(dataset, tokenizer, settings.num_rollouts, rng)
    prompts.sort(key=lambda prompt: (prompt.is_cut, len(prompt.token_ids)))
    all_ends, hard_end = stop_ids(tokenizer), [token_id(tokenizer, END_OF_TEXT)]
    pairs, started = [], time.monotonic()
    for is_cut in (False, True):
        members = [prompt for prompt in prompts if prompt.is_cut == is_cut]
        for start in range(0, len(members), BATCH_ROWS):
            batch = members[start : start + BATCH_ROWS]
            answers = generate(
                model,
                [prompt.token_ids for prompt in batch],
                num_new=settings.rollout_tokens,
                temperatures=[prompt.temperature for prompt in batch],
                stops=hard_end if is_cut else all_ends,
                pad_id=tokenizer.pad_token_id,
            )
            pairs += [(list(prompt.token_ids), answer) for prompt, answer in zip(batch, answers, strict=True)]
            click.echo(f"rollouts {len(pairs)} of {len(prompts)} seconds {time.monotonic() - started:.1f}")
    save_rollouts(settings.rollouts_file, pairs)
    return sum(len(answer) for _, answer in pairs)


def save_rollouts(path: Path, pairs: list[tuple[list[int], list[int]]]) -> None:
    """Write (prompt, continuation) pairs to one file, which appears only when it is complete."""
    rows = [np.asarray(prompt + answer, dtype=np.int32) for prompt, answer in pairs]
    token_ids = np.concatenate(rows)
    bounds = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    prompt_sizes = np.asarray([len(prompt) for prompt, _ in pairs], dtype=np.int32)
    kind = np.uint16 if token_ids.max() <= np.iinfo(np.uint16).max else np.int32
    unfinished = path.with_name(path.name + ".part")
    with unfinished.open("wb") as file:
        np.savez(file, token_ids=token_ids.astype(kind), bounds=bounds, prompt_sizes=prompt_sizes)
    unfinished.replace(path)


def load_rollouts(path: Path) -> Rollouts:
    """Read a file of `save_rollouts`, or arrays `tokens`, `prompt` and `answer`.

    The arrays have the rows end to end, and their lengths.
    """
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            if "tokens" in arrays:
                sizes = arrays["prompt"].astype(np.int64) + arrays["answer"]
                return Rollouts(arrays["tokens"], np.concatenate([[0], np.cumsum(sizes)]), arrays["prompt"])
            return Rollouts(**{name: arrays[name] for name in Rollouts.__dataclass_fields__})
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ConfigError(f"{path} cannot be read as rollouts: {error}") from error


def join_rollouts(parts: Sequence[Rollouts]) -> Rollouts:
    """Return the rollouts of several files as one."""
    firsts = np.cumsum([0, *(part.bounds[-1] for part in parts)])
    bounds = [part.bounds[1:] + first for part, first in zip(parts, firsts, strict=False)]
    return Rollouts(
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([[0], *bounds]),
        np.concatenate([part.prompt_sizes for part in parts]),
    )
