"""The torch engine with a step in flight: the same texts and the same KV as without, on a CPU (where a step is computed
when it is launched) and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specq.engines import tidy
from specq.engines.native import ForwardOutput
from specq.engines.native.rows import LinePlaces, PackedRows, RowTap
from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.forward import Feed
from specq.protocol import NO_TAP
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep
from specq.testing.checkpoints import make_checkpoint
from specq.verification import STRATEGIES, StepBatch
from specq.verification.begun import OwnTokens, says_own
from tests.devices import NEEDS_CUDA
from tests.engines.overlapping import GREEDY, NUM, judge_later, plain, serve

SLOTS = 1500
DEVICES = ["cpu", "cpu as a gpu", pytest.param("cuda", marks=NEEDS_CUDA)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen2", tmp_path_factory.mktemp("qwen2"))


class LateForward:
    """A forward on the CPU that is fed, as those on a GPU are: what the host knows stays as it is."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)

    def __call__(self, rows: PackedRows, tap: RowTap | None = None, feed: Feed | None = None) -> ForwardOutput:
        known = rows.block.copy()
        if feed is not None:
            feed.put(torch.from_numpy(rows.token_ids))
        if feed is not None and feed.lines is not None:
            own = np.diff(rows.extra_starts).nonzero()[0]  # also the rows that the host has read
            places = LinePlaces.of(own, rows.extra_starts[own], rows.extra_starts[own + 1] - rows.extra_starts[own])
            feed.lines.put(torch.from_numpy(rows.extras), torch.from_numpy(rows.slots), places)
        output: ForwardOutput = self._forward(rows, tap)
        rows.block[:] = known
        return ForwardOutput(*(None if part is None else torch.from_numpy(part) for part in output))


def make_engine(checkpoint: Path, device: str, *, overlaps: bool) -> TorchEngine:
    engine = TorchEngine(str(checkpoint), device=device[:4].strip(), dtype="float32", kv_slots=SLOTS)
    if device == "cuda":
        assert engine.overlaps
    if device == "cpu as a gpu":
        engine._forward = LateForward(engine._forward)
        engine._judge = lambda batch, logits: (judge_later(batch, logits), 0.0)  # type: ignore[method-assign]
    engine.overlaps = overlaps
    return engine


@pytest.mark.parametrize("seed", range(3))
def test_texts_are_the_same_with_a_step_in_flight(checkpoint: Path, device: str, seed: int) -> None:
    """Sessions come, stop, wait, are closed and opened again; prompts are computed in parts, and shared."""
    found = [serve(make_engine(checkpoint, device, overlaps=overlaps), seed) for overlaps in (True, False)]
    assert found[0] == found[1]
    assert len(found[0]) == NUM - 2


