"""The stage `rollouts` of all methods that train for a target that exists: the target answers prompts of the corpus, for so many seconds.

Each batch is a file, and a run that is repeated goes on after the last. Where the time is over, the answers under way end where they are:
what is there counts. On a CPU a run begins with few prompts in a batch, since their pass is not cut short, and takes more as long as a batch is quick.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from specq.training.acceptance import SAMPLED_TEMPERATURE
from specq.training.chat_prompts import Chat, corpus_prompts
from specq.training.decoding import generate
from specq.training.draft import load_target
from specq.training.draft_settings import RunSettings
from specq.training.progress import Progress
from specq.training.rollouts import load_rollouts, save_rollouts

FIRST_ROWS = 8  # prompts in the first batch on a CPU
QUICK_S = 4.0  # a batch that took less is followed by one of twice as many prompts
LEAST_TOKENS = 16  # of each answer that has not ended, however little time there is: of fewer nothing can be learned


def roll_out(settings: RunSettings) -> None:
    """Let the target answer prompts; what earlier runs have answered is skipped."""
    target, chat = load_target(settings)
    torch.manual_seed(settings.seed)
    prompts = corpus_prompts(settings, chat, np.random.default_rng(settings.seed))
    settings.rollouts_folder.mkdir(parents=True, exist_ok=True)
    parts = sorted(settings.rollouts_folder.glob("*.npz"))
    first = sum(len(load_rollouts(part).prompt_sizes) for part in parts)
    _Answering(target, chat, settings, len(parts)).all_of(prompts, first)


class _Answering:
    """A run under way."""

    def __init__(self, target: Any, chat: Chat, settings: RunSettings, num_parts: int) -> None:
        self._target, self._chat, self._settings, self._num_parts = target, chat, settings, num_parts
        self._started, self._progress, self.num_new = time.monotonic(), Progress(), 0

    def all_of(self, prompts: Sequence[list[int]], first: int) -> None:
        """Answer prompts from this one on, batch by batch, until the time is over."""
        most = self._settings.rollout_rows
        rows = most if self._target.device.type == "cuda" else min(FIRST_ROWS, most)
        while first < len(prompts) and (not self.num_new or self._seconds() < self._settings.rollout_seconds):
            began, batch = self._seconds(), list(prompts[first : first + rows])
            self._answer(batch, f"rollouts: prompts {first + 1} to {first + len(batch)} of {len(prompts)}")
            first += len(batch)
            if self._seconds() - began < QUICK_S:
                rows = min(2 * rows, most)
            self._progress.end(f"rollouts: {first} of {len(prompts)} prompts, {self._so_far(0)}")

    def _answer(self, batch: list[list[int]], about: str) -> None:
        def goes_on(num_said: int) -> bool:
            self._progress.say(f"{about}, {self._so_far(num_said * len(batch))}")
            return num_said < LEAST_TOKENS or self._seconds() < self._settings.rollout_seconds

        self._progress.say(f"{about}, {self._so_far(0)}")
        pairs = answer(self._target, self._chat, batch, self._settings.rollout_tokens, goes_on)
        save_rollouts(self._settings.rollouts_folder / f"{self._num_parts:05d}.npz", pairs)
        self._num_parts += 1
        self.num_new += sum(len(said) for _, said in pairs)

    def _so_far(self, more: int) -> str:
        return f"{'at most ' * (more > 0)}{self.num_new + more} tokens, {self._seconds():.0f} of {self._settings.rollout_seconds:g} s"

    def _seconds(self) -> float:
        return time.monotonic() - self._started


def answer(
    target: Any, chat: Chat, prompts: list[list[int]], num_new: int, goes_on: Callable[[int], bool] = lambda _: True
) -> list[tuple[list[int], list[int]]]:
    """Return prompts with their answers, every other one greedy; `goes_on`: as of `generate`."""
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
