"""Sizes, rates and paths of a training run, in one frozen value that every stage receives.

There is one class for the pair, and one for each method that trains a drafter for an existing target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specq.engines.torch import pick_device
from specq.training.records import ROLLOUTS


def choose_device(name: str, *, compiled: bool) -> torch.device:
    """Return the device, "" for a GPU if there is one, and set torch up for training on it."""
    torch.set_float32_matmul_precision("high")
    if compiled:
        # Seven row lengths, two models, with and without gradients.
        torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 - it has no public name
    return pick_device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


class BatchSettings(Protocol):
    """The settings that batches of rollouts depend on."""

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


@dataclass(frozen=True)
class RunSettings:
    """Common settings of methods for an existing target; `specq train METHOD --help` explains each."""

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
    head_size: int
    batch_tokens: int
    lr: float
    matrix_lr: float
    hard_weight: float
    bench_prompts: int
    bench_tokens: int

    @property
    def is_split(self) -> bool:
        """Whether prompts and benchmarks are the same files.

        Then some records are only for `evaluate`: see `chat_prompts`.
        """
        return self.corpus.resolve() == self.bench.resolve()

    @property
    def rollouts_folder(self) -> Path:
        """The answers of this run, in parts."""
        return self.work / ROLLOUTS

    @property
    def report_file(self) -> Path:
        """The figures of the evaluation."""
        return self.work / "results.json"

    @property
    def state_file(self) -> Path:
        """The state from which an interrupted run continues."""
        return self.work / "training.pt"

    def autocast(self) -> torch.autocast:
        """Return the context in which losses are computed: bfloat16 on a GPU, plain float32 on a CPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


@dataclass(frozen=True)
class DraftSettings(RunSettings):
    """The settings of `specq train draft`."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    head_dim: int
    embedding_rank: int


@dataclass(frozen=True)
class MedusaSettings(RunSettings):
    """The settings of `specq train medusa`."""

    num_heads: int
    num_layers: int
    own_output: bool
    depth_decay: float


@dataclass(frozen=True)
class EagleSettings(RunSettings):
    """The settings of `specq train eagle3`; start: an earlier head; intermediate_size 0: the target's."""

    start: Path | None
    num_steps: int
    intermediate_size: int
    depth_decay: float


@dataclass(frozen=True)
class BlockSettings(RunSettings):
    """The settings of `specq train block`; num_states: how many of the target's layers it reads."""

    num_layers: int
    block_size: int
    num_states: int
    num_anchors: int
    off_path: float
    depth_decay: float


@dataclass(frozen=True)
class ParallelSettings(RunSettings):
    """The settings of `specq train parallel`."""

    draft: Path
    share: bool
    num_places: int
    keep: float
    least_keep: float
    depth_decay: float
