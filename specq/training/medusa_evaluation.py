"""How many of a target's tokens Medusa heads foresee: all from the state that made the last token."""

from __future__ import annotations

from typing import Any

import torch

from specq.drafting.medusa.network import MedusaHeads, load_heads
from specq.training.architecture import hidden_states
from specq.training.draft import load_target
from specq.training.draft_settings import MedusaSettings
from specq.training.foresight import info_of, measure_heads


class MedusaForesight:
    """Fulfils `Foresight`."""

    def __init__(self, target: Any, heads: MedusaHeads) -> None:
        self._target, self._heads, self.token_ids = target, heads, heads.token_ids

    def logits(self, prompt: list[int], answer: list[int]) -> torch.Tensor:
        token_ids = torch.tensor([prompt + answer], device=self._target.device)
        return self._heads.logits(hidden_states(self._target, token_ids)[0, len(prompt) - 1 : -1])


def evaluate(settings: MedusaSettings) -> None:
    """Measure the 8-bit heads on every benchmark and write the report."""
    target, chat = load_target(settings)
    info = info_of(target, settings.target)
    heads = MedusaForesight(target, load_heads(str(settings.out), str(settings.target), info, str(settings.device)))
    measure_heads(target, heads, chat, settings)
