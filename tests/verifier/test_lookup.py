"""Prompt lookup: chains of what the text repeats, beside what drafters sent."""

import numpy as np
import pytest

from specq.protocol import LOOKUP_LANE
from specq.verifier.grafting import graft, graft_lookup
from specq.verifier.prompt_lookup import LOOKUP_TOKENS
from specq.verifier.session import Session
from tests.verifier.sessions import commit, live_nodes, make_draft, make_session, observe, paths

PHRASE = list(range(10, 22))
CONTEXT = [*PHRASE, 1, 2, 3, *PHRASE[:3]]  # goes on, if it repeats itself, with 13, 14, ...


def session_with_reliable_lookup() -> Session:
    session = make_session(CONTEXT)
    _, score = session.lookup.chain(1)
    for _ in range(60):
        observe(session, LOOKUP_LANE, score, accepted=True)
    return session


def test_a_lookup_hangs_from_the_context() -> None:
    """As a chain in a lane of its own."""
    session = session_with_reliable_lookup()
    assert graft_lookup(session, 0.1, 0.0) == LOOKUP_TOKENS
    assert tuple(PHRASE[3 : 3 + LOOKUP_TOKENS]) in paths(session)
    assert {node.lane for node in live_nodes(session)} == {LOOKUP_LANE}
    assert graft_lookup(session, 0.1, 0.0) == 0, "it is live already"


@pytest.mark.parametrize(("probability", "is_hung"), [(0.03, True), (0.999, False)])
def test_it_is_hung_beside_a_draft_that_promises_less(probability: float, is_hung: bool) -> None:
    """One live node that is unlikely does not shut out a chain of eight; a longer chain that is surer does."""
    session = session_with_reliable_lookup()
    count = 1 if is_hung else 12
    draft = make_draft(len(CONTEXT), 0, list(range(40, 40 + count)), list(range(-1, count - 1)))
    graft(session, draft, 0.0)
    for _ in range(60):
        observe(session, 0, float(draft.scores[0]), accepted=bool(probability > 0.5))
    assert bool(graft_lookup(session, 0.1, 0.0)) == is_hung


def test_what_a_drafter_sent_already_is_not_hung_twice() -> None:
    """A looked-up token that is live stands for both, and the rest hangs below it."""
    session = session_with_reliable_lookup()
    graft(session, make_draft(len(CONTEXT), 0, PHRASE[3:4], [-1]), 0.0)
    for _ in range(60):
        observe(session, 0, np.log(0.5), accepted=False)
    assert graft_lookup(session, 0.1, 0.0) == LOOKUP_TOKENS - 1
    assert session.num_live == LOOKUP_TOKENS
    commit(session, PHRASE[3:6], 3)
    assert session.num_live == LOOKUP_TOKENS - 3


def test_near_its_end_a_text_has_room_for_a_shorter_lookup() -> None:
    """Of what would be tried there is only so much: the correction takes the last token."""
    session = make_session(CONTEXT, tokens_left=4)
    _, score = session.lookup.chain(1)
    for _ in range(60):
        observe(session, LOOKUP_LANE, score, accepted=True)
    assert graft_lookup(session, 0.1, 0.0) == 3
    assert tuple(PHRASE[3:6]) in paths(session)
