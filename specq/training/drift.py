"""How far a target that was made of another one went from it, along what the original answers."""

from __future__ import annotations

from typing import Any

import click
import numpy as np
import torch
from torch.nn import functional

from specq.training.acceptance import SAMPLED_TEMPERATURE
from specq.training.architecture import hidden_states
from specq.training.chat_prompts import Chat, bench_prompts
from specq.training.distil import divergences
from specq.training.draft_settings import RunSettings
from specq.training.ranks import answer_with_noise
from specq.training.records import bench_paths


def measure_drift(original: Any, new: Any, chat: Chat, settings: RunSettings) -> dict[str, dict[str, Any]]:
    """Return for every benchmark, and each way of choosing tokens, the mean divergence KL(original || new) in nats a token, and the share of
    places at which both would say the same token first."""
    torch.manual_seed(settings.seed)
    found: dict[str, dict[str, Any]] = {}
    for path in bench_paths(settings.bench):
        prompts = bench_prompts(path, chat, settings)
        found[path.stem] = {}
        for temperature in (0.0, SAMPLED_TEMPERATURE):
            answers, _ = answer_with_noise(original, prompts, chat, settings.bench_tokens, temperature)
            figures = drift_along(original, new, prompts, answers)
            found[path.stem][f"T={temperature:g}"] = figures
            click.echo(f"{path.stem} T={temperature:g}: drift {figures}")
    return found


@torch.no_grad()
def drift_along(original: Any, new: Any, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, float | int]:
    """Return `mean_kl`, `equal_first` and `num_tokens` along some answers."""
    apart, equal = list[float](), list[bool]()
    for prompt, answer in zip(prompts, answers, strict=True):
        token_ids = torch.tensor([prompt + answer], device=original.device)
        logits = [
            model.lm_head(hidden_states(model, token_ids)[0, len(prompt) - 1 : -1]).float() for model in (original, new)
        ]
        logs = [functional.log_softmax(of_model, -1) for of_model in logits]
        apart += divergences(*logs).tolist()
        equal += (logits[0].argmax(-1) == logits[1].argmax(-1)).tolist()
    return {
        "mean_kl": round(float(np.mean(apart)), 5),
        "equal_first": round(float(np.mean(equal)), 4),
        "num_tokens": len(equal),
    }
