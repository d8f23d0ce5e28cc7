"""A drafter that reads hidden states of a toy target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specq.protocol import (
    BF16,
    ActivationRequest,
    Float32Array,
    GetActivations,
    Int32Array,
    Open,
    SamplingParams,
)
from specq.testing.toy import ToyEngine, toy_info
from specq.testing.toy_drafters import ToyProposer
from specq.verifier import StepCurve, Verifier

PROMPT = [5, 6, 7]


CURVE = StepCurve([1, 64], [0.005, 0.006])


class ToyReader(ToyProposer):
    """A toy proposer that says nothing of a text of which it has no states, and checks that those it is sent are the
    text's own."""

    def __init__(self, layers: tuple[int, ...] = (0, 1), window: int = 64, form: str = BF16, **options: Any) -> None:
        super().__init__(replace(toy_info(), fingerprint=f"reader {layers} {form}"), **options)
        self.activations, self.width = ActivationRequest(layers, form, window), 3 * len(layers)
        self.rows: dict[
            int, list[tuple[int, Float32Array]]
        ] = {}  # by session: the tokens' places, and the rows before them

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        super().open(session_id, token_ids, params)
        self.rows[session_id] = []

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:
        self.rows[session_id] += [(first + i, row) for i, row in enumerate(states)]

    def knows(self, session_id: int) -> bool:
        return bool(self.rows[session_id])

    def places(self, session_id: int, text: Sequence[int]) -> list[int]:
        """Return the tokens before which rows came, in the order in which they came; fails for rows of another text."""
        for place, row in self.rows[session_id]:
            own = [number for layer in self.activations.layers for number in (layer, place - 1, text[place - 1])]
            tolerance = 0.0 if self.activations.form == BF16 else max(place, 50) / 250
            np.testing.assert_allclose(row, own, atol=tolerance)
        return [place for place, _ in self.rows[session_id]]


# --- what is wrong
# --------------------------------------------------------------------------------------------------------


def open_message(session_id: int, prompt: Sequence[int], max_tokens: int) -> Open:
    return Open(
        session_id=session_id,
        epoch=1,
        prompt_len=len(prompt),
        tokens_left=max_tokens,
        params=SamplingParams(max_tokens=max_tokens),
        token_ids=np.array(prompt, np.int32),
    )


def opened(prompt: Sequence[int] = PROMPT, engine: ToyEngine | None = None, max_tokens: int = 100) -> Verifier:
    """A verifier with one session."""
    verifier = Verifier(engine or ToyEngine(), CURVE, incarnation=1, measures_drafts=False)
    verifier.handle(open_message(1, prompt, max_tokens), 0.0)
    return verifier


def ask(session_id: int = 1, layers: tuple[int, ...] = (0, 1), window: int = 64, epoch: int = 1) -> GetActivations:
    return GetActivations(
        session_id=session_id, epoch=epoch, lane=0, tap_layers=layers, tap_form=BF16, tap_window=window
    )
