"""Steps of several sessions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specq.protocol.messages import Open, SessionFailed, Verdict
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve

NUM = 8


LENGTH = 12


Steps = Sequence[SessionStep]


def make_verifier(engine: Any, **options: Any) -> Verifier:
    return Verifier(engine, StepCurve([1, 64], [0.001, 0.002]), incarnation=1, **options)


def open_all(verifier: Verifier, prompts: Sequence[Sequence[int]], **params: Any) -> None:
    for i, prompt in enumerate(prompts):
        message = Open(
            session_id=i, epoch=1, prompt_len=len(prompt), tokens_left=LENGTH,
            params=SamplingParams(max_tokens=LENGTH, **params), token_ids=np.array(prompt, np.int32),
        )  # fmt: skip
        assert verifier.handle(message, 0.0) == []


def run(verifier: Verifier, act: Callable[[], object] = bool) -> tuple[dict[int, list[int]], dict[int, SessionFailed]]:
    """Step until all work is done. Return the texts and the failures."""
    texts: dict[int, list[int]] = {i: [] for i in verifier.sessions}
    failed: dict[int, SessionFailed] = {}
    for _ in range(10 * LENGTH):
        if not verifier.has_work:
            return texts, failed
        act()
        for message in verifier.step(lambda: 0.0):
            if isinstance(message, SessionFailed):
                assert message.session_id not in failed
                failed[message.session_id] = message
            else:
                assert isinstance(message, Verdict)
                texts[message.session_id] += message.token_ids.tolist()
    raise AssertionError("the sessions never end")
