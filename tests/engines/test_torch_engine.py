"""The torch engine against transformers: logits of random trees, greedy text, and the KV behind them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from specq.engines.native import ForwardOutput, HostForward
from specq.engines.native.flights import tapped_rows
from specq.engines.native.rows import PackedRows, RowTap
from specq.engines.profiling import REPEATS, step_times, warm_up_steps
from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.generic import GenericForward
from specq.processes.target import prepare_steps
from specq.protocol import FINAL, NO_SCRATCH, NO_TAP, ScratchRows, Tap
from specq.protocol.arrays import Int32Array
from specq.protocol.errors import ConfigError, EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, Judgement, SessionStep, Tree
from specq.testing.checkpoints import (
    CONFIGS,
    VOCAB,
    load_reference,
    make_checkpoint,
    path_tokens,
    random_tokens,
    random_tree,
    reference_logits,
    reference_text,
)
from specq.verification import StepBatch

GREEDY = SamplingParams()
TOLERANCE = 1e-4


@pytest.fixture(params=CONFIGS, scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=[False, True], ids=["kernels", "eager"])
def eager(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Recorder:
    """Stands in for an engine's forward and keeps what came out."""

    def __init__(self, engine: TorchEngine) -> None:
        self.forward = engine._forward
        self.outputs: list[ForwardOutput] = []
        engine._forward = self

    @property
    def kv(self):
        return self.forward.kv

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput:
        output = self.forward(rows, tap)
        self.outputs.append(ForwardOutput(*map(torch.as_tensor, output[:2])))
        return output


def prefill(engine: TorchEngine, session_id: int, token_ids: Int32Array, chunk: int = 10_000) -> None:
    """Open a session and compute all of its context but the last token."""
    start = engine.open(session_id, token_ids)
    while start < len(token_ids) - 1:
        end = min(start + chunk, len(token_ids) - 1)
        step = SessionStep(session_id, start, token_ids[start:end], GREEDY, judged=False)
        assert not engine.step([step]).judgements
        start = end


def decode(engine: TorchEngine, session_id: int, context: list[int], tree: Tree = NO_TREE) -> Judgement:
    """Judge a tree after a context of which all but the last token has KV; extend the context by the outcome."""
    last = np.array(context[-1:], np.int32)
    (judgement,) = engine.step([SessionStep(session_id, len(context) - 1, last, GREEDY, tree)]).judgements
    context.extend(judgement.token_ids.tolist())
    return judgement


def watched(checkpoint: Path, eager: bool, **options: Any) -> tuple[TorchEngine, Recorder]:
    engine = TorchEngine(str(checkpoint), device="cpu", eager=eager, **options)
    return engine, Recorder(engine)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def guess(rng: np.random.Generator, truth: list[int]) -> Tree:
    """A tree around what the target will say: a chain that is right with probability 0.7 a token, and wrong
    siblings."""
    chain = [token if rng.random() < 0.7 else int(rng.integers(VOCAB)) for token in truth[:4]]
    siblings = random_tokens(rng, len(chain))
    parents = [i - 1 for i in range(len(chain))] * 2
    token_ids = np.concatenate([np.array(chain, np.int32), siblings])
    return Tree(token_ids, np.array(parents, np.int32), np.zeros(len(token_ids), np.float32))


def test_kernels_run_what_they_can(checkpoint, eager):
    engine = TorchEngine(str(checkpoint), device="cpu", eager=eager)
    runs_native = not eager and checkpoint.name.rstrip("0") not in ("llama-odd", "opt")
    assert type(engine._forward) is (HostForward if runs_native else GenericForward)


def test_logits_of_random_trees_equal_transformers_on_each_path(checkpoint, eager):
    engine, recorder = watched(checkpoint, eager)
    reference, rng = load_reference(checkpoint), np.random.default_rng(0)
    context = random_tokens(rng, 37)
    prefill(engine, 1, context)
    tree = random_tree(rng, 12)
    decode(engine, 1, context.tolist(), tree)
    logits, hidden, _ = recorder.outputs[-1]
    for row in range(13):
        close(logits[row], reference_logits(reference, context.tolist() + path_tokens(tree, row - 1)))
    close(hidden @ reference.get_output_embeddings().weight.detach().T, logits)


