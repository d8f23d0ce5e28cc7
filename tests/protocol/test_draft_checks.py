"""A malformed draft is named and dropped whole; the drafts of a lane that is not trusted are stripped to point
masses."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol.draft_checks import reason_against, stripped
from specq.protocol.errors import ProtocolError
from specq.protocol.messages import Draft, Open
from specq.protocol.params import SamplingParams
from specq.protocol.types import Tree
from specq.protocol.wire import decode, encode
from specq.testing.random_steps import VOCAB, sampled_trees
from specq.testing.toy import ToyEngine, toy_text
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.session import Session
from specq.verifier.trees import MAX_TABLE_SIZE
from tests.each import each
from tests.verifier.sessions import graft

GOOD = Draft(
    session_id=1, epoch=1, lane=0, base_len=5, first_id=10,
    token_ids=np.array([3, 1, 2, 0], np.int32),
    parent_ids=np.array([-1, -1, 10, 7], np.int32),
    scores=np.zeros(4, np.float16),
    q_size=3,
    q_ids=np.array([3, 1, -1, 2, 0, 1], np.int32),
    q_weights=np.array([5, 9, 0, 0, 1, 1], np.uint16),
    q_rows=np.array([0, 0, -1, -1], np.int32),
)  # fmt: skip


def draft_of(tree: Tree) -> Draft:
    """Return a whole tree as a draft."""
    distributions = tree.distributions
    return Draft(
        session_id=1, epoch=1, lane=0, base_len=5, first_id=0, token_ids=tree.token_ids, parent_ids=tree.parents,
        scores=tree.scores.astype(np.float16), q_size=distributions.ids.shape[1] if distributions else 0,
        q_ids=distributions.ids.reshape(-1) if distributions else np.zeros(0, np.int32),
        q_weights=distributions.weights.reshape(-1) if distributions else np.zeros(0, np.uint16),
        q_rows=distributions.rows if distributions else np.zeros(0, np.int32),
    )  # fmt: skip


@given(sampled_trees())
def test_well_formed_trees_pass(tree: Tree) -> None:
    """Sibling groups, each with its own draft distribution, and point masses between them."""
    draft = draft_of(tree)
    assert reason_against(draft, VOCAB) == ""
    bare = stripped(draft)
    assert (bare.q_size, len(bare.q_ids), len(bare.q_weights), len(bare.q_rows)) == (0, 0, 0, 0)
    assert bare.token_ids is draft.token_ids


def changed(**arrays: Any) -> Draft:
    """Return the good draft with other arrays."""
    return replace(GOOD, **{n: np.array(v, getattr(GOOD, n).dtype) for n, v in arrays.items()})


@each(
    ("draft", "reason"),
    [
        (replace(GOOD, lane=-1), "its lane, its position"),
        (replace(GOOD, lane=255), "its lane, its position"),
        (replace(GOOD, base_len=-1), "its position"),
        (replace(GOOD, base_len=2**31), "its position"),
        (replace(GOOD, first_id=-1), "its ids"),
        (replace(GOOD, first_id=2**31 - 3), "its ids"),
        (changed(scores=[0, 0, 0]), "arrays differ in length"),
        (changed(scores=[0, 0, 0, np.nan]), "not a log-probability"),
        (changed(scores=[0, 0, 0, 0.5]), "not a log-probability"),
        (changed(parent_ids=[-1, 11, 10, 7]), "parent does not come before"),
        (changed(parent_ids=[-1, 12, 10, 7]), "parent does not come before"),
        (changed(parent_ids=[-1, -2, 10, 7]), "parent does not come before"),
        (changed(token_ids=[3, 3, 2, 0]), "two siblings"),
        (changed(token_ids=[3, 1, 4, 0]), "outside the vocabulary"),
        (changed(token_ids=[3, 1, -1, 0]), "outside the vocabulary"),
        (changed(q_rows=[0, 0]), "differ in shape"),
        (changed(q_weights=[5, 9, 0]), "differ in shape"),
        (replace(GOOD, q_size=4), "differ in shape"),
        (replace(GOOD, q_size=-3), "differ in shape"),
        (replace(GOOD, q_size=2**61, q_ids=np.zeros(0, np.int32), q_weights=np.zeros(0, np.uint16)), "differ in shape"),
        (changed(q_rows=[0, 0, 2, -1]), "a draft distribution that is not there"),
        (changed(q_rows=[0, 0, -2, -1]), "a draft distribution that is not there"),
        (changed(q_ids=[3, 1, -1, 2, 0, 4]), "outside the vocabulary"),
        (changed(q_ids=[3, 1, -2, 2, 0, 1]), "outside the vocabulary"),
        (changed(q_weights=[5, 9, 1, 0, 1, 1]), "outside the vocabulary"),
        (changed(q_ids=[3, 1, 1, 2, 0, 1]), "a token twice"),
        (changed(q_weights=[0, 0, 0, 0, 1, 1]), "no weight"),
        (changed(q_rows=[0, 0, 1, -1]), "not in its own draft distribution"),  # weight 0
        (changed(q_ids=[0, 1, -1, 2, 0, 1]), "not in its own draft distribution"),
        (changed(q_ids=[3, 1, -1, 2, 0, 1], q_rows=[0, 1, -1, -1]), "different draft distributions"),
        (changed(token_ids=[3, 1, 2, 3], q_rows=[0, 0, -1, 0]), "nodes of different parents have the same"),
    ],
)
def test_malformed_drafts_are_named(draft: Draft, reason: str) -> None:
    """Each fault has its message."""
    assert reason_against(GOOD, 4) == ""
    assert reason in reason_against(draft, 4)


# --- anything at all --------------------------------------------------------------------------------------------------

INTEGERS = st.one_of(st.integers(-2, 12), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**31 - 1, 2**31, 2**32]))
IDS = st.lists(st.one_of(st.integers(-2, 12), st.integers(-(2**31), 2**31 - 1)), max_size=4)


@st.composite
def any_drafts(draw: st.DrawFn) -> Draft:
    """Return what a hostile drafter may send: every field may be anything that the wire carries."""
    num_nodes = draw(st.integers(0, 3))
    same = st.lists(st.integers(-1, 12), min_size=num_nodes, max_size=num_nodes)
    score = st.one_of(st.just(-0.5), st.floats(width=16))
    scores = st.lists(score, min_size=num_nodes, max_size=num_nodes)
    ids, rows = st.one_of(same, st.just(list(range(num_nodes))), IDS), st.one_of(st.just([]), same, IDS)
    values = {name: draw(INTEGERS) for name in ("base_len", "first_id", "q_size")}
    arrays = {name: np.array(draw(ids), np.int32) for name in ("token_ids", "parent_ids")}
    distributions = {name: np.array(draw(rows), np.int32) for name in ("q_ids", "q_rows")}
    weights = np.array(draw(st.lists(st.integers(0, 9), max_size=4)), np.uint16)
    own = {"scores": np.array(draw(scores), np.float16), "q_weights": weights}
    return Draft(session_id=1, epoch=1, lane=0, **own, **values, **arrays, **distributions)


@given(any_drafts(), st.sampled_from(["deterministic", "probabilistic"]))
def test_no_draft_stops_a_verifier(draft: Draft, strategy: str) -> None:
    """It is dropped, or grafted and verified. No error is raised, and the verdict can be sent."""
    verifier = Verifier(ToyEngine(), StepCurve([1, 8], [0.005, 0.006]), incarnation=1)
    params = SamplingParams(max_tokens=9, strategy=strategy, temperature=1.0)
    context = np.array([5, 6, 7], np.int32)
    verifier.handle(Open(session_id=1, epoch=1, prompt_len=3, tokens_left=9, params=params, token_ids=context), 0.0)
    with suppress(ProtocolError):
        verifier.handle(draft, 0.0)
    for _ in range(3):
        for verdict in verifier.step(lambda: 0.0):
            assert decode(encode(verdict)) == verdict
    assert verifier.sessions[1].token_ids == [5, 6, 7, *toy_text([5, 6, 7], len(verifier.sessions[1].token_ids) - 3)]


def test_a_lanes_node_table_is_bounded() -> None:
    """A drafter that sends the same again under new ids, or what is committed already, fills its own table to its
    bound."""
    params = SamplingParams(max_tokens=9)
    context = np.array([5, 6, 7])
    session = Session(Open(session_id=1, epoch=1, prompt_len=2, tokens_left=9, params=params, token_ids=context))
    same = {"token_ids": np.full(100, 9), "parent_ids": np.full(100, -1), "scores": np.zeros(100)}
    for number in range(100):
        for base_len, token, first_id in ((3, 9, 200 * number), (2, 7, 200 * number + 100)):
            own = same | {"base_len": base_len, "first_id": first_id, "token_ids": np.full(100, token)}
            graft(session, Draft(session_id=1, epoch=1, lane=0, **own), 0.0)
    assert session.num_live == 1
    (refs,) = session.trees.num_refs[session.trees.session_lanes[session.place, :1]]
    assert MAX_TABLE_SIZE / 2 - 100 < refs <= MAX_TABLE_SIZE, "every second hundred ids name the live node"
    one = {name: array[:1] for name, array in same.items()} | {"token_ids": np.array([8])}
    assert graft(session, Draft(session_id=1, epoch=1, lane=1, base_len=3, first_id=0, **one), 0.0) == 1
