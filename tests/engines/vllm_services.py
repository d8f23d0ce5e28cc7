"""An engine of real vLLM with steps that overlap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specq.engines.vllm.engine import VllmEngine
from specq.protocol.types import SessionStep
from specq.testing.checkpoints import make_checkpoint
from tests.devices import vllm_arguments
from tests.engines.overlapping import GREEDY, let_judge


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, vllm_device: str):
    directory: Path = make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))
    made = VllmEngine(str(directory), kv_slots=1536, **vllm_arguments(vllm_device) | {"dtype": "float32"})
    yield made
    made.shutdown()


def overlapping(engine: VllmEngine, overlaps: bool) -> VllmEngine:
    """Let steps overlap, or not."""
    engine.overlaps = engine._sessions.overlaps = overlaps
    let_judge(overlaps, engine._sessions._core.model_executor.driver_worker)  # type: ignore[attr-defined]
    return engine


@pytest.fixture
def engine(started: VllmEngine):
    """An engine that overlaps, without sessions, and after the test again."""
    yield overlapping(started, True)
    for session_id in range(20):
        started.close(session_id)
    assert started.free_slots == started.info.kv_slots


def opened(engine: VllmEngine, count: int) -> None:
    for session_id in range(count):
        engine.open(session_id, np.array([session_id + 1, 2], np.int32))
        engine.step([SessionStep(session_id, 0, np.array([session_id + 1], np.int32), GREEDY, judged=False)])
