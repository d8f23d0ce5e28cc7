"""What every contestant is asked to do."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from specq.bench.prompts import codec_of, load_prompts

LEAST_JOBS = 8  # of a run
JOBS_EACH = 3  # jobs of each session, one after the other, so that the end, when fewer run, weighs little


@dataclass(frozen=True)
class Workload:
    """The pair, the prompts (token ids), how many run at a time, and how many tokens each gets."""

    pair: str
    device: str
    sessions: list[int]
    output_len: int
    repeats: int
    prompts: list[list[int]]

    @staticmethod
    def of(pair: Path, *, device: str, sessions: Sequence[int], output_len: int, repeats: int) -> Workload:
        """Return the workload with prompts of GSM8K and HumanEval in turns, again from the first where they run out."""
        codec = codec_of("tiny")
        at_a_time = list(sessions)
        each = max(*at_a_time, LEAST_JOBS) // 2 + 1
        sets = [[list(p.token_ids) for p in load_prompts((name,), each, codec)] for name in ("gsm8k", "humaneval")]
        turns = islice(zip(*map(cycle, sets), strict=True), each)
        prompts = [prompt for pair_of in turns for prompt in pair_of]
        return Workload(str(pair), device, at_a_time, output_len, repeats, prompts)

    @staticmethod
    def load(path: Path) -> Workload:
        """Read what `save` has written."""
        return Workload(**json.loads(path.read_text("utf-8")))

    def save(self, path: Path) -> None:
        """Write it for a process that is given the path."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Return what a report says of it."""
        values = asdict(self)
        lengths = [len(prompt) for prompt in values.pop("prompts")]
        return values | {"prompt_tokens": statistics.mean(lengths)}

    def prompts_for(self, num_sessions: int) -> list[list[int]]:
        """Return the prompts of a run with `num_sessions`; all have been seen when it is timed, so that whoever keeps the KV
        of prompts has it."""
        return [self.prompts[i % len(self.prompts)] for i in range(max(JOBS_EACH * num_sessions, LEAST_JOBS))]

    def timed(self, num_sessions: int, complete: Callable[[list[list[int]]], list[list[int]]]) -> dict[str, Any]:
        """Complete all prompts of a run, `repeats` times; return the rates, and the beginnings of the first texts."""
        prompts = self.prompts_for(num_sessions)
        complete(prompts)  # warm
        rates, texts = [], []
        for _ in range(self.repeats):
            started = time.perf_counter()
            texts = complete(prompts)
            rates.append(sum(map(len, texts)) / (time.perf_counter() - started))
        return {
            "tokens_per_second": round(statistics.median(rates), 1),
            "rates": [round(rate, 1) for rate in rates],
            "texts": [text[:32] for text in texts[:4]],
        }
