"""What only the vllm engine has, run for real in this process: quantised weights, prefixes shared among sessions, and a long prompt beside short
texts.

A verifier's core drives the engine, without sockets. Texts are greedy and are held against those of vLLM itself, which completes each prompt alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import numpy as np

from specq.bench.lossless_vllm import first_difference
from specq.bench.rivals.vllm import Vllm
from specq.engines import ENGINES, Engine
from specq.engines.vllm.options import prepare_environment
from specq.protocol import EngineError, Int32Array, Open, SamplingParams, Verdict
from specq.verifier import StepCurve, Verifier

GREEDY = SamplingParams(ignore_eos=True)
CURVE = StepCurve([1, 1024], [0.005, 0.02])
DTYPE = "bfloat16"  # what quantised weights are multiplied with
LONG = 0  # the session of the long prompt
BEFORE, BEHIND = 16, 32  # tokens that each short text has when the long prompt comes, and gains when it is done


@dataclass
class Text:
    """A session's text: its tokens, and when they came, in seconds."""

    prompt: Int32Array
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)


class Service:
    """An engine, served by a verifier that puts at most `max_step_rows` into a step."""

    def __init__(self, engine: Engine, max_step_rows: int, num_sessions: int = 64) -> None:
        self._verifier = Verifier(
            engine,
            CURVE,
            incarnation=1,
            max_sessions=num_sessions,
            max_step_rows=max_step_rows,
            max_uncommitted=1 << 30,
        )
        self.texts: dict[int, Text] = {}

    def open(self, session_id: int, prompt: Int32Array, num_tokens: int) -> Text:
        """Begin a text of so many tokens."""
        opening = Open(
            session_id=session_id, epoch=1, prompt_len=len(prompt), tokens_left=num_tokens, params=GREEDY, token_ids=prompt
        )  # fmt: skip
        if refused := self._verifier.handle(opening, time.perf_counter()):
            raise EngineError(f"session {session_id} was refused: {refused}")
        text = self.texts[session_id] = Text(prompt)
        return text

    def step(self) -> bool:
        """Take a step; return whether there was work."""
        if not self._verifier.has_work:
            return False
        for verdict in self._verifier.step(time.perf_counter):
            assert isinstance(verdict, Verdict), verdict
            text = self.texts[verdict.session_id]
            text.token_ids += verdict.token_ids.tolist()
            text.arrivals += [time.perf_counter()] * len(verdict.token_ids)
        return True

    def must_step(self) -> None:
        """Take a step; EngineError where there is nothing to do."""
        if not self.step():
            raise EngineError("all texts have ended before the measurement has")

    def run(self) -> float:
        """Step until all texts have ended; return the seconds."""
        began = time.perf_counter()
        while self.step():
            pass
        return time.perf_counter() - began

    def close(self) -> None:
        """End all sessions."""
        for session_id in list(self._verifier.sessions):
            self._verifier.engine.close(session_id)


def load(model: str, **arguments: Any) -> Engine:
    """Return the vllm engine; arguments as of `VllmEngine`."""
    engine: Engine = ENGINES.resolve("vllm").make(model, **arguments)
    return engine


# --- quantised weights --------------------------------------------------------------------------------------------------


def quantised(
    model: str,
    prompts: Sequence[Int32Array],
    num_tokens: int,
    rows: int,
    memory: Mapping[str, Any],
    quantization: str = "",
) -> dict[str, Any]:
    """Return how many greedy texts are vLLM's own, one prompt at a time and all at once, and how fast the latter come."""
    options = {**memory, "enforce_eager": True} | ({"quantization": quantization} if quantization else {})
    theirs = _completed(model, prompts, num_tokens, options)
    engine = load(model, dtype=DTYPE, max_step_rows=rows, options=options)
    found: dict[str, Any] = {}
    for name, at_a_time in (("alone", 1), ("together", len(prompts))):
        seconds, texts = 0.0, list[list[int]]()
        for first in range(0, len(prompts), at_a_time):
            service = Service(engine, rows)
            own = [service.open(i, prompt, num_tokens) for i, prompt in enumerate(prompts[first : first + at_a_time])]
            seconds += service.run()
            service.close()
            texts += [text.token_ids for text in own]
        found[name] = compared(texts, theirs) | {"tokens_per_second": round(len(prompts) * num_tokens / seconds, 1)}
    engine.shutdown()
    return found


