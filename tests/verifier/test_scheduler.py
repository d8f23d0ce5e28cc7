"""The one rule: nodes join while they raise the goodput."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specq.protocol import COLOCATED_LANE
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.grafting import batch_of_chains, graft_batch
from specq.verifier.sessions.session import Session
from specq.verifier.step.node_choice import FLOOR, ScheduledSession, best_count
from specq.verifier.step.plan import plan
from specq.verifier.trees import DraftTrees
from tests.verifier.sessions import candidates, commit, graft, make_draft, make_session, observe

FLAT = StepCurve([1, 512], [1.0, 1.0])
STEEP = StepCurve([1, 512], [0.01, 5.12])


def decoding(**options: Any) -> Session:
    """Return a session whose KV lacks only its last token."""
    session = make_session(**options)
    session.kv_len = session.length - 1
    return session


def shares(*args: object, **options: int) -> list[ScheduledSession]:
    return list(plan(*args, **options).shares)  # type: ignore[arg-type]


def test_a_session_without_drafts_takes_a_plain_step() -> None:
    """Rule 5: it joins with one row."""
    (share,) = shares([decoding()], FLAT, max_rows=64, free_slots=64)
    assert (share.step.num_rows, share.step.judged) == (1, True)


def test_free_rows_take_every_node() -> None:
    """Where rows cost nothing, all nodes above the floor are verified."""
    session = decoding()
    graft(session, make_draft(3, 0, [4, 5, 6], [-1, 0, 1]), 0.0)
    (share,) = shares([session], FLAT, max_rows=64, free_slots=64)
    assert share.step.tree.num_nodes == 3


def test_dear_rows_take_none() -> None:
    """Where a row costs a whole step, a node that is accepted half of the time does not pay."""
    session = decoding()
    graft(session, make_draft(3, 0, [4, 5, 6], [-1, 0, 1]), 0.0)
    (share,) = shares([session], STEEP, max_rows=64, free_slots=64)
    assert share.step.tree.num_nodes == 0


def test_prefill_is_chunked() -> None:
    """A long context takes the rows that are left, and is not judged before its end."""
    session = make_session(list(range(100)))
    (share,) = shares([session], FLAT, max_rows=64, free_slots=1000)
    assert (share.step.num_rows, share.step.judged) == (64, False)
    session.kv_len = 64
    (share,) = shares([session], FLAT, max_rows=64, free_slots=1000)
    assert (share.step.start, share.step.num_rows, share.step.judged) == (64, 36, True)


def test_without_slots_no_rows_are_planned() -> None:
    """No KV room, no share."""
    assert shares([decoding()], FLAT, max_rows=64, free_slots=0) == []


def test_nodes_never_pass_the_limit() -> None:
    """With two tokens left, one node is enough: the correction takes the other."""
    session = decoding(tokens_left=2)
    graft(session, make_draft(3, 0, [4, 5, 6], [-1, 0, 1]), 0.0)
    (share,) = shares([session], FLAT, max_rows=64, free_slots=64)
    assert share.step.tree.token_ids.tolist() == [4]


@given(
    st.lists(st.floats(0.01, 1.0), max_size=20),
    st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4),
    st.integers(1, 8),
)
def test_best_count_is_the_best(chances: list[float], slopes: list[float], num_sessions: int) -> None:
    """No other number of nodes, likeliest first, has a better goodput, where all of them are known from the start."""
    curve = StepCurve([1, 8, 16, 64], np.cumsum([0.5, *slopes[1:]]).tolist())
    reach_prob = np.sort(np.array(chances))[::-1]
    count = best_count(reach_prob, np.zeros(len(reach_prob), np.intp), num_sessions, num_sessions, 64, curve)

    def goodput(n: int) -> float:
        return (num_sessions + reach_prob[:n].sum()) / curve(num_sessions + n)

    assert goodput(count) == pytest.approx(max(goodput(n) for n in range(len(reach_prob) + 1)))


@given(st.data(), st.integers(1, 8), st.integers(1, 24))
def test_best_count_looks_at_what_is_known_by_then(data: st.DataObject, num_sessions: int, room: int) -> None:
    """The number is the same whatever the nodes are that depend on those that are left out; no node that is known and
    next in order would raise the goodput; and there is room."""
    chances = data.draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=20))
    jumps = data.draw(st.lists(st.sampled_from([0.0, 0.0, 0.2, 1.0]), min_size=63, max_size=63))
    curve = StepCurve(range(1, 65), np.cumsum([0.5, *jumps]).tolist())
    reach_prob = np.sort(np.array(chances))[::-1]
    needed = np.array([data.draw(st.integers(0, i)) for i in range(len(reach_prob))])
    count = best_count(reach_prob, needed, num_sessions, num_sessions, room, curve)
    assert count <= min(room, len(reach_prob))
    known = needed <= count
    most = float(reach_prob[min(count, len(reach_prob) - 1)])  # an unknown node is no likelier than what it depends on
    others = np.array([data.draw(st.floats(0.0, most)) for _ in range(int((~known).sum()))])
    changed = np.concatenate([reach_prob[known], others])
    order = np.argsort(-changed, kind="stable")
    still_needed = np.concatenate([needed[known], np.full(len(others), count + 1)])[order]
    assert best_count(changed[order], still_needed, num_sessions, num_sessions, room, curve) == count
    if count < min(room, len(reach_prob)):
        tokens = num_sessions + reach_prob[:count].sum()
        assert (tokens + reach_prob[count]) / curve(num_sessions + count + 1) <= tokens / curve(
            num_sessions + count
        ) + 1e-12


@given(st.lists(st.floats(0.001, 1.0), min_size=3, max_size=6))
def test_a_curve_never_falls(seconds: list[float]) -> None:
    """Noise in the profile does not make more rows look cheaper."""
    sizes = [1, 4, 16, 32, 64, 128][: len(seconds)]
    curve = StepCurve(sizes, seconds)
    times = [curve(n) for n in range(1, 200)]
    assert times == sorted(times)
    assert curve.times(1, 50).tolist() == times[:50]


def chain(session: Session, chances: list[float]) -> None:
    """Let the colocated drafter draft a chain of tokens 4, 5, ... with these chances given the ones before."""
    count = len(chances)
    tokens, scores = np.arange(4, 4 + count, dtype=np.int32)[None], np.log(chances).astype(np.float32)[None]
    graft_batch(batch_of_chains([session], COLOCATED_LANE, tokens, np.array([count]), scores, is_measured=True), 0.0)


def test_measured_chances_are_taken_as_they_are() -> None:
    """The same nodes are verified of a chain of the colocated drafter, whatever its lane has seen, and of a draft whose
    lane confirms its scores."""
    rng = np.random.default_rng(0)
    for cost in (0.0001, 0.001, 0.003, 0.01):
        curve = StepCurve([1, 512], [0.005, 0.005 + 511 * cost])
        chances = [np.sort(rng.uniform(0.1, 1.0, rng.integers(1, 8)))[::-1] for _ in range(6)]
        drafted, chained = DraftTrees(), DraftTrees()
        sessions = [decoding(trees=drafted, session_id=i) for i in range(6)]
        own_sessions = [decoding(trees=chained, session_id=i) for i in range(6)]
        for session, own_session, own in zip(sessions, own_sessions, chances, strict=True):
            observe(own_session, COLOCATED_LANE, float(np.log(own[0])), accepted=False)
            draft = make_draft(3, 0, list(range(4, 4 + len(own))), list(range(-1, len(own) - 1)))
            scores = np.log(own).astype(np.float16)
            graft(session, replace(draft, scores=scores), 0.0)
            chain(own_session, np.exp(scores.astype(np.float64)).tolist())
        expected = [share.step.tree for share in shares(sessions, curve, max_rows=40, free_slots=1000)]
        found = [share.step.tree for share in shares(own_sessions, curve, max_rows=40, free_slots=1000)]
        assert [tree.token_ids.tolist() for tree in found] == [tree.token_ids.tolist() for tree in expected]
        assert all(tree.parents.tolist() == list(range(-1, tree.num_nodes - 1)) for tree in found)
        for own_session, own in zip(own_sessions, chances, strict=True):
            expected_probs = np.cumprod(np.exp(np.log(own).astype(np.float16).astype(np.float64)))
            found_probs = [node.reach_prob for node in candidates(own_session, 0.0)]
            assert found_probs == pytest.approx(expected_probs.tolist())


def test_chains_keep_to_the_engine_and_to_the_room_that_is_left() -> None:
    """At most as long as the engine takes, and one token less than the session may still generate."""
    session = decoding()
    chain(session, [0.99] * 5)
    (share,) = shares([session], FLAT, max_rows=64, free_slots=64, max_chain=3)
    assert len(share.nodes) == 3
    session.limit = session.length + 3
    (share,) = shares([session], FLAT, max_rows=64, free_slots=64)
    assert len(share.nodes) == 2
    (share,) = shares([session], FLAT, max_rows=2, free_slots=64)
    assert len(share.nodes) == 1


def test_a_draft_of_others_hangs_beside_a_chain() -> None:
    """They are one tree; committing cuts what it contradicts of either."""
    session = decoding()
    chain(session, [0.9, 0.9])
    graft(session, make_draft(3, 0, [7], [-1]), 0.0)
    (share,) = shares([session], FLAT, max_rows=64, free_slots=64)
    assert share.step.tree.token_ids.tolist() == [4, 7, 5]
    commit(session, [4, 9], 0)
    assert session.num_live == 0


def even(sessions: list[Session], chains: dict[int, int], curve: StepCurve = FLAT, **options: Any) -> list[int]:
    """Return how many nodes of each session are verified by an engine that is quicker with such chains."""
    given = {"max_rows": 64, "free_slots": 1000, "max_chain": 16, "even_chains": chains} | options
    return [len(share.nodes) for share in shares(sessions, curve, **given)]


def test_chains_are_equally_long_where_the_engine_is_quicker_so() -> None:
    """As long as the goodput is highest with one length for all; there are lengths for so many sessions, and for no
    more."""
    trees = DraftTrees()
    sessions = [decoding(trees=trees, session_id=i) for i in range(4)]
    for session, count in zip(sessions, (7, 5, 2, 0), strict=True):
        chain(session, [0.9] * count)
    assert even(sessions, {}) == [7, 5, 2, 0]
    assert even(sessions, {1: 4, 4: 4, 11: 4}) == [7, 5, 2, 0]
    assert even(sessions, {1: 4, 4: 4, 11: 3}) == [4, 4, 2, 0]
    assert even(sessions, {1: 4, 4: 4, 11: 4}, max_rows=4 + 43) == [4, 4, 2, 0]  # 44 rows would be added
    assert even(sessions, {1: 4, 4: 4, 11: 4}, free_slots=4 + 15) == [1, 1, 1, 0]
    assert even(sessions, {1: 4, 4: 4, 11: 4}, STEEP) == [0, 0, 0, 0]
    assert even(sessions, {1: 3, 4: 3}) == [0, 0, 0, 0]
    assert even(sessions[:1], {1: 4, 4: 4, 11: 4}) == [7]
    assert even([*sessions, make_session(list(range(9)), trees=trees, session_id=9)], {1: 9}) == [
        7,
        5,
        2,
        0,
        0,
    ]  # beside a prompt


@given(
    st.lists(st.lists(st.floats(0.05, 0.99), max_size=6), min_size=1, max_size=6),
    st.floats(0.0, 0.3),
    st.sets(st.integers(1, 8), min_size=1, max_size=4),
)
def test_the_length_of_even_chains_is_the_best(chances: list[list[float]], slope: float, lengths: set[int]) -> None:
    """Against each length by itself; rows that bring nothing take their time."""
    assume(all(abs(p - FLOOR) > 1e-6 for own in chances for p in np.cumprod(own)))  # here a rounding error decides
    trees, count = DraftTrees(), len(chances)
    sessions = [decoding(trees=trees, session_id=i) for i in range(count)]
    for session, own in zip(sessions, chances, strict=True):
        chain(session, own)
    curve = StepCurve([1, 512], [1.0, 1.0 + 511 * slope])
    probs = [[p for p in np.cumprod(own) if p >= FLOOR] for own in chances]

    def goodput(most: int, rows_each: int) -> float:
        return (count + sum(sum(own[:most]) for own in probs)) / curve(count * rows_each)

    found = even(sessions, dict.fromkeys(sorted(lengths), 9), curve)
    most = max(found)
    assert found == [min(len(own), most) for own in probs]
    padded = min((length for length in lengths if length >= most), default=0) if most else 0
    best = max(goodput(length, 1 + length) for length in (0, *lengths))
    assert goodput(most, 1 + padded) == pytest.approx(best, rel=1e-6)
