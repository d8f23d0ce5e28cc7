"""The inflated pair on the device, without the disk in between."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specq.engines.torch.loading import LoadedModel, assemble
from specq.models import PRESETS, resolve_model
from specq.models.inflate import inflate

KV_SLOTS = 48 * 1024


@dataclass
class Model:
    """A loaded model, the transformers network inside (whose weights it shares), and the bytes that a step reads."""

    loaded: LoadedModel
    network: Any
    step_bytes: int


def load_inflated(role: str, shape: str, dtype: torch.dtype = torch.bfloat16, *, eager: bool = False) -> Model:
    """Return tiny's target or draft, inflated to a shape."""
    source = resolve_model("tiny", role)
    network = inflate(source, PRESETS[shape], device="cuda", dtype=dtype)
    size = sum(p.nbytes for name, p in network.named_parameters() if "embed_tokens" not in name)
    if network.config.tie_word_embeddings:
        size += network.lm_head.weight.nbytes
    loaded = assemble(network, Path(source), kv_slots=KV_SLOTS, name=f"tiny-as-{shape}", eager=eager)
    return Model(loaded, network, size)
