"""Steps with drafts that have a whole CUDA graph: which have one, and that padding rows change no text.
Graphs need a GPU (`test_vllm_graphs.py`); which one a step takes, and the rows, do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specq.engines.profiling import step_times
from specq.engines.vllm.engine import VllmEngine
from specq.engines.vllm.padding import LENGTHS, MOST_MORE_ROWS, even_length, graph_rows, graphs_up_to, mixed_up_to
from specq.engines.vllm.rows import judged_rows
from specq.engines.vllm.step_delta import StepDelta
from specq.protocol import NO_TAP, Draft, Open, SamplingParams, SessionStep, StepOutput, Tap, Verdict
from specq.testing.checkpoints import VOCAB, load_reference, make_checkpoint, random_tokens, reference_text
from specq.testing.toy import ToyEngine, toy_info
from specq.verification import StepBatch
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.session import Session
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.test_vllm import Text, chain, guess, run
from tests.engines.test_vllm_arrays import random_step

GRAPHS = graphs_up_to(512, 64)
NUM_TOKENS = 40


def drafted(lengths: list[int], num_tokens: int = 1, *, judged: bool = True) -> StepBatch:
    """A step of sessions with chains of so many nodes; the last has so many tokens before them."""
    steps = []
    for i, count in enumerate(lengths):
        is_last = i == len(lengths) - 1
        tokens = np.zeros(num_tokens if is_last else 1, np.int32)
        steps.append(SessionStep(i, 9, tokens, SamplingParams(), chain([1] * count), judged=judged or not is_last))
    return StepBatch.of(steps)


# --- which steps ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "even"),
    [
        ([0, 0], 0),
        ([1], 2),
        ([1, 0], 2),
        ([4, 4, 4], 5),
        ([5, 5, 5], 6),
        ([6, 5, 6], 8),
        ([16], 17),
        ([16] * 24, 17),
        ([16] * 25, 0),  # 32 sessions would have 544 rows
        ([3] * 64, 4),
        ([3] * 63 + [0], 4),
        ([7] + [0] * 30, 8),  # 38 rows are 256
        ([11] + [0] * 30, 0),  # 42 would be 384
        ([3] * 64 + [4], 0),  # a graph for 65 sessions is not there
    ],
)
def test_a_step_is_made_even_where_that_costs_little(lengths: list[int], even: int) -> None:
    found = even_length(drafted(lengths), GRAPHS)
    assert found == even
    if found:
        assert found > max(lengths)
        assert graph_rows(GRAPHS[found], found, len(lengths)) <= MOST_MORE_ROWS + sum(count + 1 for count in lengths)


def test_prompts_are_never_made_even() -> None:
    assert even_length(drafted([2, 2]), GRAPHS) == 3
    assert even_length(drafted([2, 2], num_tokens=2), GRAPHS) == 0
    assert even_length(drafted([2, 0], judged=False), GRAPHS) == 0
    assert even_length(drafted([2, 2]), {}) == 0


def test_graphs_are_as_large_as_steps_may_be() -> None:
    found = graphs_up_to(512, 100)
    assert tuple(found) == LENGTHS
    assert all(length * count <= 512 for length, counts in found.items() for count in counts)
    assert found[5][-1] == 100
    assert found[17][-1] == 24
    assert graphs_up_to(4, 100) == {2: (1, 2), 3: (1,), 4: (1,)}
    assert graphs_up_to(0, 100) == {}


@pytest.mark.parametrize(
    ("most_rows", "expected"), [(0, ()), (3, (3,)), (20, (4, 8, 16, 20)), (32, (4, 8, 16, 24, 32))]
)
def test_mixed_graphs_are_as_large_as_steps_may_be(most_rows: int, expected: tuple[int, ...]) -> None:
    assert mixed_up_to(most_rows) == expected
    assert mixed_up_to(4096) == mixed_up_to(1024)
    assert mixed_up_to(1024)[-1] == 1024


@pytest.mark.parametrize("seed", range(20))
def test_padding_rows_are_not_judged(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = [random_step(rng, 100 + i, 5) for i in range(int(rng.integers(1, 12)))]
    batch, order = StepBatch.of(steps), rng.permutation(len(steps)).astype(np.intp)
    if seed % 2:
        order.sort()
    even = 1 + max(step.tree.num_nodes for step in steps) + seed % 3
    logits = [(steps[i].session_id, row) for i in order for row in range(even)]
    rows = judged_rows(batch, order, even)
    wanted = [(s.session_id, row) for s in steps if s.judged for row in range(s.tree.num_nodes + 1)]
    assert (logits if rows is None else [logits[i] for i in rows]) == wanted


class Recording(ToyEngine):
    """Notes how many rows each session has in steps that are judged."""

    def __init__(self, kv_slots: int) -> None:
        super().__init__(toy_info(kv_slots=kv_slots), max_chain=16)
        self.rows_each: dict[int, list[int]] = {}

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        if steps[0].judged:
            self.rows_each[sum(step.num_rows for step in steps)] = [step.num_rows for step in steps]
        return super().step(steps, tap)


@pytest.mark.parametrize(
    ("most_each", "kv_slots", "most_sessions", "counts"),
    [
        (4, 1 << 16, 256, {1: 1, 8: 8, 96: 24, 256: 32}),
        (4, 1 << 16, 16, {1: 1, 8: 8, 96: 16, 256: 16}),
        (4, 640, 256, {1: 1, 8: 8, 96: 20, 256: 20}),
        (0, 1 << 16, 256, {1: 1, 8: 8, 96: 8, 256: 8}),
    ],
)
def test_large_steps_are_measured_with_as_many_sessions_as_there_is_room_for(
    most_each: int, kv_slots: int, most_sessions: int, counts: dict[int, int]
) -> None:
    """So that each has few rows; also those that compute what stands before have no more rows than the largest."""
    engine = Recording(kv_slots)
    step_times(engine, list(counts), most_sessions=most_sessions, block_slots=16, most_each=most_each)
    assert {size: len(rows) for size, rows in engine.rows_each.items()} == counts
    assert max(engine.num_rows) <= max(counts)


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama-bf16", tmp_path_factory.mktemp("llama"))


class Launches(list[int]):
    """The rows of each session in steps of an engine, those with graphs on a GPU; 0: as many as were asked for."""

    def __init__(self, engine: VllmEngine) -> None:
        super().__init__()
        workers: Any = engine._sessions._workers  # type: ignore[attr-defined]
        launch = workers.launch

        def noted(delta: StepDelta) -> None:
            self.append(delta.even_length)
            launch(delta)

        workers.launch = noted


def even_engine(directory: Path, device: str, **options: Any) -> tuple[VllmEngine, Launches]:
    """Return an engine that evens steps out as on a GPU, whether it has graphs or not."""
    made = VllmEngine(str(directory), **vllm_arguments(device) | options)
    made._sessions._graphs = GRAPHS  # type: ignore[attr-defined]
    return made, Launches(made)


def open_all(engine: VllmEngine, prompts: list[list[int]], params: SamplingParams | None = None) -> dict[int, Text]:
    """Open sessions and compute their prompts but for the last token."""
    texts = {i: Text(i, prompt, params or SamplingParams()) for i, prompt in enumerate(prompts)}
    for i, text in texts.items():
        text.kv_len = engine.open(i, np.array(text.prompt, np.int32))
        most = len(text.prompt) - 1 - text.kv_len
        if most:
            run(engine, [text.step(most=most)], texts)
    return texts


@pytest.mark.vllm
@NEEDS_VLLM[1]
def test_padding_does_not_change_greedy_texts(directory: Path, vllm_device: str) -> None:
    """Ten sessions, some in each step, chains of 0 to 7 tokens, right and wrong: most steps have padding rows."""
    rng, reference = np.random.default_rng(0), load_reference(directory)
    engine, launches = even_engine(directory, vllm_device, kv_slots=2048)
    prompts = [random_tokens(rng, int(count)).tolist() for count in rng.integers(2, 150, 10)]
    truth = [reference_text(reference, prompt, NUM_TOKENS + 10) for prompt in prompts]
    texts = open_all(engine, prompts)
    while growing := [text for text in texts.values() if len(text.said) < NUM_TOKENS]:
        joining = [text for text in growing if rng.random() < 0.6]
        steps = [text.step(guess(rng, truth[text.session_id][len(text.said) :])) for text in joining]
        if steps:
            run(engine, steps, texts)
    assert [text.said[:NUM_TOKENS] for text in texts.values()] == [expected[:NUM_TOKENS] for expected in truth]
    assert set(launches) > {0, 2, 4, 8}
    for session_id in texts:
        engine.close(session_id)
    assert engine.free_slots == engine.info.kv_slots
    assert shared_prefixes_hold(engine, texts[0].tokens)
    engine.shutdown()


def shared_prefixes_hold(engine: VllmEngine, text: list[int]) -> bool:
    """Whether a text that is found in the prefix cache goes on as if it were computed anew."""
    token_ids, said = np.array(text, np.int32), []
    for is_fresh in (False, True):
        if is_fresh:
            assert engine._sessions._core.scheduler.reset_prefix_cache()  # type: ignore[attr-defined]
        start = engine.open(1, token_ids)
        assert (start == 0) == is_fresh
        (found,) = engine.step([SessionStep(1, start, token_ids[start:], SamplingParams())]).judgements
        said.append(found.token_ids.tolist())
        engine.close(1)
    return said[0] == said[1]


@pytest.mark.vllm
@NEEDS_VLLM[1]
def test_no_row_is_added_where_no_token_can_stand(directory: Path, vllm_device: str) -> None:
    """Neither behind the longest context, nor in KV memory that others may need; texts come to their ends all the
    same."""
    memory = vllm_arguments(vllm_device).get("options", {})
    engine, launches = even_engine(
        directory, vllm_device, kv_slots=512, max_sessions=4, options=memory | {"max_model_len": 64}
    )
    reference, rng = load_reference(directory), np.random.default_rng(3)
    prompts = [random_tokens(rng, count).tolist() for count in (50, 52, 52)]
    truth = [reference_text(reference, prompt, 64 - len(prompt)) for prompt in prompts]
    texts, evened = open_all(engine, prompts), list[tuple[int, int]]()
    launches.clear()
    while growing := [text for text in texts.values() if len(text.tokens) < 64]:
        wrong = chain([VOCAB - 1] * min(3, 63 - len(texts[0].tokens)))
        run(engine, [text.step(wrong) if text.session_id == 0 else text.step() for text in growing], texts)
        evened.append((len(growing[-1].tokens), launches[-1]))
    assert [text.said for text in texts.values()] == truth
    assert [even for length, even in evened if length <= 62] == [4] * 10
    assert [even for length, even in evened if length > 62][:2] == [0, 0]  # the fourth row would be the context's 65th
    engine.shutdown()


@pytest.mark.vllm
@NEEDS_VLLM[1]
def test_rows_are_added_only_where_kv_is_left(directory: Path, vllm_device: str) -> None:
    """With one free block for each session besides what the rows take, and not with less."""
    engine, launches = even_engine(directory, vllm_device, kv_slots=256, max_sessions=4)
    way: Any = engine._sessions
    size = way._scheduler.block_size
    rng = np.random.default_rng(4)
    texts = open_all(engine, [random_tokens(rng, size).tolist() for _ in range(2)])
    more = [random_tokens(rng, size * (way._scheduler.num_free - 3) - 1), random_tokens(rng, 5)]
    for session_id, prompt in enumerate(more, 8):
        texts[session_id] = Text(session_id, prompt.tolist())
    launches.clear()
    engine.open(8, more[0])
    run(engine, [texts[8].step()], texts)
    assert way._scheduler.num_free == 3
    run(engine, [texts[0].step(chain([1])), texts[1].step()], texts)  # two rows each, and one fits into its block
    assert launches == [0, 0]
    engine.close(8)
    launches.clear()
    run(engine, [texts[0].step(chain([1])), texts[1].step()], texts)
    assert launches == [2]
    engine.shutdown()


@pytest.mark.vllm
@NEEDS_VLLM[1]
def test_texts_stay_right_where_kv_is_short(directory: Path, vllm_device: str) -> None:
    """A verifier serves eight sessions that grow to twice the room, with drafts, as many of each session as is best for
    all."""
    engine, launches = even_engine(directory, vllm_device, kv_slots=320, max_sessions=8)
    engine.even_chains = {length - 1: counts[-1] for length, counts in GRAPHS.items()}
    assert all(seconds > 0 for seconds in engine.step_times([1, 8, 40]))
    verifier = Verifier(engine, StepCurve([1, 512], [0.005, 0.0051]), incarnation=1)
    rng, reference = np.random.default_rng(5), load_reference(directory)
    prompts = {i: random_tokens(rng, 20) for i in range(8)}
    truth = {i: reference_text(reference, prompt.tolist(), 44) for i, prompt in prompts.items()}
    params = SamplingParams(ignore_eos=True)
    for i, prompt in prompts.items():
        opening = Open(session_id=i, epoch=1, prompt_len=20, tokens_left=40, params=params, token_ids=prompt)
        verifier.handle(opening, 0.0)
    launches.clear()
    said: dict[int, list[int]] = {i: [] for i in prompts}
    first_ids = dict.fromkeys(prompts, 0)
    while verifier.has_work:
        for verdict in verifier.step(lambda: 0.0):
            assert isinstance(verdict, Verdict)
            said[verdict.session_id] += verdict.token_ids.tolist()
        for i, session in verifier.sessions.items():
            tokens = truth[i][len(said[i]) :][: int(rng.integers(0, 4))]
            if tokens and not session.finish:
                tokens[-1] = (tokens[-1] + int(rng.random() < 0.3)) % VOCAB
                verifier.handle(draft(session, first_ids[i], tokens), 0.0)
                first_ids[i] += len(tokens)
    assert said == {i: tokens[:40] for i, tokens in truth.items()}
    assert {0, 2, 3, 4} <= set(launches)
    engine.shutdown()


def draft(session: Session, first_id: int, tokens: list[int]) -> Draft:
    """Return a chain that hangs from a session's end, of which the drafter is sure."""
    parents = [-1, *range(first_id, first_id + len(tokens) - 1)]
    return Draft(
        session_id=session.session_id, epoch=session.epoch, lane=0, base_len=session.length, first_id=first_id,
        token_ids=np.array(tokens, np.int32), parent_ids=np.array(parents, np.int32),
        scores=np.full(len(tokens), -0.05, np.float16),
    )  # fmt: skip
