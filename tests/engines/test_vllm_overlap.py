"""The vllm engine with a step in flight: the same texts and the same KV as without. On a CPU vLLM's rows take their tokens as they would on a
GPU, from what is judged there, while the host's own books have placeholders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specq.engines.vllm.engine import VllmEngine
from specq.protocol import NO_TAP
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep
from specq.testing.checkpoints import make_checkpoint
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.overlapping import GREEDY, NUM, let_judge, plain, serve

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, vllm_device: str):
    directory: Path = make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))
    made = VllmEngine(
        str(directory), kv_slots=1536, way="sessions", **vllm_arguments(vllm_device) | {"dtype": "float32"}
    )
    yield made
    made.shutdown()


def overlapping(engine: VllmEngine, overlaps: bool) -> VllmEngine:
    """Let steps overlap, or not."""
    engine.overlaps = engine._way.overlaps = overlaps
    let_judge(overlaps, engine._way._core.model_executor.driver_worker)  # type: ignore[attr-defined]
    return engine


@pytest.fixture
def engine(started: VllmEngine):
    """An engine that overlaps, without sessions, and after the test again."""
    yield overlapping(started, True)
    for session_id in range(20):
        started.close(session_id)
    assert started.free_slots == started.info.kv_slots


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_the_same_with_a_step_in_flight(engine: VllmEngine, seed: int) -> None:
    """Sessions come, stop, wait, are closed and opened again; prompts are computed in parts, and shared."""
    found = [serve(overlapping(engine, overlaps), seed) for overlaps in (True, False)]
    assert found[0] == found[1]
    assert len(found[0]) == NUM - 2


def test_shared_prefixes_hold_what_was_fed(engine: VllmEngine) -> None:
    """A text that was generated with steps in flight is found again, and goes on as if it had been computed anew."""
    text = np.array(serve(engine)[8], np.int32)
    num_cached = engine.open(1, text)
    assert num_cached >= 32
    (found,) = engine.step([SessionStep(1, num_cached, text[num_cached:], GREEDY)]).judgements
    engine.close(1)
    assert engine._way._core.scheduler.reset_prefix_cache()  # type: ignore[attr-defined]
    assert engine.open(1, text) == 0
    (expected,) = engine.step([SessionStep(1, 0, text, GREEDY)]).judgements
    assert found.token_ids.tolist() == expected.token_ids.tolist()


def opened(engine: VllmEngine, count: int) -> None:
    for session_id in range(count):
        engine.open(session_id, np.array([session_id + 1, 2], np.int32))
        engine.step([SessionStep(session_id, 0, np.array([session_id + 1], np.int32), GREEDY, judged=False)])


def test_a_step_that_is_discarded_leaves_nothing(engine: VllmEngine) -> None:
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
    """A step starts behind the one in flight, and nowhere else; what it says of a session that was closed is nobody's."""
    opened(engine, 1)
    first = engine.launch(plain([0], [1], [2]))
    with pytest.raises(EngineError, match="starts at 1"):
        engine.launch(plain([0], [1], [2]), NO_TAP, first)
    second = engine.launch(plain([0], [2], [9], [0]), NO_TAP, first)
    engine.close(0)
    engine.open(0, np.array([5, 6, 7], np.int32))  # at the same place
    first.collect()
    second.collect()
    assert engine._way.lengths([0]).tolist() == [0]


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
    """They travel where they are new, or others than in the step before; those of sessions that have ended are forgotten."""
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
    worker = engine._way._core.model_executor.driver_worker.worker  # type: ignore[attr-defined]
    assert [*worker._specq_params.values()] == [GREEDY]