def test_greedy_text_equals_transformers_for_any_draft(checkpoint, eager):
    engine = TorchEngine(str(checkpoint), device="cpu", eager=eager)
    rng = np.random.default_rng(1)
    prompt = random_tokens(rng, 21).tolist()
    expected = reference_text(load_reference(checkpoint), prompt, 48)
    prefill(engine, 1, np.array(prompt, np.int32))
    context, accepted, rejected = list(prompt), 0, 0
    while len(context) < len(prompt) + 40:
        tree = guess(rng, expected[len(context) - len(prompt) :])
        judgement = decode(engine, 1, context, tree)
        accepted += len(judgement.path)
        rejected += len(judgement.path) < 4
    assert context[len(prompt) :][:40] == expected[:40]
    assert accepted > 10
    assert rejected > 3


def test_many_ragged_sessions_in_one_step_equal_each_alone(checkpoint, eager):
    """A prefill chunk, plain rows and trees of all sizes in one pass."""
    rng = np.random.default_rng(2)
    contexts = [random_tokens(rng, length) for length in (2, 5, 18, 33, 64, 7)]
    trees = [random_tree(rng, size) for size in (0, 1, 9, 3, 17, 0)]
    alone = []
    for context, tree in zip(contexts, trees, strict=True):
        engine, recorder = watched(checkpoint, eager, kv_slots=256)
        prefill(engine, 1, context)
        decode(engine, 1, context.tolist(), tree)
        alone.append(recorder.outputs[-1].logits)
    engine, recorder = watched(checkpoint, eager, kv_slots=1024)
    for session_id, context in enumerate(contexts):
        prefill(engine, session_id, context)
    engine.open(99, random_tokens(rng, 40))
    steps = [
        SessionStep(i, len(c) - 1, c[-1:], GREEDY, t) for i, (c, t) in enumerate(zip(contexts, trees, strict=True))
    ]
    steps.insert(3, SessionStep(99, 0, random_tokens(rng, 40)[:30], GREEDY, judged=False))
    judgements = engine.step(steps).judgements
    assert [j.session_id for j in judgements] == list(range(6))
    close(recorder.outputs[-1].logits, torch.cat(alone))


def test_chunked_prefill_gives_the_logits_of_one_pass(llama, eager):
    rng = np.random.default_rng(3)
    context = random_tokens(rng, 150)
    results = []
    for chunk in (1000, 7, 64):
        engine, recorder = watched(llama, eager)
        prefill(engine, 1, context, chunk)
        decode(engine, 1, context.tolist())
        results.append(recorder.outputs[-1].logits)
    for result in results[1:]:
        close(result, results[0])


def test_a_shared_prefix_is_not_computed_again_and_gives_the_same_logits(llama, eager):
    rng = np.random.default_rng(4)
    context = random_tokens(rng, 50)
    engine, recorder = watched(llama, eager)
    prefill(engine, 1, context)
    text = context.tolist()
    for _ in range(20):
        decode(engine, 1, text)
    first = recorder.outputs[-1].logits
    engine.close(1)
    again = np.array(text[:-1], np.int32)
    assert engine.open(2, again) == 64  # 50 + 19 tokens: 4 blocks, the generated part included
    engine.step([SessionStep(2, 64, again[64:], GREEDY)])
    close(recorder.outputs[-1].logits, first)


def test_text_stays_right_when_a_small_pool_evicts(llama, eager):
    """Many sessions one after the other through a pool that holds two of them."""
    rng = np.random.default_rng(5)
    reference = load_reference(llama)
    engine = TorchEngine(str(llama), device="cpu", eager=eager, kv_slots=128)
    prompts = [random_tokens(rng, 40).tolist() for _ in range(3)]
    expected = [reference_text(reference, prompt, 10) for prompt in prompts]
    for turn in range(9):
        text = list(prompts[turn % 3])
        prefill(engine, turn, np.array(text, np.int32))
        while len(text) < 50:
            decode(engine, turn, text, guess(rng, expected[turn % 3][len(text) - 40 :]))
        assert text[40:50] == expected[turn % 3]
        engine.close(turn)
    assert engine.free_slots == 128


