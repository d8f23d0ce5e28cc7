"""The inflated pair on the device, without the disk in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from specq.drafting import PROPOSERS, Proposer
from specq.engines import ENGINES, Engine
from specq.engines.torch.loading import LoadedModel, assemble, pick_device
from specq.models import ROLES, Shape, resolve_model
from specq.models.inflate import inflate
from specq.protocol import ConfigError

KV_SLOTS = 48 * 1024


def check_device(device: str) -> None:
    """Raise ConfigError if the device is a GPU and none is here, or none that torch has here."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"no device {device} is here; this suite needs a GPU, and --device cpu only tries it out")
    pick_device(device)


@dataclass(frozen=True)
class Model:
    """A loaded model, the transformers network inside (whose weights it shares), and the bytes that a step reads."""

    loaded: LoadedModel
    network: Any
    step_bytes: int

    @property
    def decoder(self) -> Any:
        """Its `FusedDecoder`; raises ConfigError where another forward runs the model."""
        decoder = getattr(self.loaded.forward, "decoder", None)
        if decoder is None:
            raise ConfigError(
                "this part measures the kernels of the fused decoder, which need an NVIDIA GPU and Triton"
            )
        return decoder


class Pair:
    """tiny's target and draft, inflated to shapes; each is made when it is first needed, and stays."""

    def __init__(self, shapes: Mapping[str, Shape], device: str) -> None:
        self.shapes, self.device = shapes, device
        self.dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32

    @cached_property
    def target(self) -> Model:
        return self._load("target")

    @cached_property
    def draft(self) -> Model:
        return self._load("draft")

    @property
    def models(self) -> dict[str, Model]:
        """Both models by role."""
        return {role: getattr(self, role) for role in ROLES}

    @cached_property
    def engine(self) -> Engine:
        """An engine that runs the target."""
        engine: Engine = ENGINES.resolve("torch").make(self.target.loaded)
        return engine

    @cached_property
    def drafter(self) -> Proposer:
        """A proposer that runs the draft model."""
        drafter: Proposer = PROPOSERS.resolve("draft-model").make(self.draft.loaded)
        return drafter

    def _load(self, role: str) -> Model:
        source = resolve_model("tiny", role)
        network = inflate(source, self.shapes[role], device=self.device, dtype=self.dtype)
        loaded = assemble(network, Path(source), kv_slots=KV_SLOTS, name=f"tiny-inflated-{role}")
        return Model(loaded, network, _step_bytes(network))


def _step_bytes(network: Any) -> int:
    size: int = sum(p.nbytes for name, p in network.named_parameters() if "embed_tokens" not in name)
    return size + (network.lm_head.weight.nbytes if network.config.tie_word_embeddings else 0)
