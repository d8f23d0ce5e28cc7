"""Sizes, rates and places of a training run, in one frozen value that every stage takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specq.engines.torch import pick_device


def choose_device(name: str, *, compiled: bool) -> torch.device:
    """Return the device, "" a GPU if there is one, and set torch up for training on it."""
    torch.set_float32_matmul_precision("high")
    if compiled:
        # Seven row lengths, two models, with and without gradients.
        torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - it has no public name
    return pick_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


class BatchSettings(Protocol):
    """What batches of rollouts depend on."""

    @property
    def device(self) -> torch.device: ...

    @property
    def batch_tokens(self) -> int: ...


@dataclass(frozen=True)
class PairSettings:
    """One run's settings; `specq train pair --help` explains each."""

    corpus: Path
    bench: Path
    work: Path
    out: Path
    results: Path | None
    device: torch.device
    compiled: bool
    seed: int
    limit: int | None
    target_steps: int
    draft_steps: int
    row_length: int
    batch_tokens: int
    target_lr: float
    draft_lr: float
    weight_decay: float
    closing_share: float
    draft_shape: str
    hard_weight: float
    num_rollouts: int
    rollout_tokens: int
    bench_prompts: int
    bench_tokens: int

    @property
    def batch_rows(self) -> int:
        """Rows of full length in a batch."""
        return max(self.batch_tokens // self.row_length, 1)

    @property
    def dataset_file(self) -> Path:
        """The tokenised corpus."""
        return self.work / "dataset.npz"

    @property
    def rollouts_file(self) -> Path:
        """The target's own outputs."""
        return self.work / "rollouts.npz"

    @property
    def tokenizer_folder(self) -> Path:
        """The tokenizer that all stages share."""
        return self.work / "tokenizer"

    @property
    def target_folder(self) -> Path:
        """The trained target."""
        return self.work / "target"

    @property
    def draft_folder(self) -> Path:
        """The distilled draft of the chosen shape."""
        return self.work / self.draft_shape

    def autocast(self) -> torch.autocast:
        """Return the context in which losses are computed: bfloat16 on a GPU, plain float32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")