def test_shared_prefixes_hold_what_was_fed(checkpoint: Path, device: str) -> None:
    """A text that was generated with steps in flight is found again, and goes on as if it had been computed anew."""
    engine, fresh = (make_engine(checkpoint, device, overlaps=True) for _ in range(2))
    text = np.array(serve(engine)[8], np.int32)
    assert engine.open(1, text) >= 16 * ((len(text) - 2) // 16)
    start = engine._pool.length(1)
    fresh.open(1, text)
    (found,) = engine.step([SessionStep(1, start, text[start:], GREEDY)]).judgements
    (expected,) = fresh.step([SessionStep(1, 0, text, GREEDY)]).judgements
    assert found.token_ids.tolist() == expected.token_ids.tolist()


def opened(engine: TorchEngine, count: int) -> None:
    for session_id in range(count):
        engine.open(session_id, np.array([session_id + 1, 2], np.int32))
        engine.step([SessionStep(session_id, 0, np.array([session_id + 1], np.int32), GREEDY, judged=False)])


def test_a_discarded_step_leaves_no_state(checkpoint: Path, device: str) -> None:
    """Neither slots nor tokens; the same step can be launched again."""
    engine = make_engine(checkpoint, device, overlaps=True)
    opened(engine, 2)
    free = engine.free_slots
    first = engine.launch(plain([0, 1], [1, 1], [2, 2]))
    second = engine.launch(plain([1, 0], [2, 2], [9, 9], [1, 0]), NO_TAP, first)
    assert engine.free_slots == free - 4
    second.discard()
    again = engine.launch(plain([1, 0], [2, 2], [9, 9], [1, 0]), NO_TAP, first)
    tokens = [one.token_ids.tolist() for one in first.collect().judgements]
    (of_one, of_zero) = (one.token_ids.tolist() for one in again.collect().judgements)
    other = make_engine(checkpoint, device, overlaps=False)
    opened(other, 2)
    assert [one.token_ids.tolist() for one in other.step(plain([0, 1], [1, 1], [2, 2])).judgements] == tokens
    expected = other.step(plain([0, 1], [2, 2], [tokens[0][0], tokens[1][0]])).judgements
    assert [one.token_ids.tolist() for one in expected] == [of_zero, of_one]
    assert engine.free_slots == free - 4


@pytest.mark.parametrize("are_told", [True, False])
def test_slots_of_a_step_return_to_the_pool_for_the_next_session(checkpoint: Path, device: str, are_told: bool) -> None:
    """A session that is closed, one that goes on, and one that takes the place of the first."""
    engine = make_engine(checkpoint, device, overlaps=True)
    opened(engine, 2)
    first = engine.launch(plain([0, 1], [1, 1], [2, 2])).collect()
    if are_told:
        tidy(engine)
    engine.close(0)
    engine.open(0, np.array([5, 6, 7], np.int32))
    assert (engine._pool.length(0), engine._pool.length(1)) == (0, 2)
    assert engine.free_slots == SLOTS - 2
    found = engine.launch(plain([1], [2], [int(first.judgements[1].token_ids[0])])).collect()
    assert len(found.judgements) == 1
    assert engine.free_slots == SLOTS - 3
    assert engine._pool.token_ids(1).tolist() == [2, 2, int(first.judgements[1].token_ids[0])]


def test_the_kv_in_flight_is_counted(checkpoint: Path, device: str) -> None:
    """A step starts behind the one in flight, and nowhere else."""
    engine = make_engine(checkpoint, device, overlaps=True)
    opened(engine, 1)
    first = engine.launch(plain([0], [1], [2]))
    with pytest.raises(EngineError, match="starts at 1"):
        engine.launch(plain([0], [1], [2]), NO_TAP, first)
    second = engine.launch(plain([0], [2], [9], [0]), NO_TAP, first)
    engine.close(0)
    engine.open(0, np.array([5, 6, 7], np.int32))  # at the same place
    first.collect()
    second.collect()
    assert engine._pool.length(0) == 0
    assert engine.free_slots == SLOTS


# --- parts, on the host -----------------------------------------------------------------------------------------------


def test_a_row_without_a_number_feeds_some_token_and_raises_when_it_is_looked_at() -> None:
    values, ids, fed = torch.tensor([1.0, 5.0, 2.0]), torch.tensor([2, 60, 8]), torch.tensor([2, 0, 8])
    for bad in (5.0, torch.nan, torch.inf, -torch.inf):
        values[1] = bad
        own = OwnTokens(torch.stack((values.view(torch.int32), ids.int(), fed.int())))
        assert own.tokens.tolist() == [2, 0, 8]
        if bad == 5.0:
            assert own.wait().tolist() == [2, 60, 8]
        else:
            with pytest.raises(EngineError, match="not finite"):
                own.wait()


@pytest.mark.parametrize(("places", "rows"), [([0, 1, 2], [0, 1, 2]), ([1, 2], [3, 4]), ([2, 0], [1, 4])])
def test_a_feed_writes_to_its_rows_alone(places: list[int], rows: list[int]) -> None:
    token_ids = torch.full((6,), -1, dtype=torch.int32)
    Feed(torch.tensor([10, 11, 12], dtype=torch.int32), np.array(places), np.array(rows)).put(token_ids)
    expected = [-1] * 6
    for of, row in zip(places, rows, strict=True):
        expected[row] = 10 + of
    assert token_ids.tolist() == expected


def test_what_a_device_can_say_by_itself() -> None:
    """For each strategy, greedy and sampled, with any logits processor."""
    warm = {"temperature": 0.7}
    kinds = [{"strategy": name} | more for name in STRATEGIES for more in ({}, warm)]
    kinds += [warm | {"top_k": 3}, {"logprobs": 0}, {"presence_penalty": 0.1}, {"logit_bias": ((3, 1.0),)}]
    steps = [SessionStep(1, 0, np.array([1], np.int32), SamplingParams(**own)) for own in kinds]
    silent = [step.params for step in steps if not says_own(StepBatch.of([step]))]
    assert [(own.strategy, own.temperature) for own in silent] == [("probabilistic", 0.7), ("greedy", 0.7)]
