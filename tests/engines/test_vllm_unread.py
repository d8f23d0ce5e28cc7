"""The vllm engine with drafted tokens that the host has not read when a step is launched: the same texts as without
drafts. On a CPU the chains are there at once, and are read late, and rows take their tokens as they would on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specq.engines.vllm.engine import VllmEngine
from specq.engines.vllm.padding import graphs_up_to
from specq.protocol.errors import SpecqError
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep, Tree
from specq.testing.checkpoints import make_checkpoint
from specq.verification import DeviceTokens, StepBatch, handles
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.overlapping import let_judge
from tests.engines.test_unread_chains import make_drafter, other_places, serve

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(checkpoint: Path, vllm_device: str) -> Iterator[VllmEngine]:
    arguments = vllm_arguments(vllm_device) | {"dtype": "float32"}
    made = VllmEngine(str(checkpoint), kv_slots=1536, **arguments)
    yield made
    made.shutdown()


def as_on_a_gpu(engine: VllmEngine, overlaps: bool) -> VllmEngine:
    """Let steps overlap and take unread drafts, or not."""
    engine.overlaps = engine.takes_unread = engine._sessions.overlaps = overlaps
    let_judge(overlaps, engine._sessions._core.model_executor.driver_worker)  # type: ignore[attr-defined]
    return engine


@pytest.fixture(scope="module")
def own_texts(engine: VllmEngine) -> Callable[[int], dict[int, list[int]]]:
    """What the target says without drafts, by seed."""
    known: dict[int, dict[int, list[int]]] = {}

    def found(seed: int) -> dict[int, list[int]]:
        if seed not in known:
            known[seed] = serve(as_on_a_gpu(engine, False), None, seed)
        return known[seed]

    return found


def check(
    engine: VllmEngine,
    own_texts: Callable[[int], dict[int, list[int]]],
    checkpoint: Path,
    device: str,
    seed: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Assert that texts are the target's own, and that drafts were accepted unread."""
    drafter, accepted = (
        make_drafter(checkpoint, "cuda" if device == "cuda" else "cpu as a gpu", seed, width),
        list[int](),
    )
    way: Any = as_on_a_gpu(engine, True)._sessions
    collect = way._collect

    def noted(flight: Any) -> Any:
        output = collect(flight)
        if flight.batch.drafted is not None:
            accepted.append(int((output.judgements.num_tokens - 1).sum()))
        return output

    with monkeypatch.context() as patch:
        patch.setattr(way, "_collect", noted)
        assert serve(engine, drafter, seed) == own_texts(seed)
    chains: Any = drafter.chains
    assert chains.num_unread > 5
    assert sum(accepted) > 5


@pytest.mark.parametrize(("seed", "width", "is_even"), [(0, 1, False), (1, 3, True), (2, 2, True)])
def test_texts_are_the_targets_own(
    engine: VllmEngine,
    own_texts: Any,
    checkpoint: Path,
    vllm_device: str,
    seed: int,
    width: int,
    is_even: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Right and partly wrong chains. Sessions come, stop, close and reopen. With padding rows, and without."""
    if is_even:
        monkeypatch.setattr(engine._sessions, "_graphs", graphs_up_to(512, 64))
    check(engine, own_texts, checkpoint, vllm_device, seed, width, monkeypatch)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rows are fed with other tokens": lambda patch: patch.setattr(
        "specq.engines.vllm.patches.token_injection.places_of", other_places
    ),
    "rows are fed with none": lambda patch: patch.setattr(
        "specq.engines.vllm.patches.token_injection.is_handle", lambda tokens: np.zeros(len(tokens), np.bool_)
    ),
    "handles are judged": lambda patch: patch.setattr(StepBatch, "known", lambda self: self),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_the_check_finds(
    engine: VllmEngine, own_texts: Any, checkpoint: Path, vllm_device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above is worth: each of these mistakes is seen."""
    own_texts(0)
    try:
        with monkeypatch.context() as patch:
            MUTANTS[name](patch)
            with pytest.raises((AssertionError, SpecqError)):
                check(engine, own_texts, checkpoint, vllm_device, 0, 1, patch)
    finally:
        for session_id in range(20):
            engine.close(session_id)


def test_a_handle_for_a_token_that_was_read_is_judged_as_that_token(engine: VllmEngine) -> None:
    """A step that is repeated has drafts that the host knows by then."""
    as_on_a_gpu(engine, True)
    said = []
    for values in (None, np.array([7, 9], np.int32)):
        start = engine.open(15, np.array([3, 4, 5], np.int32))
        tree = Tree(
            handles(np.array([1, 0])) if values is not None else np.array([9, 7], np.int32),
            np.array([-1, 0], np.int32),
            np.zeros(2, np.float32),
        )
        batch = StepBatch.of([SessionStep(15, start, np.array([3, 4, 5], np.int32)[start:], SamplingParams(), tree)])
        batch.drafted = None if values is None else DeviceTokens(None, values)
        (found,) = engine.launch(batch).collect().judgements
        said.append(found.token_ids.tolist())
        engine.close(15)
    assert said[0] == said[1]
