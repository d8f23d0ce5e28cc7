"""Prompt lookup: chains of what the text repeats, beside what drafters sent."""

import numpy as np
import pytest

from specq.proposers import NgramIndex
from specq.protocol import LOOKUP_LANE
from specq.verifier.grafting import hang
from specq.verifier.session import Session
from specq.verifier.sources import Budget, PromptLookup
from specq.verifier.sources.lookup import LOOKUP_TOKENS
from specq.verifier.step_curve import StepCurve
from tests.verifier.sessions import commit, graft, live_nodes, make_draft, make_session, observe, paths

PHRASE = list(range(10, 22))
CONTEXT = [*PHRASE, 1, 2, 3, *PHRASE[:3]]  # goes on, if it repeats itself, with 13, 14, ...


def session_with_reliable_lookup() -> Session:
    session = make_session(CONTEXT)
    _, score = NgramIndex(session.token_ids).chain(1)
    for _ in range(60):
        observe(session, LOOKUP_LANE, score, accepted=True)
    return session


def look_up(session: Session) -> int:
    """Hang what the text repeats onto a session's tree; return how many nodes became live."""
    before, budget = session.num_live, Budget(StepCurve([1, 8], [1.0, 1.0]), 0.1)
    for batch in PromptLookup().collect([session], budget, lambda: 0.0):
        hang(batch, 0.0)
    return session.num_live - before


def test_a_lookup_hangs_from_the_context() -> None:
    """As a chain in a lane of its own."""
    session = session_with_reliable_lookup()
    assert look_up(session) == LOOKUP_TOKENS
    assert tuple(PHRASE[3 : 3 + LOOKUP_TOKENS]) in paths(session)
    assert {node.lane for node in live_nodes(session)} == {LOOKUP_LANE}
    assert look_up(session) == 0, "it is live already"


@pytest.mark.parametrize(("probability", "is_hung"), [(0.03, True), (0.999, False)])
def test_it_is_hung_beside_a_draft_that_promises_less(probability: float, is_hung: bool) -> None:
    """One live node that is unlikely does not shut out a chain of eight; a longer chain that is surer does."""
    session = session_with_reliable_lookup()
    count = 1 if is_hung else 12
    draft = make_draft(len(CONTEXT), 0, list(range(40, 40 + count)), list(range(-1, count - 1)))
    graft(session, draft, 0.0)
    for _ in range(60):
        observe(session, 0, float(draft.scores[0]), accepted=bool(probability > 0.5))
    assert bool(look_up(session)) == is_hung


def test_what_a_drafter_sent_already_is_not_hung_twice() -> None:
    """A looked-up token that is live stands for both, and the rest hangs below it."""
    session = session_with_reliable_lookup()
    graft(session, make_draft(len(CONTEXT), 0, PHRASE[3:4], [-1]), 0.0)
    for _ in range(60):
        observe(session, 0, np.log(0.5), accepted=False)
    assert look_up(session) == LOOKUP_TOKENS - 1
    assert session.num_live == LOOKUP_TOKENS
    commit(session, PHRASE[3:6], 3)
    assert session.num_live == LOOKUP_TOKENS - 3


def test_near_its_end_a_text_has_room_for_a_shorter_lookup() -> None:
    """Of what would be tried there is only so much: the correction takes the last token."""
    session = make_session(CONTEXT, tokens_left=4)
    _, score = NgramIndex(session.token_ids).chain(1)
    for _ in range(60):
        observe(session, LOOKUP_LANE, score, accepted=True)
    assert look_up(session) == 3
    assert tuple(PHRASE[3:6]) in paths(session)