def test_a_step_without_room_changes_no_state(llama):
    engine = TorchEngine(str(llama), device="cpu", kv_slots=32)
    context = random_tokens(np.random.default_rng(6), 20)
    prefill(engine, 1, context)
    tree = random_tree(np.random.default_rng(6), 13)
    with pytest.raises(EngineError, match="14 KV slots are needed and 13 of 32 are free"):
        decode(engine, 1, context.tolist(), tree)
    assert engine.free_slots == 13
    decode(engine, 1, context.tolist())


def test_a_failed_forward_pass_changes_no_state(llama, monkeypatch):
    engine = TorchEngine(str(llama), device="cpu")
    context = random_tokens(np.random.default_rng(7), 20)
    prefill(engine, 1, context)
    free, forward = engine.free_slots, engine._forward

    engine._forward = Mock(side_effect=RuntimeError("out of memory"))
    with pytest.raises(RuntimeError):
        decode(engine, 1, context.tolist(), random_tree(np.random.default_rng(7), 5))
    assert engine.free_slots == free
    engine._forward = forward
    decode(engine, 1, context.tolist())


def test_steps_that_do_not_fit_are_refused(llama):
    engine = TorchEngine(str(llama), device="cpu")
    prefill(engine, 1, random_tokens(np.random.default_rng(8), 10))
    for session_id, start, token_ids, said in (
        (1, 5, [1], "the step starts at 5; its KV holds 9 tokens"),
        (2, 0, [1], "session 2 is not open"),
        (1, 9, [], "a step needs a token"),
        (1, 9, [VOCAB], r"token ids outside \[0, 99\)"),
        (1, 9, [-1], r"token ids outside \[0, 99\)"),
        (1, 9, [0] * 592, "601 tokens; .* takes 600"),
    ):
        with pytest.raises(EngineError, match=said):
            engine.step([SessionStep(session_id, start, np.array(token_ids, np.int32), GREEDY)])


def test_a_profiled_step_begins_when_the_device_is_idle(llama, monkeypatch):
    """Else it would be charged with the context before it: before each timed step the engine waits."""
    engine = TorchEngine(str(llama), device="cpu", kv_slots=512)
    seen: list[str] = []
    step = engine.step
    monkeypatch.setattr(engine, "_settle", lambda: seen.append("settled"))
    monkeypatch.setattr(
        engine, "step", lambda steps, *tap: seen.append("timed" if steps[0].judged else "context") or step(steps)
    )
    step_times(engine, [2], engine._settle)
    assert seen == ["context", "settled", "timed"] * REPEATS


@pytest.mark.usefixtures("own_cache")
def test_step_timing_works_in_the_pool_size_of_a_refusal_and_leaves_no_state(llama):
    with pytest.raises(ConfigError, match=r"has 1 KV slots \(--kv-slots\); give at least 2,"):
        TorchEngine(str(llama), device="cpu", kv_slots=1).step_times([1, 8, 64])
    engine = TorchEngine(str(llama), device="cpu", kv_slots=72)
    assert all(seconds > 0 for seconds in engine.step_times([1, 8, 64]))
    assert engine.free_slots == 72


@pytest.mark.usefixtures("own_cache")
def test_times_that_were_kept_are_expected_by_the_next_process(llama):
    kept = {1: 0.5, 8: 1.0, 64: 2.0, 512: 9.0}
    TorchEngine(str(llama), device="cpu", kv_slots=72).keep_times(kept)
    engine = TorchEngine(str(llama), device="cpu", kv_slots=72)
    assert engine.step_times([1, 8, 64, 512]) == [0.5, 1.0, 2.0]
    assert max(engine.step_times([1, 9, 64])) < 0.5, "others are estimated"


def test_steps_with_hidden_states_are_run_before_they_are_needed(llama, monkeypatch):
    """Each size of one session, and of as many as there may be: a GPU records them apart. Nothing is left behind."""
    engine = TorchEngine(str(llama), device="cpu", kv_slots=512)
    seen: list[tuple[int, int]] = []
    step = engine.step

    def noted(steps, tap=NO_TAP):
        output = step(steps, tap)
        if tap.layers:
            assert output.hidden.layers == (0, FINAL)
            seen.append((sum(one.num_rows for one in steps), len(steps)))
        return output

    monkeypatch.setattr(engine, "step", noted)
    warm_up_steps(engine, [1, 3, 40], (0, FINAL), 16)
    assert sorted(seen) == [(1, 1), (3, 1), (3, 3), (40, 1), (40, 16)]
    assert engine.free_slots == engine.info.kv_slots


