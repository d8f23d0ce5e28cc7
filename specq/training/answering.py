"""The stage `rollouts` of all methods for an existing target: the target answers prompts of the corpus for some time.

Each batch is a file, and a repeated run continues after the last file. When the time is over, the current answers end
and are kept. The pass over a batch's prompts is not interrupted. On a CPU it may take minutes. So a batch has as many
prompts as pass within a small part of the time. More prompts need fewer steps for the same number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specq.training.chat_prompts import PromptFormat, corpus_prompts
from specq.training.decoding import generate
from specq.training.draft import load_target
from specq.training.progress import Progress
from specq.training.report import SAMPLED_TEMPERATURE
from specq.training.rollouts import load_rollouts, save_rollouts
from specq.training.settings import RunSettings

FEW_ROWS = 8  # minimum prompts in a batch on a CPU, and prompts in the timed pass
MOST_ROWS = 128  # maximum on a CPU, where more rows take proportionally longer
PROMPTS_SHARE = 0.05  # share of the time for the pass over a batch's prompts
LEAST_TOKENS = 16  # minimum of each unfinished answer, even with little time, because shorter answers are useless


def roll_out(settings: RunSettings) -> None:
    """Let the target answer prompts; answers of earlier runs are skipped."""
    target, chat = load_target(settings)
    torch.manual_seed(settings.seed)
    prompts = corpus_prompts(settings, chat, np.random.default_rng(settings.seed))
    settings.rollouts_folder.mkdir(parents=True, exist_ok=True)
    parts = sorted(settings.rollouts_folder.glob("*.npz"))
    first = sum(len(load_rollouts(part).prompt_sizes) for part in parts)
    _Answering(target, chat, settings, len(parts)).all_of(prompts, first)


class _Answering:
    """A run in progress."""

    def __init__(self, target: Any, chat: PromptFormat, settings: RunSettings, num_parts: int) -> None:
        self._target, self._chat, self._settings, self._num_parts = target, chat, settings, num_parts
        self._started, self._progress, self.num_new = time.monotonic(), Progress(), 0

    def all_of(self, prompts: Sequence[list[int]], first: int) -> None:
        """Answer the prompts from index `first` on, batch by batch, until the time is over."""
        rows = self._rows(prompts[first : first + FEW_ROWS])
        while first < len(prompts) and (not self.num_new or self._seconds() < self._settings.rollout_seconds):
            batch = list(prompts[first : first + rows])
            self._answer(batch, f"rollouts: prompts {first + 1} to {first + len(batch)} of {len(prompts)}")
            first += len(batch)
            self._progress.end(f"rollouts: {first} of {len(prompts)} prompts, {self.num_new} tokens, {self._elapsed()}")

    def _rows(self, few: Sequence[list[int]]) -> int:
        """Return how many prompts a batch has, given the first prompts."""
        most = self._settings.rollout_rows
        if self._target.device.type == "cuda" or most <= FEW_ROWS or not few:
            return most
        answer(self._target, self._chat, list(few[:1]), 1)  # the very first pass takes longer
        began = self._seconds()
        answer(self._target, self._chat, list(few), 1)
        seconds = max(self._seconds() - began, 1e-3)
        fit = int(len(few) * PROMPTS_SHARE * self._settings.rollout_seconds / seconds)
        return min(max(fit, FEW_ROWS), MOST_ROWS, most)

    def _answer(self, batch: list[list[int]], about: str) -> None:
        def goes_on(num_said: int) -> bool:
            self._progress.say(f"{about}, {num_said} of {self._settings.rollout_tokens} tokens each, {self._elapsed()}")
            return num_said < LEAST_TOKENS or self._seconds() < self._settings.rollout_seconds

        pairs = answer(self._target, self._chat, batch, self._settings.rollout_tokens, goes_on)
        save_rollouts(self._settings.rollouts_folder / f"{self._num_parts:05d}.npz", pairs)
        self._num_parts += 1
        self.num_new += sum(len(said) for _, said in pairs)

    def _elapsed(self) -> str:
        return f"{self._seconds():.0f} of {self._settings.rollout_seconds:g} s"

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def answer(
    target: Any,
    chat: PromptFormat,
    prompts: list[list[int]],
    num_new: int,
    goes_on: Callable[[int], bool] = lambda _: True,
) -> list[tuple[list[int], list[int]]]:
    """Return prompts with their answers, every other one greedy; `goes_on` as in `generate`."""
    answers = generate(
        target,
        prompts,
        num_new=num_new,
        temperatures=[SAMPLED_TEMPERATURE * (i % 2) for i in range(len(prompts))],
        stops=chat.stops,
        pad_id=chat.stops[0],
        goes_on=goes_on,
    )
    return list(zip(prompts, answers, strict=True))
