"""How often text depends on how a step was batched, and how close the two best scores were there.

The reference decodes one session at a time, one row a step. It is compared with 16 sessions a step that verify drafts
of up to 8 tokens, after a prefill in chunks. Most drafted tokens are right, so that both acceptance and rejection
occur. A kernel may compute a row differently in another batch. Then a text differs where the two best (perturbed)
scores nearly tie.

Prompts run 16 at a time until the time is over. Those that did not fit in the time are not counted.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from bench.agreement import parting
from specq.engines import Engine
from specq.protocol import Judgement, SamplingParams, SessionStep, Tree
from specq.verification import noise

IN_FLIGHT = 16
MAX_DRAFT = 8
CHUNK = 64
RIGHT = 0.85  # share of drafted tokens that are the reference's own


@dataclass
class Decoding:
    """One session in progress: committed tokens, how many have KV, and the gap at each new token (with logprobs)."""

    session_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    kv_len: int = 0
    gaps: list[float] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def done(self) -> bool:
        return len(self.token_ids) - self.prompt_len >= self.params.max_tokens

    def step(self, draft: list[int], chunk: int) -> SessionStep:
        """Return the next step: a prefill chunk, or the pending token and a drafted chain."""
        pending = self.token_ids[self.kv_len :][:chunk]
        judged = self.kv_len + len(pending) == len(self.token_ids)
        chain = np.array(draft if judged else [], np.int32)
        tree = Tree(chain, np.arange(len(chain), dtype=np.int32) - 1, np.zeros(len(chain), np.float32))
        return SessionStep(self.session_id, self.kv_len, np.array(pending, np.int32), self.params, tree, judged)

    def commit(self, step: SessionStep, judgement: Judgement | None) -> None:
        """Apply the result of a step."""
        self.kv_len += len(step.token_ids)
        if judgement is None:
            return
        self.kv_len += len(judgement.path)
        self.gaps += _gaps(judgement, self.params, len(self.token_ids))
        self.token_ids += judgement.token_ids.tolist()


def _gaps(judgement: Judgement, params: SamplingParams, position: int) -> list[float]:
    """Return the gap of the two best scores at each token, from the likeliest tokens; empty without logprobs."""
    if judgement.logprobs is None:
        return []
    found = []
    for i, (ids, logprobs) in enumerate(zip(judgement.logprobs.top_ids, judgement.logprobs.top, strict=True)):
        scores = logprobs.astype(np.float64)
        if params.temperature > 0:
            keys = noise.row_keys([params.seed], [position + i], noise.Domain.GUMBEL)
            scores = scores / params.temperature + noise.gumbel(keys, ids[None, :])[0]
        best = np.sort(scores)[::-1]
        found.append(float(best[0] - best[1]))
    return found


def decode(engine: Engine, jobs: list[Decoding], texts: dict[int, list[int]] | None) -> None:
    """Decode jobs together; with `texts` drafts are made from them."""
    rng = random.Random(0)
    for job in jobs:
        job.kv_len = engine.open(job.session_id, np.array(job.token_ids, np.int32))
    while running := [job for job in jobs if not job.done]:
        chunk = CHUNK if texts is not None else 1 << 20
        steps = [job.step(_draft(job, texts, rng), chunk) for job in running]
        judgements = iter(engine.step(steps).judgements)
        for job, step in zip(running, steps, strict=True):
            job.commit(step, next(judgements) if step.judged else None)
    for job in jobs:
        engine.close(job.session_id)


def _draft(job: Decoding, texts: dict[int, list[int]] | None, rng: random.Random) -> list[int]:
    if texts is None:
        return []
    made = len(job.token_ids) - job.prompt_len
    room = max(0, job.params.max_tokens - made - 1)
    right = texts[job.session_id][made : made + min(rng.randrange(MAX_DRAFT + 1), room)]
    return [token if rng.random() < RIGHT else token ^ 1 for token in right]


@dataclass
class Tally:
    """The counts of one number format and temperature: texts compared, texts that differ, gaps at all tokens."""

    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    differing: list[dict[str, Any]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def add(self, alone: list[Decoding], together: list[Decoding]) -> None:
        """Count some prompts, decoded both ways."""
        self.texts += len(alone)
        for job, other in zip(alone, together, strict=True):
            self.tokens += len(job.generated)
            self.gaps += job.gaps
            self.differing += _first_difference(job, other)

    def report(self) -> dict[str, Any]:
        """Return the counts; `differing_per_token` counts tokens up to the first difference of each text."""
        agreed = self.tokens - sum(case["left"] for case in self.differing)
        gaps = np.array(self.gaps)
        return {
            "texts": self.texts,
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "differing": self.differing,
            "widest_gap": max((case["gap"] for case in self.differing), default=None),
            "differing_per_token": round(len(self.differing) / agreed, 6) if agreed else None,
            "share_of_gaps_below": {str(limit): float(np.mean(gaps < limit)) for limit in (1e-4, 1e-3, 1e-2, 0.1)}
            if len(gaps)
            else {},
        }

    def __str__(self) -> str:
        widest = max((case["gap"] for case in self.differing), default=0.0)
        return (
            f"{self.texts} texts, {self.tokens} tokens, {len(self.differing)} texts differ, widest gap {widest:.2g}, "
            f"{self.seconds:.0f} s"
        )


def _first_difference(alone: Decoding, other: Decoding) -> list[dict[str, Any]]:
    """Return where two texts differ, if they do: the token, the gap there, and how many tokens come after it."""
    at = parting(alone.generated, other.generated)
    if at == min(len(alone.generated), len(other.generated)):
        return []
    return [{"prompt": alone.session_id, "token": at, "gap": alone.gaps[at], "left": len(alone.generated) - at - 1}]


def compare(engine: Engine, prompts: list[list[int]], params: SamplingParams, seconds: float) -> Iterator[Tally]:
    """Decode prompts both ways, in blocks, until the time is over; yield the counts after each block.

    Decoding one by one takes nearly all of the time. A block is cut short when the time is over.
    """
    started, tally = time.monotonic(), Tally()
    for first in range(0, len(prompts), IN_FLIGHT):
        alone: list[Decoding] = []
        for i, prompt in enumerate(prompts[first : first + IN_FLIGHT], first):
            if time.monotonic() - started < seconds:
                alone.append(_job(i, prompt, params))
                decode(engine, alone[-1:], None)
        together = [_job(job.session_id, job.token_ids[: job.prompt_len], params) for job in alone]
        decode(engine, together, {job.session_id: job.generated for job in alone})
        tally.add(alone, together)
        tally.seconds = time.monotonic() - started
        yield tally
        if tally.seconds >= seconds:
            return


def _job(number: int, prompt: list[int], params: SamplingParams) -> Decoding:
    return Decoding(number, list(prompt), len(prompt), replace(params, seed=number))


def warm_up(engine: Engine, prompts: list[list[int]]) -> None:
    """Compile, capture and allocate everything before the time counts."""
    params = SamplingParams(temperature=0.8, max_tokens=4, logprobs=20)
    for _ in compare(engine, prompts[:2], params, 1e9):
        pass


def forbid_split_k() -> None:
    """Ask torch and cuBLAS for sums in one piece; call before the first product on the device.

    This is a part of vLLM's batch-invariant mode on Hopper (vllm/model_executor/layers/batch_invariant.py): without a
    workspace there is no memory for partial sums. The second value of the switches is that of torch 2.10 and later.
    """
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    torch.backends.cuda.preferred_blas_library("cublaslt")  # the only library with this switch
    matmul: Any = torch.backends.cuda.matmul
    for name in ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction"):
        try:
            setattr(matmul, name, (False, False))
        except TypeError:
            setattr(matmul, name, False)