def compared(texts: Sequence[list[int]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many texts are vLLM's, and where and why the others part from it; `theirs` as of `rivals.vllm.Vllm.complete`."""
    partings = [
        first_difference(own, vllm["token_ids"], vllm["best"], DTYPE) for own, vllm in zip(texts, theirs, strict=True)
    ]
    differing = [{"text": i, **parting} for i, parting in enumerate(partings) if parting]
    return {"texts": len(texts), "equal": len(texts) - len(differing), "differing": differing}


def _completed(
    model: str, prompts: Sequence[Int32Array], num_tokens: int, options: Mapping[str, Any]
) -> list[dict[str, Any]]:
    prepare_environment("auto")  # vLLM reads it once: the engine, later in this process, needs the first model runner
    vllm = Vllm(model, DTYPE, **options)
    found = [vllm.complete(prompt.tolist(), num_tokens) for prompt in prompts]
    vllm.shutdown()
    return found


# --- prefixes, and a long prompt ------------------------------------------------------------------------------------------


def shared_prefix(engine: Engine, prompt: Int32Array, num_tokens: int, rows: int, num_sessions: int) -> dict[str, Any]:
    """Return how soon the first token of a prompt comes: the first time, then to other sessions at once, with what is cached of it; and
    whether their texts are the first one's."""
    service = Service(engine, rows)
    (first,), cold_s = [service.open(0, prompt, num_tokens)], time.perf_counter()
    service.run()
    began = time.perf_counter()
    num_cached = engine.open(-2, prompt)
    engine.close(-2)
    later = [service.open(1 + i, prompt, num_tokens) for i in range(num_sessions)]
    warm_s = time.perf_counter()
    service.run()
    service.close()
    return {
        "prompt": len(prompt),
        "cached": num_cached,
        "first_ms": round(1e3 * (first.arrivals[0] - cold_s), 2),
        "first_cached_ms": round(1e3 * (median(text.arrivals[0] for text in later) - warm_s), 2),
        "lookup_ms": round(1e3 * (warm_s - began), 3),
        "equal": sum(text.token_ids == first.token_ids for text in later),
        "texts": num_sessions,
    }


def long_prompt(engine: Engine, prompt: Int32Array, shorts: Sequence[Int32Array], rows: int) -> dict[str, Any]:
    """Return the milliseconds between tokens of short texts while a long prompt is computed beside them, `rows` of a step at most, and
    without it."""
    service = Service(engine, rows, len(shorts) + 1)
    own = [service.open(1 + i, short, len(prompt) + BEFORE + 2 * BEHIND + BEFORE) for i, short in enumerate(shorts)]
    _until(service, own, BEFORE)
    alone_from = time.perf_counter()
    _until(service, own, 2 * BEFORE + BEHIND)
    began = time.perf_counter()
    long = service.open(LONG, prompt, 2)
    while not long.token_ids:
        service.must_step()
    ended = time.perf_counter()
    _until(service, own, max(len(text.token_ids) for text in own) + BEHIND)
    service.close()
    beside, alone = _gaps(own, began, ended), _gaps(own, alone_from, began)
    all_of_it = _gaps(own, alone_from, float("inf"))
    p99 = quantiles(all_of_it, n=100)[98]
    return {
        "prompt": len(prompt),
        "sessions": len(shorts),
        "rows": rows,
        "first_ms": round(1e3 * (long.arrivals[0] - began), 1),
        "alone_ms": round(1e3 * median(alone), 3),
        "beside_ms": round(1e3 * median(beside), 3),
        "p99_ms": round(1e3 * p99, 3),
        "p99_to_median": round(p99 / median(all_of_it), 2),
        "p99_to_alone": round(p99 / median(alone), 2),
    }


def _until(service: Service, texts: Sequence[Text], num_tokens: int) -> None:
    while any(len(text.token_ids) < num_tokens for text in texts):
        service.must_step()


def _gaps(texts: Sequence[Text], began: float, ended: float) -> list[float]:
    """Return the seconds between tokens that came in that time."""
    return [float(gap) for text in texts for gap in np.diff([at for at in text.arrivals if began <= at <= ended])]
