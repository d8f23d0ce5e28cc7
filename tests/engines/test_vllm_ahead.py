"""Blocks of KV that the vllm engine allocates before sessions need them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specq.engines.room import BLOCKS_AHEAD, free_slots
from specq.engines.vllm.engine import VllmEngine
from specq.testing.checkpoints import load_reference, make_checkpoint, random_tokens, reference_text
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.test_vllm import Text, chain, run

pytestmark = NEEDS_VLLM
NUM = 40
KV_SLOTS = 8192


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def started(directory: Path, vllm_device: str) -> Iterator[VllmEngine]:
    made = VllmEngine(str(directory), kv_slots=KV_SLOTS, max_step_rows=2048, **vllm_arguments(vllm_device))
    yield made
    made.shutdown()


@pytest.fixture
def engine(started: VllmEngine) -> Iterator[VllmEngine]:
    """An engine without sessions. After the test all its KV is free again."""
    yield started
    for session_id in range(NUM):
        started.close(session_id)
    assert started.free_slots == started.info.kv_slots == KV_SLOTS
    assert started._sessions._core.scheduler.reset_prefix_cache()  # type: ignore[attr-defined]


def opened(engine: VllmEngine, lengths: list[int]) -> dict[int, Text]:
    """Open sessions with prompts of these lengths."""
    rng = np.random.default_rng(sum(lengths))
    texts = {i: Text(i, random_tokens(rng, length).tolist()) for i, length in enumerate(lengths)}
    for i, text in texts.items():
        text.kv_len = engine.open(i, np.array(text.prompt, np.int32))
    return texts


def decode(engine: VllmEngine, texts: dict[int, Text], most: int = 10_000) -> None:
    run(engine, [text.step(most=most) for text in texts.values()], texts)


def num_blocks(engine: VllmEngine, session_id: int) -> int:
    """Return how many blocks vLLM holds for a session."""
    sessions: Any = engine._sessions
    holding = sessions._held[int(sessions._table.find([session_id])[0])]
    (blocks,) = sessions._scheduler.kv_cache_manager.get_blocks(holding.request.request_id).blocks
    return len(blocks)


def num_ahead(engine: VllmEngine, texts: dict[int, Text]) -> list[int]:
    """Return how many blocks beyond its tokens each session holds."""
    return [num_blocks(engine, i) - -(-text.kv_len // engine._block_slots) for i, text in texts.items()]


def counted(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list whose last number counts the sessions that the engine allocates for from now on."""
    counts, allocate = [0], engine._sessions._scheduler.allocate

    def noted(*given: Any) -> None:
        counts[-1] += 1
        allocate(*given)

    monkeypatch.setattr(engine._sessions._scheduler, "allocate", noted)
    return counts


def test_blocks_of_equal_sessions_are_spread_over_steps(
    engine: VllmEngine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the prompts, a step allocates at most about as many blocks as sessions fill in a step."""
    counts = counted(engine, monkeypatch)
    num, size = 24, engine._block_slots
    texts = opened(engine, [size + 2] * num)
    for _ in range(3 * size):
        decode(engine, texts)
        counts.append(0)
        assert set(num_ahead(engine, texts)) <= {0, 1, BLOCKS_AHEAD}
    assert counts[0] == num
    assert max(counts[1:]) <= -(-num // size)
    assert sum(counts[1:]) >= 3 * num // BLOCKS_AHEAD
    reference = load_reference(directory)
    for text in list(texts.values())[::13]:
        assert text.said == reference_text(reference, text.prompt, 3 * size)


def test_a_step_with_blocks_that_are_needed_takes_none_ahead(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = engine._block_slots
    texts = opened(engine, [size] * 2 + [size - 10] * 10)
    decode(engine, texts)
    counts = counted(engine, monkeypatch)
    decode(engine, texts)
    assert counts == [2]
    assert not any(num_ahead(engine, texts))


def test_free_slots_count_blocks_ahead_as_room_of_their_sessions(engine: VllmEngine) -> None:
    """Counted from vLLM's own lists, after plain steps, rejected drafts and closed sessions."""
    size, seen = engine._block_slots, set[int]()
    texts = opened(engine, [5 + 7 * i for i in range(12)])

    def check() -> None:
        seen.update(num_ahead(engine, texts))
        held = {i: num_blocks(engine, i) for i in texts}
        slacks = np.array([size * held[i] - text.kv_len for i, text in texts.items()], np.intp)
        assert engine.free_slots == free_slots(KV_SLOTS // size - sum(held.values()), size, slacks)

    for turn in range(2 * size):
        decode(engine, texts)
        check()
        if turn % 5 == 0:
            run(engine, [text.step(chain([1, 2, 3, 4])) for text in texts.values()], texts)
            check()
        if turn % 8 == 7:
            engine.close(min(texts))
            del texts[min(texts)]
            check()
    assert {0, BLOCKS_AHEAD} <= seen


def test_blocks_that_are_promised_are_not_taken(engine: VllmEngine) -> None:
    """What open sessions have not computed yet always fits, with one more context of any length."""
    texts = opened(engine, [3] * 25)  # which fill no block here
    decode(engine, texts)
    took = list[bool]()
    for turn, session_id in enumerate(range(len(texts), len(texts) + 12)):
        waiting = random_tokens(np.random.default_rng(turn), 590)
        engine.open(session_id, waiting)
        before = sum(num_ahead(engine, texts))
        decode(engine, texts)
        took.append(sum(num_ahead(engine, texts)) > before)
        promised = len(texts) + (turn + 1) * len(waiting) + engine.info.max_length
        assert engine.free_slots >= promised or not took[-1]
    assert took[0]
    assert took == sorted(took, reverse=True)
    assert not took[-1]


def test_the_last_whole_block_of_a_closed_session_is_shared(engine: VllmEngine) -> None:
    """Also if its session got the next block before it filled this one, and no further one since."""
    size = engine._block_slots
    texts = opened(engine, [size - 2] * 3)
    for _ in range(3):
        decode(engine, texts)
    assert num_ahead(engine, texts) == [BLOCKS_AHEAD, BLOCKS_AHEAD, 0]
    decode(engine, texts)
    for i, text in texts.items():
        assert text.kv_len == size + 1
        engine.close(i)
        assert engine.open(i, np.array(text.tokens, np.int32)) == size
