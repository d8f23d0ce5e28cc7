"""The vllm engine with a step in flight: the same texts and the same KV as without. On a CPU vLLM's rows take their
tokens as they would on a GPU, from what is judged there, while the host's own books have placeholders."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from specq.engines.vllm.engine import VllmEngine
from specq.grammar import StepMasks
from specq.protocol import NO_TAP
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep
from specq.verification import StepBatch
from tests.devices import NEEDS_VLLM
from tests.engines.overlapping import GREEDY, NUM, counted, plain, serve
from tests.engines.vllm_services import engine, opened, overlapping, started

__all__ = ["engine", "started"]  # fixtures


pytestmark = NEEDS_VLLM


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_texts_are_the_same_with_a_step_in_flight(
    engine: VllmEngine, seed: int, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions come, stop, wait, are closed and opened again, with up to three steps in flight as where worker
    processes launch them; prompts are computed in parts, and shared."""
    monkeypatch.setattr(engine, "is_apart", is_apart)
    in_flight = counted(engine)
    found = [serve(overlapping(engine, overlaps), seed) for overlaps in (True, False)]
    assert found[0] == found[1]
    assert max(in_flight) == (3 if is_apart else 2)
    assert len(found[0]) == NUM - 2


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("grammar", ['{"regex":"([a-z ]|[0-9]{3})*"}', '{"json_object":true}'])
def test_texts_with_grammars_are_the_same_with_a_step_in_flight(
    engine: VllmEngine, grammar: str, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a step is launched before its masks are known, and judged when they are."""
    late, judge = list[int](), engine._sessions._judge_late
    monkeypatch.setattr(engine._sessions, "is_apart", is_apart)
    monkeypatch.setattr(engine, "is_apart", is_apart)
    monkeypatch.setattr(engine._sessions, "_judge_late", lambda *given: (late.append(1), judge(*given))[1])
    found = [serve(overlapping(engine, overlaps), 0, 0.0, grammar) for overlaps in (True, False)]
    assert found[0] == found[1]
    assert len(late) > 20


def test_a_step_whose_masks_fail_is_repeated(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is judged no more than once, so it leaves nothing in flight."""
    expected = serve(overlapping(engine, False), 0, 0.0, '{"json_object":true}')
    calls, of = itertools.count(1), StepMasks.of

    def failing(masks: StepMasks, judged: StepBatch) -> Any:
        if masks._whole is None and next(calls) % 5 == 0:
            raise MemoryError
        return of(masks, judged)

    monkeypatch.setattr(engine._sessions, "is_apart", True)
    monkeypatch.setattr(StepMasks, "of", failing)
    assert serve(overlapping(engine, True), 0, 0.0, '{"json_object":true}') == expected
    assert next(calls) > 20


def test_shared_prefixes_hold_what_was_fed(engine: VllmEngine) -> None:
    """A text that was generated with steps in flight is found again, and goes on as if it had been computed anew."""
    text = np.array(serve(engine)[8], np.int32)
    num_cached = engine.open(1, text)
    assert num_cached >= 32
    (found,) = engine.step([SessionStep(1, num_cached, text[num_cached:], GREEDY)]).judgements
    engine.close(1)
    assert engine._sessions._core.scheduler.reset_prefix_cache()  # type: ignore[attr-defined]
    assert engine.open(1, text) == 0
    (expected,) = engine.step([SessionStep(1, 0, text, GREEDY)]).judgements
    assert found.token_ids.tolist() == expected.token_ids.tolist()


def test_a_discarded_step_leaves_no_state(engine: VllmEngine) -> None:
    """The same step can be launched again, and says what steps one after the other say."""
    opened(engine, 2)
    first = engine.launch(plain([0, 1], [1, 1], [2, 2]))
    assert first.feeds
    second = engine.launch(plain([1, 0], [2, 2], [9, 9], [1, 0]), NO_TAP, first)
    second.discard()
    again = engine.launch(plain([1, 0], [2, 2], [9, 9], [1, 0]), NO_TAP, first)
    tokens = [one.token_ids.tolist() for one in first.collect().judgements]
    (of_one, of_zero) = (one.token_ids.tolist() for one in again.collect().judgements)
    for session_id in (0, 1):
        engine.close(session_id)
    opened(overlapping(engine, False), 2)
    assert [one.token_ids.tolist() for one in engine.step(plain([0, 1], [1, 1], [2, 2])).judgements] == tokens
    expected = engine.step(plain([0, 1], [2, 2], [tokens[0][0], tokens[1][0]])).judgements
    assert [one.token_ids.tolist() for one in expected] == [of_zero, of_one]


def test_the_kv_in_flight_is_counted(engine: VllmEngine) -> None:
    """A step starts only behind the one in flight. Its output for a closed session is discarded."""
    opened(engine, 1)
    first = engine.launch(plain([0], [1], [2]))
    with pytest.raises(EngineError, match="starts at 1"):
        engine.launch(plain([0], [1], [2]), NO_TAP, first)
    second = engine.launch(plain([0], [2], [9], [0]), NO_TAP, first)
    engine.close(0)
    engine.open(0, np.array([5, 6, 7], np.int32))  # at the same place
    first.collect()
    second.collect()
    assert engine._sessions.lengths([0]).tolist() == [0]


@pytest.mark.parametrize(
    ("params", "feeds"), [({"logprobs": 2}, True), ({"strategy": "probabilistic", "temperature": 0.8}, False)]
)
def test_what_the_host_must_judge_is_not_fed(engine: VllmEngine, params: dict[str, Any], feeds: bool) -> None:
    """A step that says other tokens than the target's own feeds none; log-probabilities are the device's work."""
    opened(engine, 1)
    step = SessionStep(0, 1, np.array([2], np.int32), SamplingParams(**params))
    launched = engine.launch([step])
    assert launched.feeds == feeds
    (found,) = launched.collect().judgements
    assert (found.logprobs is not None) == ("logprobs" in params)


def test_workers_know_the_parameters_of_each_session_and_no_others(engine: VllmEngine) -> None:
    """They travel where they are new, or others than in the step before; those of sessions that have ended are
    forgotten."""
    biased, other = SamplingParams(logit_bias=((7, 100.0),)), SamplingParams(logit_bias=((9, 100.0),))
    opened(overlapping(engine, False), 2)
    said, known = list[list[int]](), np.array([1, 1])
    tokens = np.array([2, 2], np.int32)
    for own in ([biased, other], [biased, biased], [other, biased]):
        steps = [SessionStep(i, int(known[i]), tokens[i : i + 1], own[i]) for i in (0, 1)]
        tokens = np.array([one.token_ids[0] for one in engine.step(steps).judgements], np.int32)
        said.append(tokens.tolist())
        known += 1
    assert said == [[7, 9], [7, 7], [9, 7]]
    engine.close(0)
    engine.step([SessionStep(1, 4, tokens[1:], GREEDY)])
    worker = engine._sessions._core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    assert [*worker.specq_steps._latest._params.values()] == [GREEDY]
