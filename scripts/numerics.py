"""Measure how often text depends on how a step was batched, and how close the two best scores were where it did.

    python scripts/numerics.py --device cpu --out docs/results/numerics_cpu.json

The reference decodes one session at a time, one row a step. It is compared with 16 sessions a step that verify drafts of
up to 8 tokens, most of them right (so that both acceptance and rejection occur), after a prefill in chunks. A kernel may
compute a row differently in another batch; a text then differs where the two best (perturbed) scores nearly tie.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from specq.bench.machine import describe
from specq.bench.prompts import load_prompts
from specq.engines.torch_engine import TorchEngine
from specq.models import resolve_model
from specq.params import SamplingParams
from specq.text import TextCodec, load_tokenizer_files
from specq.types import Judgement, SessionStep, Tree
from specq.verification import noise

IN_FLIGHT = 16
MAX_DRAFT = 8
CHUNK = 64
RIGHT = 0.85  # share of drafted tokens that are the reference's own


@dataclass
class Decoding:
    """One session on its way: committed tokens, how many have KV, and the gaps seen at each new token."""

    session_id: int
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    kv_len: int = 0
    gaps: list[float] = field(default_factory=list)

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
        """Take what a step brought."""
        self.kv_len += len(step.token_ids)
        if judgement is None:
            return
        self.kv_len += len(judgement.path)
        self.gaps += _gaps(judgement, self.params, len(self.token_ids))
        self.token_ids += judgement.token_ids.tolist()


def _gaps(judgement: Judgement, params: SamplingParams, position: int) -> list[float]:
    """Return the gap of the two best scores at each token, from the likeliest twenty."""
    assert judgement.logprobs is not None
    found = []
    for i, (ids, logprobs) in enumerate(zip(judgement.logprobs.top_ids, judgement.logprobs.top, strict=True)):
        scores = logprobs.astype(np.float64)
        if params.temperature > 0:
            keys = noise.row_keys([params.seed], [position + i], noise.Domain.GUMBEL)
            scores = scores / params.temperature + noise.gumbel(keys, ids[None, :])[0]
        best = np.sort(scores)[::-1]
        found.append(float(best[0] - best[1]))
    return found


def decode(engine: TorchEngine, jobs: list[Decoding], texts: dict[int, list[int]] | None) -> None:
    """Decode jobs together; with `texts` drafts are made from them."""
    rng = random.Random(0)
    for job in jobs:
        job.kv_len = engine.open(job.session_id, np.array(job.token_ids, np.int32))
    while running := [job for job in jobs if not job.done]:
        chunk = CHUNK if texts is not None else 1 << 20
        steps = [job.step(_draft(job, texts, rng), chunk) for job in running]
        judgements = iter(engine.step(steps))
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


def _prompts(limit: int) -> list[list[int]]:
    """Return the shipped benchmark prompts as token ids, in the chat template."""
    codec = TextCodec(load_tokenizer_files(resolve_model("tiny", "target")))
    return [list(prompt.token_ids) for prompt in load_prompts(("gsm8k", "humaneval"), limit, codec)][:limit]


def compare(engine: TorchEngine, prompts: list[list[int]], params: SamplingParams) -> dict[str, Any]:
    """Decode all prompts both ways; return how many texts differ, and the gap at each first difference."""

    def jobs(first: int, prompts: list[list[int]]) -> list[Decoding]:
        return [Decoding(i, list(p), len(p), replace(params, seed=i)) for i, p in enumerate(prompts, first)]

    alone: list[Decoding] = []
    for i, prompt in enumerate(prompts):
        alone += (job := jobs(i, [prompt]))
        decode(engine, job, None)
    texts = {job.session_id: job.token_ids[job.prompt_len :] for job in alone}
    together: list[Decoding] = []
    for first in range(0, len(prompts), IN_FLIGHT):
        together += (batch := jobs(first, prompts[first : first + IN_FLIGHT]))
        decode(engine, batch, texts)
    found = [_first_difference(a, texts[a.session_id], b) for a, b in zip(alone, together, strict=True)]
    gaps = sorted(gap for job in alone for gap in job.gaps)
    return {
        "texts": len(prompts),
        "tokens": sum(map(len, texts.values())),
        "differing": [case for case in found if case],
        "share_of_gaps_below": {
            str(limit): float(np.mean(np.array(gaps) < limit)) for limit in (1e-4, 1e-3, 1e-2, 0.1)
        },
    }


def _first_difference(alone: Decoding, text: list[int], other: Decoding) -> dict[str, Any] | None:
    said = other.token_ids[other.prompt_len :][: len(text)]
    at = next((i for i, (a, b) in enumerate(zip(text, said, strict=True)) if a != b), None)
    return None if at is None else {"prompt": alone.session_id, "token": at, "gap": alone.gaps[at]}


@click.command()
@click.option("--device", default="auto")
@click.option("--dtype", default="auto")
@click.option("--limit", default=64, help="Prompts.")
@click.option("--max-tokens", default=128)
@click.option("--eager", is_flag=True, help="Without the native kernels.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(device: str, dtype: str, limit: int, max_tokens: int, eager: bool, out: Path | None) -> None:
    """Measure for greedy decoding and for T = 0.8."""
    engine = TorchEngine(resolve_model("tiny", "target"), device=device, dtype=dtype, kv_slots=1 << 15, eager=eager)
    prompts = _prompts(limit)
    report: dict[str, Any] = {"device": device, "dtype": engine.info.dtype, "eager": eager}
    for name, temperature in (("greedy", 0.0), ("T=0.8", 0.8)):
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, logprobs=20)
        report[name] = compare(engine, prompts, params)
        cases = report[name]["differing"]
        widest = max((case["gap"] for case in cases), default=0.0)
        click.echo(f"{engine.info.dtype} {name}: {len(cases)} of {len(prompts)} texts differ; widest gap {widest:.2g}")
    if out is not None:
        out.write_text(json.dumps(describe(" ".join(("python", *sys.argv))) | report, indent=1) + "\n")


if __name__ == "__main__":
    main()