def test_the_rows_of_a_tap_are_each_steps_last() -> None:
    """Of sessions all of whose rows are wanted, those of others that are judged, and none of the rest; scratch rows
    never."""
    rng = np.random.default_rng(3)
    scratch = ScratchRows(np.zeros(2, np.int32), np.array([-1, 0], np.int32), np.zeros(2, np.int32))
    for _ in range(50):
        steps = [
            SessionStep(
                *(i, 0, np.zeros(rng.integers(1, 5), np.int32), GREEDY),
                tree=random_tree(rng, int(rng.integers(0, 4))) if judged else NO_TREE,
                judged=bool(judged),
                scratch=scratch if judged and rng.random() < 0.3 else NO_SCRATCH,
            )
            for i, judged in enumerate(rng.integers(0, 2, rng.integers(1, 6)))
        ]
        tap = Tap((0,), frozenset(rng.permutation(6)[:3].tolist()))
        rows, starts = tapped_rows(StepBatch.of(steps), tap)
        expected, first = list[list[int]](), 0
        for step in steps:
            end = first + len(step.token_ids) + step.tree.num_nodes
            expected.append(list(range(end - tap.num_rows(step), end)))
            first += step.num_rows
        assert [rows[a:b].tolist() for a, b in pairwise(starts.tolist())] == expected


def test_an_empty_step_is_refused_beside_one_of_two_tokens(llama: Path) -> None:
    """Which together have as many tokens as sessions."""
    engine = TorchEngine(str(llama), dtype="float32", kv_slots=256)
    for session_id in (1, 2):
        engine.open(session_id, np.arange(2, dtype=np.int32))
    before = engine.free_slots
    steps = [SessionStep(i, 0, np.arange(count, dtype=np.int32), GREEDY) for i, count in ((1, 0), (2, 2))]
    with pytest.raises(EngineError, match="a step needs a token"):
        engine.step(steps)
    assert engine.free_slots == before


def test_kv_that_could_not_be_copied_is_copied_with_the_next_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that failed is repeated, and finds what it needs."""
    engine, fresh = (TorchEngine(str(llama), device="cpu", kv_slots=256) for _ in range(2))
    text = random_tokens(np.random.default_rng(3), 40)
    prefill(engine, 1, text)
    start = engine.open(2, text[:30])
    assert start == 29
    copy = engine._forward.kv.copy

    def fails(*_: object) -> None:
        monkeypatch.setattr(type(engine._forward.kv), "copy", lambda self, slots: copy(slots))
        raise RuntimeError("no memory")

    monkeypatch.setattr(type(engine._forward.kv), "copy", fails)
    step = SessionStep(2, start, text[start:30], GREEDY)
    with pytest.raises(RuntimeError):
        engine.step([step])
    (found,) = engine.step([step]).judgements
    prefill(fresh, 2, text[:30])
    (expected,) = fresh.step([step]).judgements
    assert found.token_ids.tolist() == expected.token_ids.tolist()


@pytest.mark.parametrize("layers", [(), (3, 1)])
def test_steps_are_prepared_with_and_without_hidden_states_where_an_engine_records_them(
    llama, layers, monkeypatch
) -> None:
    engine, seen = TorchEngine(str(llama), device="cpu", kv_slots=512), set[tuple[int, ...]]()
    step = engine.step

    def noted(steps, tap=NO_TAP):
        seen.add(tap.layers)
        return step(steps)

    monkeypatch.setattr(engine, "step", noted)
    source: Any = SimpleNamespace(layers=layers)
    prepare_steps(engine, [source], 64, 8)
    assert not seen
    engine.overlaps, engine.jumps = True, (1, 16, 600)
    prepare_steps(engine, [source], 64, 8)
    assert seen == {(), tuple(sorted(layers))}
    assert engine.free_slots == engine.info.kv_slots
