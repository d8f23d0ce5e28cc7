"""What a benchmark run is asked to do, and what one completion of it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Settings:
    """One run's settings.

    num_prompts   of each data set; output_len: most tokens for each; ignore_eos: always that many
    k             tokens that the assistant of transformers drafts a round; specq decides by itself
    concurrency   specq's sessions in flight; transformers runs one by one
    repeats       repetitions of everything, interleaved
    keys          as of `specq up`; "": no encryption
    """

    datasets: tuple[str, ...]
    num_prompts: int = 20
    output_len: int = 128
    k: int = 5
    concurrency: int = 1
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    repeats: int = 3
    drafters: int = 1
    model: str = "tiny"
    draft_model: str = "tiny"
    keys: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """What a contestant made of one prompt; `stats` has all counts of `specq.client.Result` as far as it knows them."""

    token_ids: list[int]
    first_token_ms: float
    stats: dict[str, Any] = field(default_factory=dict)
