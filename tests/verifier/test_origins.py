"""Where each token of a verdict comes from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specq.protocol.messages import Ack, Draft, Verdict
from specq.protocol.origins import COLOCATED, CORRECTED, DRAFT_WORKER, PLAIN, SUFFIX, SUFFIX_LANE, origin_names
from specq.testing.toy import toy_text
from specq.verifier.core import Verifier
from specq.verifier.sessions.grafting import batch_of_chains, graft_batch
from specq.verifier.sessions.session import Session
from tests.drafting.draft_model.colocated import open_session as open_beside
from tests.drafting.draft_model.test_colocated import complete, make
from tests.verifier.verifiers import PROMPT, chain, make_verifier, open_session, step

TEXT = toy_text(PROMPT, 12)
WRONG = 49


def origins(verdict: Verdict) -> tuple[str, ...]:
    """Return the names of a verdict's origins; empty for `plain` alone."""
    return origin_names(verdict.origins.tobytes())


def tree(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """Return a draft of likely nodes."""
    return chain(list(tokens), parent_ids=np.array(parents, np.int32), scores=[-0.01] * len(tokens))


def judged(draft: Draft, verifier: Verifier | None = None) -> Verdict:
    """Return the verdict on a draft."""
    verifier = verifier or make_verifier()
    open_session(verifier)
    verifier.handle(draft, 0.0)
    (verdict,) = step(verifier)
    assert len(verdict.node_ids) == len(draft.token_ids)
    return verdict


def test_without_drafts_the_origins_are_empty() -> None:
    verifier = make_verifier()
    open_session(verifier)
    (verdict,) = step(verifier)
    assert origins(verdict) == ()


@pytest.mark.parametrize(
    ("tokens", "parents", "expected"),
    [
        ([*TEXT[:2]], [-1, 0], (DRAFT_WORKER, DRAFT_WORKER, PLAIN)),
        ([*TEXT[:2], WRONG], [-1, 0, 1], (DRAFT_WORKER, DRAFT_WORKER, CORRECTED)),
        ([WRONG, TEXT[1]], [-1, 0], (CORRECTED,)),
        # A wrong sibling at the first place says nothing of the last; nor does what hangs from it.
        ([WRONG, TEXT[0]], [-1, -1], (DRAFT_WORKER, PLAIN)),
        ([WRONG, TEXT[0], WRONG], [-1, -1, 0], (DRAFT_WORKER, PLAIN)),
    ],
)
def test_a_token_is_accepted_corrected_or_plain(
    tokens: list[int], parents: list[int], expected: tuple[str, ...]
) -> None:
    """`corrected` where a verified draft hung from the end of the accepted path."""
    assert origins(judged(tree(tokens, parents))) == expected


def test_each_session_of_a_step_has_its_own() -> None:
    """One that accepts all, one that accepts none, one without drafts, and one that ends in the middle of its path."""
    verifier = make_verifier()
    for session_id, tokens_left in ((7, 50), (8, 50), (9, 50), (10, 9)):
        open_session(verifier, session_id, tokens_left=tokens_left)
    sessions = verifier.sessions
    while min(session.length for session in sessions.values()) == 3 or sessions[10].length < 10:
        step(verifier)
    assert sessions[10].limit - sessions[10].length == 2
    for session_id, tokens in ((7, next_of(sessions[7], 2)), (8, [WRONG] * 2), (10, next_of(sessions[10], 3))):
        verifier.handle(chain(tokens, session_id=session_id, base_len=sessions[session_id].length), 0.0)
    found = {verdict.session_id: origins(verdict) for verdict in step(verifier)}
    assert found == {
        7: (DRAFT_WORKER, DRAFT_WORKER, PLAIN),
        8: (CORRECTED,),
        9: (),
        10: (DRAFT_WORKER, PLAIN),
    }


def next_of(session: Session, count: int) -> list[int]:
    """Return how a session's text goes on."""
    return toy_text(session.token_ids, count)


def test_what_is_sent_again_says_the_same() -> None:
    """Also of rounds without drafts, which say nothing the first time."""
    verifier = make_verifier()
    open_session(verifier)
    step(verifier)
    verifier.handle(chain([TEXT[1], WRONG], base_len=4), 0.0)
    step(verifier)
    (again,) = verifier.handle(Ack(session_id=7, epoch=1, length=3, resend=True), 0.0)
    assert origins(again) == (PLAIN, DRAFT_WORKER, CORRECTED)
    (later,) = verifier.handle(Ack(session_id=7, epoch=1, length=5, resend=True), 0.0)
    assert origins(later) == (CORRECTED,)


def test_drafts_of_the_verifiers_own_process_are_named() -> None:
    """Those of the draft model beside the target."""
    own = make()
    open_beside(own)
    names = [name for verdict in complete(own) for name in origins(verdict)]
    assert set(names) <= {COLOCATED, PLAIN, CORRECTED}
    assert names.count(COLOCATED) > 30


def test_what_a_text_repeats_is_named() -> None:
    """By its lane."""
    verifier = make_verifier()
    open_session(verifier)
    session, tokens = verifier.sessions[7], np.array([[TEXT[0], WRONG]], np.int32)
    scores = np.full((1, 2), -0.01, np.float16)
    graft_batch(batch_of_chains([session], SUFFIX_LANE, tokens, np.array([2]), scores, is_measured=False), 0.0)
    (verdict,) = step(verifier)
    assert origins(verdict) == (SUFFIX, CORRECTED)
