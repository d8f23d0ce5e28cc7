"""Greedy text of the inflated pair beside the small one's, and speculation with both models in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.gpu.parts import Found, Task
from bench.numerics import Decoding, Tally, decode
from bench.report import Figure, figure
from specq.drafting import Expansion, Proposer, expand_chain
from specq.engines import ENGINES, Engine
from specq.models import resolve_model
from specq.protocol import SamplingParams
from specq.samples import shipped_token_ids

SMALL_SLOTS = 8192
DEPTHS = (0, 3, 5, 8)  # of the chains; 0: without a drafter


def measure(task: Task) -> Found:
    """Return in how many texts the inflated target differs from the small one, and the figures of speculation."""
    prompts = shipped_token_ids(task.num_prompts)
    pair = task.pair
    options = {"device": pair.device, "dtype": str(pair.dtype).removeprefix("torch."), "kv_slots": SMALL_SLOTS}
    small = ENGINES.resolve("torch").make(resolve_model("tiny", "target"), **options)
    against = compare(small, pair.engine, prompts, task.output_len)
    figures: dict[str, Figure] = {
        "texts that differ from the small target's": figure("share", [len(against["differing"]) / len(prompts)])
    }
    for depth in DEPTHS:
        found = speculate(pair.engine, pair.drafter, prompts, task.output_len, depth)
        figures |= {f"chain of {depth}, {name}": one for name, one in found.figures().items()}
    return Found(figures, against)


def compare(small: Engine, large: Engine, prompts: Sequence[list[int]], num_tokens: int) -> dict[str, Any]:
    """Decode greedily with both, one session a step; see `Tally`. Gaps are the small one's."""
    tally, params = Tally(), SamplingParams(max_tokens=num_tokens, logprobs=2)
    for i, prompt in enumerate(prompts):
        jobs = [Decoding(i, list(prompt), len(prompt), params) for _ in range(2)]
        for engine, job in zip((small, large), jobs, strict=True):
            decode(engine, [job], None)
        tally.add(jobs[:1], jobs[1:])
    return tally.report()


@dataclass
class Rounds:
    """What the rounds of speculation took, in milliseconds, and by text the rate and the tokens of a round."""

    draft_ms: list[float] = field(default_factory=list)
    verify_ms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)

    def add(self, job: Decoding, times: list[tuple[float, float]]) -> None:
        """Add a text and the times of its rounds."""
        self.draft_ms += [draft for draft, _ in times]
        self.verify_ms += [verify for _, verify in times]
        num_tokens = len(job.generated) - 1  # the first came with the prompt
        self.rates.append(1e3 * num_tokens / sum(map(sum, times)))
        self.lengths.append(num_tokens / len(times))

    def figures(self) -> dict[str, Figure]:
        """Return the figures, with a repetition for each text or each round."""
        return {
            "rate": figure("tokens/s", self.rates),
            "mean accepted length": figure("tokens", self.lengths),
            "draft": figure("ms", self.draft_ms),
            "verify": figure("ms", self.verify_ms),
        }


def speculate(engine: Engine, drafter: Proposer, prompts: Sequence[list[int]], num_tokens: int, depth: int) -> Rounds:
    """Decode texts one at a time, each round a chain of `depth` and its verification; the first token is not timed."""
    found = Rounds()
    for i, prompt in enumerate(prompts):
        job = Decoding(i, list(prompt), len(prompt), SamplingParams(max_tokens=1 + num_tokens))
        job.kv_len = engine.open(i, np.array(prompt, np.int32))
        drafter.open(i, np.array(prompt, np.int32), job.params)
        _verify(engine, drafter, job, [])
        _chain(drafter, i, 1)  # computes the drafter's own prompt
        found.add(job, list(_rounds(engine, drafter, job, depth)))
        engine.close(i)
        drafter.close(i)
    return found


def _rounds(engine: Engine, drafter: Proposer, job: Decoding, depth: int) -> Iterator[tuple[float, float]]:
    """Decode a text to its end; yield the milliseconds of each round's draft and of its verification."""
    while not job.done:
        started = time.perf_counter()
        chain = _chain(drafter, job.session_id, depth) if depth else []
        drafted = time.perf_counter()
        _verify(engine, drafter if depth else None, job, chain)
        yield 1e3 * (drafted - started), 1e3 * (time.perf_counter() - drafted)


def _chain(drafter: Proposer, session_id: int, depth: int) -> list[int]:
    """Draft a chain whose node ids are its levels; what an earlier chain left is not followed on."""
    (levels,) = expand_chain(drafter, [Expansion(session_id, -1, tuple(range(depth)))], depth)
    return [int(children.token_ids[0]) for children in levels]


def _verify(engine: Engine, drafter: Proposer | None, job: Decoding, chain: list[int]) -> None:
    """Verify a chain; the outcome goes to the drafter, if there is one."""
    step = job.step(chain, len(job.token_ids))
    (judgement,) = engine.step([step]).judgements
    job.commit(step, judgement)
    if drafter is not None:
        drafter.commit(job.session_id, judgement.token_ids, list(judgement.path))
