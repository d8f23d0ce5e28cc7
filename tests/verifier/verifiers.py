"""A verifier with a toy target, and drafts for it."""

import numpy as np

from specq.protocol.messages import (
    Draft,
    Open,
)
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.toy import ToyEngine
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve

PROMPT = [5, 6, 7]


def make_verifier(engine: ToyEngine | None = None, **options: object) -> Verifier:
    """Return a verifier with a toy engine."""
    return Verifier(engine or ToyEngine(), StepCurve([1, 64], [0.005, 0.01]), incarnation=1, **options)


def open_session(
    verifier: Verifier,
    session_id: int = 7,
    epoch: int = 1,
    tokens_left: int = 50,
    mode: str = "async",
    **params: object,
) -> list:
    """Open a session of three context tokens; return the answer."""
    message = Open(
        session_id=session_id, epoch=epoch, prompt_len=3, tokens_left=tokens_left, params=SamplingParams(**params),
        speculation=Speculation(mode=mode), token_ids=np.array(PROMPT, np.int32),
    )  # fmt: skip
    return verifier.handle(message, 0.0)


def step(verifier: Verifier) -> list:
    return verifier.step(lambda: 0.0)


def chain(tokens: list[int], *, base_len: int = 3, scores: list[float] | None = None, **changes: object) -> Draft:
    """Return a draft of a chain."""
    fields = {
        "session_id": 7, "epoch": 1, "lane": 0, "base_len": base_len, "first_id": 0,
        "token_ids": np.array(tokens, np.int32), "parent_ids": np.arange(len(tokens), dtype=np.int32) - 1,
        "scores": np.array(scores or [-0.1] * len(tokens), np.float16),
    }  # fmt: skip
    return Draft(**(fields | changes))  # type: ignore[arg-type]
