"""Sessions of a verifier whose steps overlap."""

from __future__ import annotations

from typing import Any

import numpy as np

from specq.protocol.messages import Open
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.late import LateEngine
from specq.testing.toy import ToyEngine
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve

PROMPT = [5, 6, 7]


PLAIN = Speculation(mode="plain")


def make_verifier(engine: ToyEngine | None = None, **options: Any) -> Verifier:
    return Verifier(engine or LateEngine(), StepCurve([1, 64], [0.005, 0.01]), incarnation=1, **options)


def open_session(
    verifier: Verifier, session_id: int = 7, tokens_left: int = 12, speculation: Speculation = PLAIN, **params: Any
) -> None:
    message = Open(
        session_id=session_id, epoch=1, prompt_len=3, tokens_left=tokens_left, params=SamplingParams(**params),
        token_ids=np.array(PROMPT, np.int32), speculation=speculation,
    )  # fmt: skip
    assert verifier.handle(message, 0.0) == []


def run(verifier: Verifier) -> dict[int, list[int]]:
    """Step until all work is done. Return the verdicts of each session."""
    texts: dict[int, list[int]] = {i: [] for i in verifier.sessions}
    for _ in range(100):
        if not verifier.has_work:
            return texts
        for message in step(verifier):
            texts[message.session_id] += message.token_ids.tolist()
    raise AssertionError("the sessions never end")


def apart() -> LateEngine:
    """Return an engine whose steps other processes launch."""
    engine = LateEngine()
    engine.is_apart = True
    return engine


NUM_ACTS = 60


def step(verifier: Verifier) -> list[Any]:
    return list(verifier.step(lambda: 0.0))
