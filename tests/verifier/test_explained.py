"""What became of drafts, from the verdict to the client, for a job that asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specq.protocol.explanation import MAX_REJECTED, MAX_ROUNDS, Explanation, RejectedDraft, read_rejected, rejected_of
from specq.protocol.messages import Open, Tokens, Verdict
from specq.protocol.origins import DRAFT_WORKER, ORIGINS, SUFFIX, SUFFIX_LANE
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.testing.toy import toy_text
from tests.verifier.verifiers import PROMPT, chain, make_verifier, open_session, step

TEXT = toy_text(PROMPT, 4)


def explained() -> Verdict:
    """Return the verdict on a tree: a wrong token with a child of its own, beside the right one with a wrong child."""
    verifier = make_verifier()
    fields = {"session_id": 7, "epoch": 1, "prompt_len": 3, "tokens_left": 50, "explain": True}
    verifier.handle(Open(**fields, params=SamplingParams(), token_ids=np.array(PROMPT, np.int32)), 0.0)
    parents = np.array([-1, -1, 0, 1], np.int32)
    scores = [-0.02, -0.01, -0.04, -0.03]
    verifier.handle(chain([49, TEXT[0], 48, 47], parent_ids=parents, scores=scores), 0.0)
    (verdict,) = step(verifier)
    assert len(verdict.mask) == 4
    found = decode(encode(verdict))
    assert isinstance(found, Verdict)
    return found


def test_without_the_option_a_verdict_says_no_more_than_ever() -> None:
    verifier = make_verifier()
    open_session(verifier)
    verifier.handle(chain([TEXT[0], 49]), 0.0)
    (verdict,) = step(verifier)
    assert [len(array) for array in (verdict.node_tokens, verdict.node_parents, verdict.node_probs)] == [0, 0, 0]


def test_the_rejected_of_a_verdict_have_place_source_and_probability() -> None:
    """Also what hung from a rejected one, at the place that it was drafted for."""
    rejected = rejected_of(explained(), place=10)
    assert {(draft.place, draft.token_id, draft.origin) for draft in rejected} == {
        (10, 49, DRAFT_WORKER),
        (11, 48, DRAFT_WORKER),
        (11, 47, DRAFT_WORKER),
    }
    (child,) = [draft for draft in rejected if draft.token_id == 48]
    assert rejected[child.parent].token_id == 49
    assert [draft.parent for draft in rejected if draft.token_id != 48] == [-1, -1]
    assert all(0 < draft.accept_prob <= 1 for draft in rejected)


def test_what_the_broker_keeps_arrives_as_it_is() -> None:
    """Of several rounds in one message, and of a part of them."""
    kept, verdict = Explanation(), replace(explained(), us=(2**32 - 1, 300))
    kept.add(verdict, 0)
    kept.add(replace(verdict, us=()), 2)
    message = decode(encode(tokens(**kept.arrays(0, 4))))
    assert isinstance(message, Tokens)
    rejected, rounds = read_rejected(message)
    assert [tuple(time) for time in rounds] == [(0, 2**31 - 1, 300), (2, 0, 0)]
    first = rejected_of(verdict, 0)
    shifted = [one._replace(place=one.place + 2, parent=one.parent + 3 * (one.parent >= 0)) for one in first]
    assert [plain(one) for one in rejected] == [plain(one) for one in (*first, *shifted)]
    assert len(kept.arrays(2, 4)["rejected_probs"]) == 3
    assert kept.arrays(4, 9) == {}


def tokens(**fields: Any) -> Tokens:
    return Tokens(job_id=1, base_len=0, token_ids=np.array([1], np.int32), origins=np.array([2], np.uint8), **fields)


def plain(draft: RejectedDraft) -> RejectedDraft:
    return draft._replace(accept_prob=round(draft.accept_prob, 5))


@pytest.mark.parametrize(
    "wrong",
    [
        {"node_tokens": np.array([1], np.int32)},
        {"node_lanes": np.array([], np.uint8)},
        {"node_parents": np.array([-1, 1, 0, 1], np.int32)},
        {"node_parents": np.array([-1, 3, 0, 1], np.int32)},
    ],
)
def test_nodes_that_do_not_fit_together_are_left_out(wrong: dict[str, Any]) -> None:
    """A parent comes before its children; there is one of each for each node."""
    assert rejected_of(replace(explained(), **wrong), 0) == []


@pytest.mark.parametrize("row", [(-1, 5, -1, 4), (0, -1, -1, 4), (0, 5, 0, 4), (0, 5, -1, len(ORIGINS)), (0, 5, -1)])
def test_a_client_believes_no_row_that_cannot_be(row: tuple[int, ...]) -> None:
    probs = np.array([0.5], np.float32)
    message = tokens(rejected=np.array(row, np.int32), rejected_probs=probs, rounds=np.array([0, 1, 1], np.int32))
    assert read_rejected(message) == ((), ())


def test_a_source_is_named_by_its_lane() -> None:
    verdict = replace(explained(), node_lanes=np.full(4, SUFFIX_LANE, np.uint8))
    assert {draft.origin for draft in rejected_of(verdict, 0)} == {SUFFIX}


def test_a_broker_keeps_a_limited_number_of_rounds() -> None:
    """A late reader gets the newest rounds."""
    kept, verdict = Explanation(), explained()
    for place in range(MAX_ROUNDS + 5):
        kept.add(verdict, place)
    arrays = kept.arrays(0, 10**6)
    assert len(arrays["rounds"]) == 3 * MAX_ROUNDS
    assert len(arrays["rejected_probs"]) <= MAX_REJECTED
    assert arrays["rounds"][0] == 5
