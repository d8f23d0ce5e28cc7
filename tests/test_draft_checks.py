"""A malformed draft is named and dropped whole; a lane that is not trusted is stripped to point masses."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from specq.draft_checks import reason_against, stripped
from specq.messages import Draft
from specq.types import Tree
from tests.verification.strategies import VOCAB, sampled_trees

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
    laws = tree.laws
    return Draft(
        session_id=1, epoch=1, lane=0, base_len=5, first_id=0, token_ids=tree.token_ids, parent_ids=tree.parents,
        scores=tree.scores.astype(np.float16), q_size=laws.ids.shape[1] if laws else 0,
        q_ids=laws.ids.reshape(-1) if laws else np.zeros(0, np.int32),
        q_weights=laws.weights.reshape(-1) if laws else np.zeros(0, np.uint16),
        q_rows=laws.rows if laws else np.zeros(0, np.int32),
    )  # fmt: skip


@given(sampled_trees())
def test_well_formed_trees_pass(tree: Tree) -> None:
    """Families, each with a law of its own, point masses between them."""
    draft = draft_of(tree)
    assert reason_against(draft, VOCAB) == ""
    bare = stripped(draft)
    assert (bare.q_size, len(bare.q_ids), len(bare.q_weights), len(bare.q_rows)) == (0, 0, 0, 0)
    assert bare.token_ids is draft.token_ids


def changed(**arrays: Any) -> Draft:
    """Return the good draft with other arrays."""
    return replace(GOOD, **{n: np.array(v, getattr(GOOD, n).dtype) for n, v in arrays.items()})


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (changed(scores=[0, 0, 0]), "arrays differ in length"),
        (changed(scores=[0, 0, 0, np.nan]), "no log-probability"),
        (changed(scores=[0, 0, 0, 0.5]), "no log-probability"),
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
        (changed(q_rows=[0, 0, 2, -1]), "a law that is not there"),
        (changed(q_rows=[0, 0, -2, -1]), "a law that is not there"),
        (changed(q_ids=[3, 1, -1, 2, 0, 4]), "outside the vocabulary"),
        (changed(q_ids=[3, 1, -2, 2, 0, 1]), "outside the vocabulary"),
        (changed(q_weights=[5, 9, 1, 0, 1, 1]), "outside the vocabulary"),
        (changed(q_ids=[3, 1, 1, 2, 0, 1]), "a token twice"),
        (changed(q_weights=[0, 0, 0, 0, 1, 1]), "no weight"),
        (changed(q_rows=[0, 0, 1, -1]), "not drawn from its own law"),  # weight 0
        (changed(q_ids=[0, 1, -1, 2, 0, 1]), "not drawn from its own law"),
        (changed(q_ids=[3, 1, -1, 2, 0, 1], q_rows=[0, 1, -1, -1]), "different laws"),
        (changed(token_ids=[3, 1, 2, 3], q_rows=[0, 0, -1, 0]), "cousins one"),
    ],
)
def test_malformed_drafts_are_named(draft: Draft, reason: str) -> None:
    """Each fault has its message."""
    assert reason_against(GOOD, 4) == ""
    assert reason in reason_against(draft, 4)
