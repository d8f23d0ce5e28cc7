"""The torch engine's steps in flight with grammars, on a CPU that takes its tokens from the step before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from specq.engines.native import ForwardOutput
from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.forward import Feed
from specq.grammar import GrammarBuilder
from specq.models import resolve_model
from specq.protocol import Ack, Close, Open, SamplingParams, SessionFailed
from specq.text import TextCodec, load_tokenizer_files
from specq.verification import begun, judge
from specq.verifier import StepCurve, Verifier
from tests.each import each
from tests.verification.begun_rows import BegunRows

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "sex": {"enum": ["f", "m"]},
    },
    "required": ["name", "age", "sex"],
    "additionalProperties": False,
}
GRAMMARS = ({"json_schema": SCHEMA}, {"regex": "[a-z ]{20}"}, None, {"choice": ["yes", "no"]})
CURVE = StepCurve([1, 64], [0.01, 0.02])


class FedByHost:
    """A forward pass on a CPU that takes tokens as a device does."""

    is_fed = True

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, rows: Any, tap: Any = None, feed: Feed | None = None) -> ForwardOutput:
        if feed is not None:
            rows.token_ids[feed.rows] = feed.tokens.numpy()[feed.places]
        output: ForwardOutput = self._inner(rows) if tap is None else self._inner(rows, tap)
        return output._replace(logits=torch.tensor(output.logits))


@pytest.fixture(scope="module")
def model() -> str:
    return resolve_model("tiny", "target")


@pytest.fixture(scope="module")
def builder(model: str) -> Iterator[GrammarBuilder]:
    info = TorchEngine(model, device="cpu", kv_slots=64).info
    found = GrammarBuilder(load_tokenizer_files(model), info.vocab_size, info.eos_ids)
    yield found
    found.close()


def texts(model: str, builder: GrammarBuilder, temperature: float, *, overlaps: bool) -> tuple[dict[int, str], int]:
    """Return the texts of one session for each grammar, and the number of steps in flight behind another."""
    engine, files = TorchEngine(model, device="cpu", kv_slots=4096), load_tokenizer_files(model)
    engine.overlaps = overlaps
    if overlaps:
        engine._forward = FedByHost(engine._forward)
        engine._judge = lambda batch, logits: (begun.begin(batch, logits), 0.0)  # type: ignore[method-assign]
    verifier = Verifier(engine, CURVE, incarnation=1, tokenizer_files=files, grammar_builder=builder)
    codec, found, num_behind = TextCodec(files), dict[int, str](), 0
    for i, grammar in enumerate(GRAMMARS, 1):
        values = {"max_tokens": 40, "temperature": temperature, "seed": i} | ({"grammar": grammar} if grammar else {})
        ids = np.array(codec.encode(f"Person {i}"), np.int32)
        params = SamplingParams.from_dict(values)
        message = Open(session_id=i, epoch=1, prompt_len=len(ids), tokens_left=40, params=params, token_ids=ids)
        assert verifier.handle(message, 0.0) == []
    limit = time.monotonic() + 60
    while verifier.sessions:
        assert time.monotonic() < limit
        assert verifier.take_grammars() == []
        for report in verifier.step(time.monotonic) if verifier.has_work else ():
            assert not isinstance(report, SessionFailed), report.reason
            session = verifier.sessions[report.session_id]
            verifier.handle(Ack(session_id=session.session_id, epoch=1, length=session.length), 0.0)
            if report.finish:
                found[session.session_id] = codec.decode(session.token_ids[session.prompt_len :])
                verifier.handle(Close(session_id=session.session_id, epoch=1), 0.0)
        num_behind += len(verifier.in_flight)
    return found, num_behind


@each("temperature", [0.0, 0.8])
def test_a_step_is_judged_once_its_masks_are_known(
    model: str, builder: GrammarBuilder, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are those without overlap, and steps of sessions with a grammar are in flight behind others."""
    expected, _ = texts(model, builder, temperature, overlaps=False)
    for module in (begun, judge):
        monkeypatch.setattr(module, "target_rows", BegunRows)
    got, num_behind = texts(model, builder, temperature, overlaps=True)
    assert got == expected
    assert num_behind > 20
    assert expected[4] in ("yes", "no")
