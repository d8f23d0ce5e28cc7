"""Settings of `specq train draft`, in one frozen value that every stage takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class DraftSettings:
    """One run's settings; `specq train draft --help` explains each."""

    target: Path
    corpus: Path
    bench: Path
    work: Path
    out: Path
    results: Path | None
    rollouts: tuple[Path, ...]
    device: torch.device
    seed: int
    limit: int | None
    seconds: float
    rollout_seconds: float
    rollout_rows: int
    rollout_tokens: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    head_dim: int
    embedding_rank: int
    head_size: int
    batch_tokens: int
    lr: float
    matrix_lr: float
    hard_weight: float
    bench_prompts: int
    bench_tokens: int

    @property
    def rollouts_folder(self) -> Path:
        """The answers that this run made, in parts."""
        return self.work / "rollouts"

    @property
    def report_file(self) -> Path:
        """The figures of the evaluation."""
        return self.work / "results.json"

    def autocast(self) -> torch.autocast:
        """Return the context in which losses are computed: bfloat16 on a GPU, plain float32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")
