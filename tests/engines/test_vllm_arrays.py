"""The arrays of the vllm engine, which need no vLLM: open sessions by place, and rows between two orders."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
import pytest

from specq.engines.vllm.rows import ANY_TOKEN, judged_rows, said_tokens
from specq.engines.vllm.table import FIRST_PLACES, SessionTable
from specq.protocol import NO_TOKENS, EngineError, Fault, Judgement, SamplingParams, SessionStep, Tree
from specq.verification import Judgements, StepBatch

PARAMS = SamplingParams()


def chain(tokens: list[int]) -> Tree:
    return Tree(
        np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32) - 1, np.zeros(len(tokens), np.float32)
    )


def random_step(rng: np.random.Generator, session_id: int, start: int) -> SessionStep:
    """One token with or without a chain, or a part of a prompt that is judged or not."""
    is_judged = bool(rng.random() < 0.7)
    tokens = rng.integers(0, 90, rng.integers(1, 4)).astype(np.int32)
    tree = chain(rng.integers(0, 90, rng.integers(0, 4)).tolist() if is_judged else [])
    return SessionStep(session_id, start, tokens, PARAMS, tree, judged=is_judged)


def random_judgement(rng: np.random.Generator, step: SessionStep) -> Judgement:
    if rng.random() < 0.15:
        return Judgement(step.session_id, (), NO_TOKENS, fault=Fault("its logits are no numbers"))
    length = int(rng.integers(0, step.tree.num_nodes + 1))
    tokens = np.append(step.tree.token_ids[:length], rng.integers(0, 90)).astype(np.int32)
    return Judgement(step.session_id, tuple(range(length)), tokens)


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_found_in_any_order_of_vllms_batch(seed: int) -> None:
    """Each row of logits named by session and node."""
    rng = np.random.default_rng(seed)
    steps = [random_step(rng, 100 + i, 5) for i in range(int(rng.integers(1, 12)))]
    batch, order = StepBatch.of(steps), rng.permutation(len(steps)).astype(np.intp)
    if seed % 4 == 0:
        order.sort()
    logits = [(steps[i].session_id, row) for i in order for row in range(steps[i].tree.num_nodes + 1)]
    wanted = [(s.session_id, row) for s in steps if s.judged for row in range(s.tree.num_nodes + 1)]
    rows = judged_rows(batch, order)
    assert (logits if rows is None else [logits[i] for i in rows]) == wanted


@pytest.mark.parametrize("seed", range(20))
def test_each_request_goes_on_with_its_own_sessions_tokens(seed: int) -> None:
    """One that could not be judged goes on with some token."""
    rng = np.random.default_rng(seed)
    steps = [random_step(rng, 100 + i, 5) for i in range(int(rng.integers(1, 12)))]
    judged = [random_judgement(rng, step) for step in steps if step.judged]
    counts, token_ids = said_tokens(Judgements.of(judged))
    expected = [own.token_ids.tolist() or [ANY_TOKEN] for own in judged]
    assert counts.tolist() == [len(tokens) for tokens in expected]
    assert token_ids.tolist() == [token for tokens in expected for token in tokens]


@pytest.mark.parametrize("seed", range(10))
def test_sessions_come_and_go_and_keep_their_own(seed: int) -> None:
    """Beside one list of tokens a session: what has KV, how long it is, its last token, and how much more fits."""
    rng, table = np.random.default_rng(seed), SessionTable()
    texts, computed, told = dict[int, list[int]](), dict[int, int](), dict[int, list[int]]()  # told: by opening
    for number in range(3 * FIRST_PLACES):
        prompt = rng.integers(0, 90, 4).astype(np.int32)
        place = table.add(number, prompt, 0, 4)
        told[int(table.openings[place])] = prompt.tolist()
        texts[number], computed[number] = prompt.tolist(), 0
        if rng.random() < 0.4:
            gone = int(rng.choice(list(texts)))
            assert table.remove(gone) is not None
            del texts[gone], computed[gone]
        joining = [i for i in texts if rng.random() < 0.3]
        if not joining:
            continue
        steps = []
        for i in joining:
            pending = texts[i][computed[i] :]
            is_end = bool(rng.random() < 0.7)
            tokens = np.array(pending if is_end else pending[:-1] or pending, np.int32)
            is_end = computed[i] + len(tokens) == len(texts[i])
            tree = chain(rng.integers(0, 90, rng.integers(0, 4)).tolist() if is_end else [])
            steps.append(SessionStep(i, computed[i], tokens, PARAMS, tree, judged=is_end))
        batch = StepBatch.of(steps)
        places = table.find(batch.session_ids)
        are_next = [s.judged and s.token_ids.tolist() == texts[s.session_id][-1:] for s in steps]
        assert table.are_next(batch, places).tolist() == are_next
        judged = [random_judgement(rng, step) for step in steps if step.judged]
        is_open, feeds = np.ones(len(batch), np.bool_), bool(rng.random() < 0.5)
        for _ in range(int(rng.integers(1, 3))):  # once, or discarded and launched again
            table.launch(batch, places, feeds=feeds)
            table.revert(batch, places, is_open, feeds=feeds)
        table.launch(batch, places, feeds=feeds)
        table.commit(batch, places, is_open, Judgements.of(judged), feeds=feeds)
        for step in steps:
            computed[step.session_id] += len(step.token_ids)
        for own in judged:
            computed[own.session_id] += len(own.path)
            texts[own.session_id] += own.token_ids.tolist()
        found = table.find(list(texts))
        assert table.computed[found].tolist() == list(computed.values())
        assert table.lengths[found].tolist() == [len(text) for text in texts.values()]
        assert table.last_tokens[found].tolist() == [text[-1] for text in texts.values()]
        for place, text in zip(found.tolist(), texts.values(), strict=True):
            assert told[table.openings[place]] + table.unsaid[place, : table.num_unsaid[place]].tolist() == text
            if rng.random() < 0.1:
                told[table.openings[place]] += table.take_unsaid(place)
        assert sorted(table.slacks()) == sorted(4 - count for count in computed.values())


def test_a_step_that_says_another_token_than_the_transcripts_last_is_not_next() -> None:
    table = SessionTable()
    table.add(3, np.array([5, 6, 7], np.int32), 2, 16)
    right, wrong, early = (
        StepBatch.of([SessionStep(3, start, np.array([token], np.int32), PARAMS)])
        for start, token in ((2, 7), (2, 8), (1, 7))
    )
    places = table.find([3])
    assert [bool(table.are_next(batch, places).all()) for batch in (right, wrong, early)] == [True, False, False]


def test_a_session_that_is_not_open_is_named() -> None:
    table = SessionTable()
    table.add(1, np.array([5], np.int32), 0, 16)
    assert table.remove(1) is not None
    assert table.remove(1) is None
    with pytest.raises(EngineError, match="session 1 is not open"):
        table.find([1])


def test_a_batch_travels_without_the_objects_made_of_it() -> None:
    """As many bytes for steps that were looked at as for those that were not, and the same steps there."""
    rng = np.random.default_rng(1)
    batch = StepBatch.of([random_step(rng, i, 5) for i in range(8)])
    there = pickle.loads(pickle.dumps(batch))
    assert "_steps" in vars(batch)
    assert "_steps" not in vars(there)
    for one, other in pairwise((batch, there)):
        assert [(s.session_id, s.token_ids.tolist(), s.tree.parents.tolist(), s.judged) for s in one] == [
            (s.session_id, s.token_ids.tolist(), s.tree.parents.tolist(), s.judged) for s in other
        ]


def test_a_batch_travels_without_the_parameters_that_are_known_there() -> None:
    """They take most of the time that it takes to pack and unpack, and are the same in each step of a session."""
    steps = [SessionStep(i, 9, np.array([5], np.int32), SamplingParams(seed=i)) for i in range(64)]
    batch = StepBatch.of(steps)
    there = pickle.loads(pickle.dumps(batch.without_params()))
    assert b"SamplingParams" in pickle.dumps(batch)
    assert b"SamplingParams" not in pickle.dumps(batch.without_params())
    there.params = batch.params
    assert [(s.session_id, s.params, s.token_ids.tolist()) for s in there] == [
        (s.session_id, s.params, s.token_ids.tolist()) for s in steps
    ]
    assert [s.params for s in batch] == [s.params for s in steps]


def test_steps_that_go_on_are_made_of_those_before_them() -> None:
    """They are what a verifier would have said of them; nothing but the step behind, of the same sessions and
    parameters, is taken for it."""
    params = [SamplingParams(seed=i, temperature=0.5 * (i % 2)) for i in range(3)]

    def step(start: int, fed_by: list[int] | None, of: list[SamplingParams] = params, **others: bool) -> StepBatch:
        one = [SessionStep(i, start + i, np.array([4], np.int32), own, **others) for i, own in enumerate(of)]
        batch = StepBatch.of(one)
        batch.fed_by = None if fed_by is None else np.array(fed_by, np.int32)
        return batch

    first, second, third = step(5, None), step(6, [0, 1, 2]), step(7, [0, 1, 2])
    assert second.goes_on(first)
    assert third.goes_on(second)
    for found, expected in ((first.further(), second), (first.further().further(), third)):
        assert [(s.start, s.base_len, s.params, s.judged) for s in found] == [
            (s.start, s.base_len, s.params, s.judged) for s in expected
        ]
        assert found.fed_by is not None
        assert found.fed_by.tolist() == [0, 1, 2]
        assert found.base_lens.tolist() == expected.base_lens.tolist()
        assert found.is_plain
    others = [
        (third, first), (step(6, None), first), (step(6, [1, 0, 2]), first), (step(6, [0, 1, -1]), first),
        (step(6, [0, 1, 2], [*params[:2], SamplingParams(seed=2)]), first), (second, step(5, None, judged=False)),
    ]  # fmt: skip
    assert not any(after.goes_on(before) for after, before in others)


def test_the_output_of_a_session_closed_in_flight_is_discarded() -> None:
    """The next one at its place is as it was opened; the other says what it says, behind a token that was not known."""
    table = SessionTable()
    for session_id in (1, 2):
        table.add(session_id, np.array([5, 6], np.int32), 1, 16)
    batch = StepBatch.of([SessionStep(i, 1, np.array([6], np.int32), PARAMS) for i in (1, 2)])
    places = table.find([1, 2])
    table.launch(batch, places, feeds=True)
    assert table.lengths[places].tolist() == [3, 3]
    behind = StepBatch.of([SessionStep(2, 2, np.array([0], np.int32), PARAMS)])
    assert not table.are_next(behind, places[1:]).any()
    behind.fed_by = np.array([1], np.int32)
    assert table.are_next(behind, places[1:]).all()
    openings = table.openings[places]
    table.remove(1)
    assert table.are_open(places, openings).tolist() == [False, True]
    assert table.add(3, np.array([7], np.int32), 0, 16) == places[0]
    assert table.are_open(places, openings).tolist() == [False, True]
    said = [Judgement(i, (), np.array([8 + i], np.int32)) for i in (1, 2)]
    table.commit(batch, places, np.array([False, True]), Judgements.of(said), feeds=True)
    assert table.computed[places].tolist() == [0, 2]
    assert table.lengths[places].tolist() == [1, 3]
    assert table.last_tokens[places].tolist() == [7, 10]
