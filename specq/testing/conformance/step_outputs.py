"""The conformance suite of engines with hidden states or scratch rows, and the refusals of other engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specq.engines import Engine
from specq.protocol import (
    FINAL,
    EngineError,
    Int32Array,
    SamplingParams,
    ScratchRows,
    SessionStep,
    StepOutput,
    Tap,
    Tree,
)

GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=11)
TOLERANCE = 2e-3
LENGTH = 9  # of the contexts: too short for a prefix cache
# Rows below the context, below nodes and below each other. Their positions continue, repeat and leave gaps.
TREE_PARENTS = [-1, 0, -1, 1]
SCRATCH_PARENTS = [-1, 4, 5, 1, 7, -1, 3]
SCRATCH_OFFSETS = [0, 1, 2, 2, 5, 7, 3]


def tokens(engine: Engine, count: int, seed: int) -> Int32Array:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(engine.info.vocab_size, size=count, dtype=np.int32)


def tree_of(engine: Engine, seed: int) -> Tree:
    """Return a tree of random tokens."""
    parents = np.array(TREE_PARENTS, np.int32)
    return Tree(tokens(engine, len(parents), seed), parents, np.zeros(len(parents), np.float32))


def chain_of(token_ids: Int32Array) -> Tree:
    """Return a tree that is a chain."""
    return Tree(token_ids, np.arange(len(token_ids), dtype=np.int32) - 1, np.zeros(len(token_ids), np.float32))


def scratch_of(engine: Engine, base_len: int, seed: int) -> ScratchRows:
    """Return scratch rows of random tokens, for a tree of `tree_of`."""
    parents, offsets = np.array(SCRATCH_PARENTS, np.int32), np.array(SCRATCH_OFFSETS, np.int32)
    return ScratchRows(tokens(engine, len(parents), seed), parents, base_len + offsets)


def step_from(engine: Engine, step: SessionStep, context: Int32Array, tap: Tap) -> StepOutput:
    """Open a session, compute the tokens before a step, run the step, and close the session."""
    start = engine.open(step.session_id, context)
    if start < step.start:
        engine.step([SessionStep(step.session_id, start, context[start : step.start], GREEDY, judged=False)])
    output = engine.step([step], tap)
    engine.close(step.session_id)
    return output


def close_to(found: Any, expected: Any) -> None:
    """Assert that rows are equal up to rounding."""
    found, expected = (torch.as_tensor(rows).float().cpu() for rows in (found, expected))
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


def is_full(engine: Engine) -> bool:
    """Return whether all slots are free again."""
    return engine.free_slots == engine.info.kv_slots


def run_text(
    engine: Engine, params: SamplingParams, truth: Sequence[int], extras: bool
) -> list[tuple[list[int], tuple[int, ...], int]]:
    """Generate with trees that have some right nodes, given the true text.

    With `extras` each step has random scratch rows and a tap. Return tokens, path and free slots of each step.
    """
    rng, seen = np.random.default_rng(4), []
    context = tokens(engine, 19, 4).tolist()
    start = engine.open(1, np.array(context, np.int32))
    for turn in range(12):
        tree = tree_of(engine, turn)
        right = truth[len(context) - 19 :][: turn % 3]
        tree.token_ids[: len(right)] = right
        step = SessionStep(1, start, np.array(context[start:], np.int32), params, tree)
        tap = Tap()
        if extras and engine.takes_scratch:
            step = replace(step, scratch=scratch_of(engine, len(context), int(rng.integers(1 << 20))))
        if extras and engine.num_tap_layers:
            tap = Tap((FINAL, 0), frozenset([1])) if turn % 2 else Tap((0,))
        (judgement,) = engine.step([step], tap).judgements
        seen.append((judgement.token_ids.tolist(), judgement.path, engine.free_slots))
        start = len(context) + len(judgement.path)
        context += judgement.token_ids.tolist()
    engine.close(1)
    return seen


def text_tokens(step: SessionStep, row: int) -> list[int]:
    """Return the tokens on the path to a node or scratch row, its own included."""
    parents = [*step.tree.parents.tolist(), *step.scratch.parents.tolist()]
    token_ids = [*step.tree.token_ids.tolist(), *step.scratch.token_ids.tolist()]
    found: list[int] = []
    while row >= 0:
        found.append(token_ids[row])
        row = parents[row]
    return found[::-1]


def _needs(engine: Engine, able: object, what: str) -> None:
    if not able:
        pytest.skip(f"the {engine.info.engine} engine gives no {what}")


def _makes_trees(engine: Engine) -> None:
    if engine.max_chain:
        pytest.skip("the engine takes chains only")


class StepOutputConformance:
    """Part of `EngineConformance`, with its fixture `engine`."""

    def test_unsupported_outputs_are_refused_without_state_changes(self, engine: Engine) -> None:
        """This includes layers beyond the existing ones."""
        context = tokens(engine, 5, 0)
        engine.open(1, context)
        before, step = engine.free_slots, SessionStep(1, 0, context, GREEDY)
        for tap in (
            Tap((engine.num_tap_layers,)),
            Tap((FINAL - 1,)),
            *([] if engine.num_tap_layers else [Tap((FINAL,))]),
        ):
            with pytest.raises(EngineError, match="hidden states"):
                engine.step([step], tap)
        if not engine.takes_scratch:
            row = ScratchRows(context[:1], np.array([-1], np.int32), np.array([5], np.int32))
            with pytest.raises(EngineError, match="no scratch rows"):
                engine.step([replace(step, scratch=row)])
        assert engine.free_slots == before
        assert len(engine.step([step]).judgements) == 1

    def test_only_requested_outputs_are_returned(self, engine: Engine) -> None:
        output = step_from(engine, SessionStep(1, 0, tokens(engine, 5, 0), GREEDY), tokens(engine, 5, 0), Tap())
        assert output.hidden is None
        assert output.scratch_logits is None

    @pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_scratch_rows_and_taps_change_no_text_and_leave_no_state(
        self, engine: Engine, params: SamplingParams
    ) -> None:
        """Tokens, accepted paths and free slots are equal to those of the same steps without them."""
        _makes_trees(engine)
        said = [token for token_ids, _, _ in run_text(engine, params, [], extras=False) for token in token_ids]
        plain = run_text(engine, params, said, extras=False)
        assert any(len(path) > 1 for _, path, _ in plain)
        assert run_text(engine, params, said, extras=True) == plain
        assert is_full(engine)

    def test_a_row_has_one_hidden_state_however_it_is_reached(self, engine: Engine) -> None:
        """As a row of a judged or unjudged chunk, as the base row, as a node, alone or beside other rows."""
        _needs(engine, engine.num_tap_layers, "hidden states")
        layers = (FINAL, 0, engine.num_tap_layers - 1)
        context = tokens(engine, LENGTH, 1)
        whole = SessionStep(1, 0, context, GREEDY, judged=False)
        (expected,) = _hidden([step_from(engine, whole, context, Tap(layers, frozenset([1])))], 0)
        assert len(expected) == LENGTH
        judged = replace(whole, judged=True)
        found = step_from(engine, judged, context, Tap(layers, frozenset([1])))
        close_to(_hidden([found], 0)[0], expected)
        base = step_from(engine, judged, context, Tap(layers))
        close_to(_hidden([base], 0)[0], expected[-1:])
        nodes = SessionStep(1, LENGTH - 4, context[LENGTH - 4 : -3], GREEDY, chain_of(context[-3:]))
        close_to(_hidden([step_from(engine, nodes, context[:-3], Tap(layers))], 0)[0], expected[-4:])
        nothing = step_from(engine, whole, context, Tap(layers))
        assert len(_hidden([nothing], 0)[0]) == 0
        width = expected.shape[1] // 3
        one_layer = step_from(engine, whole, context, Tap((0,), frozenset([1])))
        close_to(_hidden([one_layer], 0)[0], expected[:, width : 2 * width])
        engine.open(7, tokens(engine, 9, 2))
        engine.open(8, context)
        beside = [
            SessionStep(7, 0, tokens(engine, 9, 2), GREEDY, chain_of(tokens(engine, 2, 3))),
            replace(whole, session_id=8, token_ids=context[:7]),
        ]
        output = engine.step(beside, Tap(layers, frozenset([8])))
        close_to(_hidden([output], 1)[0], expected[:7])
        assert len(_hidden([output], 0)[0]) == 3

    def test_hidden_states_of_a_tree_are_those_of_each_path(self, engine: Engine) -> None:
        """Base row and nodes, behind other rows of their session, without scratch rows."""
        _needs(engine, engine.num_tap_layers, "hidden states")
        _makes_trees(engine)
        context, tree, tap = tokens(engine, LENGTH, 1), tree_of(engine, 2), Tap((FINAL, 0))
        step = SessionStep(1, 0, context, GREEDY, tree)
        if engine.takes_scratch:
            step = replace(step, scratch=scratch_of(engine, LENGTH, 3))
        found = _hidden([step_from(engine, step, context, tap)], 0)[0]
        assert len(found) == 1 + tree.num_nodes
        for row in range(-1, tree.num_nodes):
            text = np.array([*context.tolist(), *text_tokens(step, row)], np.int32)
            alone = step_from(engine, SessionStep(1, 0, text, GREEDY), text, tap)
            close_to(found[row + 1 : row + 2], _hidden([alone], 0)[0])

    def test_scratch_logits_are_those_of_each_text(self, engine: Engine) -> None:
        """For rows whose positions follow from their parents, in several sessions, one without scratch rows."""
        _needs(engine, engine.takes_scratch, "logits of scratch rows")
        _makes_trees(engine)
        contexts = [tokens(engine, LENGTH + i, i) for i in range(3)]
        steps = [SessionStep(i, 0, c, GREEDY, tree_of(engine, i)) for i, c in enumerate(contexts)]
        for i in (0, 2):
            steps[i] = replace(steps[i], scratch=scratch_of(engine, len(contexts[i]), 10 + i))
            engine.open(i, contexts[i])
        engine.open(1, contexts[1])
        scratch = engine.step(steps).scratch_logits
        assert scratch is not None
        assert [len(scratch.of(i)) for i in range(3)] == [len(SCRATCH_PARENTS), 0, len(SCRATCH_PARENTS)]
        for i in (0, 2):
            engine.close(i)
            for row, offset in enumerate(SCRATCH_OFFSETS):
                text = text_tokens(steps[i], steps[i].tree.num_nodes + row)
                if offset == len(text) - 1:
                    close_to(scratch.of(i)[row : row + 1], alone_logits(engine, contexts[i], text))

    def test_a_scratch_row_stands_where_it_says(self, engine: Engine) -> None:
        """At another position its logits differ. They do not depend on the rows beside it."""
        _needs(engine, engine.takes_scratch, "logits of scratch rows")
        context = tokens(engine, LENGTH, 1)
        found = []
        for offsets in ([0, 0], [3, 0], [3, 9]):
            positions = LENGTH + np.array(offsets, np.int32)
            rows = ScratchRows(tokens(engine, 2, 2), np.array([-1, -1], np.int32), positions)
            output = step_from(engine, SessionStep(1, 0, context, GREEDY, scratch=rows), context, Tap())
            assert output.scratch_logits is not None
            found.append(torch.as_tensor(output.scratch_logits.of(0)).float().cpu())
        close_to(found[1][1:], found[0][1:])
        close_to(found[2][:1], found[1][:1])
        assert (found[1][0] - found[0][0]).abs().max() > 10 * TOLERANCE
        assert (found[2][1] - found[1][1]).abs().max() > 10 * TOLERANCE

    @pytest.mark.parametrize(
        ("parents", "positions", "judged", "message"),
        [
            ([1, -1], [5, 6], True, "parent is -1, a node, or an earlier scratch row"),
            ([-2, -1], [5, 6], True, "parent is -1, a node, or an earlier scratch row"),
            ([-1, 0], [4, 5], True, "stand at positions from 5 to"),
            ([-1, 0], [5, 512], True, "stand at positions from 5 to"),
            ([-1], [5, 6], True, "a token, a parent and a position"),
            ([-1, 0], [5, 6], False, "only where it is judged"),
        ],
    )
    def test_scratch_rows_that_make_no_sense_are_refused(
        self, engine: Engine, parents: list[int], positions: list[int], judged: bool, message: str
    ) -> None:
        _needs(engine, engine.takes_scratch, "logits of scratch rows")
        context = tokens(engine, 5, 0)
        engine.open(1, context)
        rows = ScratchRows(context[:2], *(np.array(part, np.int32) for part in (parents, positions)))
        with pytest.raises(EngineError, match=message):
            engine.step([SessionStep(1, 0, context, GREEDY, judged=judged, scratch=rows)])
        assert is_full(engine)


def alone_logits(engine: Engine, context: Int32Array, text: Sequence[int]) -> Any:
    """Return [1, vocab]: the logits of a scratch row whose ancestors are all part of the context."""
    whole = np.array([*context.tolist(), *text[:-1]], np.int32)
    row = ScratchRows(np.array(text[-1:], np.int32), np.array([-1], np.int32), np.array([len(whole)], np.int32))
    output = step_from(engine, SessionStep(90, 0, whole, GREEDY, scratch=row), whole, Tap())
    assert output.scratch_logits is not None
    return output.scratch_logits.of(0)


def _hidden(outputs: Sequence[StepOutput], index: int) -> list[Any]:
    """Return the hidden states of one step of each output."""
    return [output.hidden.of(index) for output in outputs if output.hidden is not None]
