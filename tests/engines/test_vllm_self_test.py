"""The self-test of a vLLM version that was not tested: passed by an engine that is right, and failed by each that is
not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from specq.engines.torch.engine import TorchEngine
from specq.engines.vllm import versions
from specq.engines.vllm.engine import VllmEngine
from specq.engines.vllm.self_test import DEPTH, _compare, _Decoded, check_drafts
from specq.protocol import NO_TREE, ConfigError, EngineError, Judgement, SessionStep, StepOutput
from specq.testing.checkpoints import VOCAB, make_checkpoint
from tests.devices import NEEDS_VLLM, vllm_arguments


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


Change = Callable[[SessionStep, Judgement], Judgement]


class Changed:
    """An engine whose judgements are changed."""

    def __init__(self, engine: TorchEngine, change: Change) -> None:
        self._engine, self._change = engine, change
        self.num_drafts: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, steps: Sequence[SessionStep]) -> StepOutput:
        self.num_drafts += [step.tree.num_nodes for step in steps]
        pairs = zip(steps, self._engine.step(steps).judgements, strict=True)
        return StepOutput([self._change(step, judgement) for step, judgement in pairs])


def with_last(judgement: Judgement, token_id: int) -> Judgement:
    return replace(judgement, token_ids=np.array([*judgement.token_ids[:-1], token_id], np.int32))


def other_behind_accepted(step: SessionStep, judgement: Judgement) -> Judgement:
    return with_last(judgement, (judgement.token_ids[-1] + 7) % VOCAB) if judgement.path else judgement


def wrong_is_taken(step: SessionStep, judgement: Judgement) -> Judgement:
    is_rejected = len(judgement.path) < step.tree.num_nodes
    return with_last(judgement, step.tree.token_ids[len(judgement.path)]) if is_rejected else judgement


def as_it_is(step: SessionStep, judgement: Judgement) -> Judgement:
    return judgement


def test_an_engine_that_is_right_passes(directory):
    engine = Changed(TorchEngine(str(directory), device="cpu", kv_slots=256), as_it_is)
    check_drafts(engine, 64)
    assert sum(count == DEPTH for count in engine.num_drafts) > 3
    assert engine.free_slots == engine.info.kv_slots
    check_drafts(engine, 1)


@pytest.mark.parametrize("change", [other_behind_accepted, wrong_is_taken], ids=lambda change: change.__name__)
def test_a_text_that_drafts_change_is_refused(directory, change):
    engine = Changed(TorchEngine(str(directory), device="cpu", kv_slots=256), change)
    with pytest.raises(EngineError, match="with drafts, token"):
        check_drafts(engine, 64)


def test_only_a_token_that_was_nearly_as_likely_may_differ():
    prompt = np.zeros(1, np.int32)
    expected = _Decoded(prompt, said=[1, 2, 3], near_ties=[-1, 9, -1])
    _compare(expected, _Decoded(prompt, said=[1, 9, 4]))  # what follows is another text
    for said in ([1, 8, 3], [7, 2, 3]):
        with pytest.raises(EngineError, match="with drafts, token"):
            _compare(expected, _Decoded(prompt, said=said))


class Ignoring(Changed):
    def step(self, steps: Sequence[SessionStep]) -> StepOutput:
        return self._engine.step([replace(step, tree=NO_TREE) for step in steps])


def test_an_engine_that_takes_no_draft_is_refused(directory):
    engine = Ignoring(TorchEngine(str(directory), device="cpu", kv_slots=256), as_it_is)
    with pytest.raises(EngineError, match="correct drafts are rejected"):
        check_drafts(engine, 64)


@NEEDS_VLLM[0]
@NEEDS_VLLM[1]
def test_an_untested_version_starts_if_it_passes_and_is_refused_if_not(directory, vllm_device, monkeypatch):
    monkeypatch.setattr(versions, "TESTED", ("0.1.0",))
    with structlog.testing.capture_logs() as logs:
        VllmEngine(str(directory), kv_slots=512, **vllm_arguments(vllm_device)).shutdown()
    assert "untested_vllm_detected" in [entry["event"] for entry in logs]

    def fail(*_arguments: Any) -> None:
        raise EngineError("with drafts, token 3 is 1 and not 2")

    monkeypatch.setattr("specq.engines.vllm.engine.check_drafts", fail)
    with pytest.raises(
        ConfigError, match=r"was not tested with specq.* token 3 is 1 and not 2; install one of 0\.1\.0"
    ):
        VllmEngine(str(directory), kv_slots=512, **vllm_arguments(vllm_device))
