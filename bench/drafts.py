"""Draft models that are worse than the bundled one, made on demand: same shape, same tokenizer, same cost.

random   random weights: its drafts are never right.
weak     the bundled weights with Gaussian noise: right about two times in five.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from specq.models import resolve_model

# In standard deviations of each matrix. The bundled draft's first choice equals the bundled target's in 84% of 1,264
# greedy tokens (GSM8K and HumanEval). With noise of 0.05 it is 80%, 0.1: 66%, 0.15: 43%, 0.2: 25%, 0.3: 8%.
WEAK_NOISE = 0.15


def make_random_draft(model: str, folder: Path, seed: int = 0) -> None:
    """Write a draft model of the same shape and tokenizer as `model`, but with random weights."""
    quiet()
    source = resolve_model(model, "draft")
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    auto.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def make_weak_draft(model: str, folder: Path, noise: float = WEAK_NOISE, seed: int = 0) -> None:
    """Write `model` with Gaussian noise added to every matrix: `noise` times the matrix's own standard deviation.

    The same arguments give the same weights, in the number format of `model`.
    """
    quiet()
    source = Path(resolve_model(model, "draft"))
    network: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1:
                weight.add_(torch.randn(weight.shape, generator=random) * float(weight.float().std()) * noise)
    network.save_pretrained(folder)
    for path in source.glob("tokenizer*"):
        shutil.copy(path, folder)


def quiet() -> None:
    """Keep transformers' progress bars and advice out of the output."""
    logging: Any = transformers_logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
