"""What the vllm engine is asked for beside speed, run for real in this process: quantised weights, prefixes shared among sessions, and a long
prompt beside short texts; the last also with another engine.

A verifier's core drives the engine, without sockets. Texts are greedy and are held against those of vLLM itself, which completes each prompt alone. Those that differ
do so at a near tie of its two best logits, or are unexplained.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any

import numpy as np

from specq.bench.lossless_vllm import first_difference
from specq.bench.rivals.vllm import Vllm
from specq.engines import ENGINES, Engine
from specq.engines.vllm.options import prepare_environment
from specq.protocol import Close, EngineError, Int32Array, Open, SamplingParams, Verdict
from specq.verifier import StepCurve, Verifier, profiled_rows

GREEDY = SamplingParams(ignore_eos=True)
CURVE = StepCurve([1, 1024], [0.005, 0.02])
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

    def __init__(
        self,
        engine: Engine,
        max_step_rows: int,
        num_sessions: int = 64,
        *,
        curve: StepCurve = CURVE,
        max_prefill_slowdown: float = 0.0,
    ) -> None:
        self._verifier = Verifier(
            engine,
            curve,
            incarnation=1,
            max_sessions=num_sessions,
            max_step_rows=max_step_rows,
            max_prefill_slowdown=max_prefill_slowdown,
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
        """End all sessions, and the step in flight, so that another service can have the engine."""
        for session_id in list(self._verifier.sessions):
            self._verifier.handle(Close(session_id=session_id, epoch=1), time.perf_counter())
        while self.step():
            pass


def load(model: str, engine: str = "vllm", **arguments: Any) -> Engine:
    """Return an engine; arguments as it takes them."""
    made: Engine = ENGINES.resolve(engine).make(model, **arguments)
    return made


# --- quantised weights --------------------------------------------------------------------------------------------------


def quantised(
    model: str,
    prompts: Sequence[Int32Array],
    num_tokens: int,
    rows: int,
    memory: Mapping[str, Any],
    dtype: str,
    quantization: str = "",
) -> dict[str, Any]:
    """Return how many greedy texts are vLLM's own, one prompt at a time and all at once, and how fast the latter come."""
    options = {**memory, "enforce_eager": True} | ({"quantization": quantization} if quantization else {})
    theirs = completed(model, prompts, num_tokens, options, dtype)
    engine = load(model, dtype=dtype, max_step_rows=rows, options=options)
    found: dict[str, Any] = {}
    for name, at_a_time in (("alone", 1), ("together", len(prompts))):
        seconds, texts = 0.0, list[list[int]]()
        for first in range(0, len(prompts), at_a_time):
            service = Service(engine, rows)
            own = [service.open(i, prompt, num_tokens) for i, prompt in enumerate(prompts[first : first + at_a_time])]
            seconds += service.run()
            service.close()
            texts += [text.token_ids for text in own]
        found[name] = compared(texts, theirs, dtype) | {
            "tokens_per_second": round(len(prompts) * num_tokens / seconds, 1)
        }
    engine.shutdown()
    return found


def compared(texts: Sequence[list[int]], theirs: Sequence[Mapping[str, Any]], dtype: str) -> dict[str, Any]:
    """Return how many texts are vLLM's, how many leave it at a near tie, and the largest gap of logits there, how many elsewhere, and where each
    differs; `theirs` as of `rivals.vllm.Vllm.complete`."""
    partings = [
        first_difference(own, vllm["token_ids"], vllm["best"], dtype) for own, vllm in zip(texts, theirs, strict=True)
    ]
    differing = [{"text": i, **parting} for i, parting in enumerate(partings) if parting]
    ties = [parting for parting in differing if parting["near_tie"]]
    return {
        "texts": len(texts),
        "equal": len(texts) - len(differing),
        "near_ties": len(ties),
        "largest_gap": max((tie["gap"] for tie in ties), default=0.0),
        "unexplained": len(differing) - len(ties),
        "differing": differing,
    }


def completed(
    model: str,
    prompts: Sequence[Int32Array],
    num_tokens: int,
    options: Mapping[str, Any],
    dtype: str,
    together: int = 0,
) -> list[dict[str, Any]]:
    """Return what vLLM itself says to each prompt alone, and then to the first of them so many times at once."""
    prepare_environment("auto")  # vLLM reads it once: the engine, later in this process, needs the first model runner
    vllm = Vllm(model, dtype, **options)
    found = [vllm.complete(prompt.tolist(), num_tokens) for prompt in prompts]
    if together:
        found += vllm.complete_all([prompts[0].tolist()] * together, num_tokens)
    vllm.shutdown()
    return found


# --- prefixes, and a long prompt ------------------------------------------------------------------------------------------


def shared_prefix(
    engine: Engine, prompt: Int32Array, num_tokens: int, rows: int, num_sessions: int
) -> tuple[dict[str, Any], dict[str, list[list[int]]]]:
    """Return how soon the first token of a prompt comes: the first time, then to other sessions at once, with what is cached of it; and
    the texts of the first time, of one session alone with what is cached, and of all those at once."""
    service = Service(engine, rows, num_sessions)
    (first,), cold_s = [service.open(0, prompt, num_tokens)], time.perf_counter()
    service.run()
    began = time.perf_counter()
    num_cached = engine.open(-2, prompt)
    engine.close(-2)
    warm_s = time.perf_counter()
    again = service.open(1, prompt, num_tokens)
    service.run()
    later_s, later = time.perf_counter(), [service.open(2 + i, prompt, num_tokens) for i in range(num_sessions)]
    service.run()
    service.close()
    figures = {
        "prompt": len(prompt),
        "cached": num_cached,
        "first_ms": round(1e3 * (first.arrivals[0] - cold_s), 2),
        "first_cached_ms": round(1e3 * (median(text.arrivals[0] for text in later) - later_s), 2),
        "lookup_ms": round(1e3 * (warm_s - began), 3),
    }
    texts = {"first": [first], "cached, alone": [again], "cached, together": later}
    return figures, {name: [text.token_ids for text in own] for name, own in texts.items()}


def measured_curve(engine: Engine, max_step_rows: int) -> Callable[[], StepCurve]:
    """Measure steps as a verifier does at its start; return what makes a curve of them that has learned nothing yet."""
    sizes = profiled_rows(engine.jumps, max_step_rows)
    times = engine.step_times(sizes)
    return lambda: StepCurve(sizes[: len(times)], times)


def long_prompt(
    engine: Engine, curve: StepCurve, prompt: Int32Array, shorts: Sequence[Int32Array], rows: int, slowdown: float
) -> dict[str, Any]:
    """Return the milliseconds between tokens of short texts while a long prompt is computed beside them, and without it.

    rows       of a step at most; slowdown: `max_prefill_slowdown` of the verifier
    """
    service = Service(engine, rows, len(shorts) + 1, curve=curve, max_prefill_slowdown=slowdown)
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
        "slowdown": slowdown,
        "first_ms": round(1e3 * (long.arrivals[0] - began), 1),
        "steps": len(beside) // len(shorts),
        "alone_ms": round(1e3 * median(alone), 3),
        "alone_p99_ms": round(1e3 * quantiles(alone, n=100)[98], 3),
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
