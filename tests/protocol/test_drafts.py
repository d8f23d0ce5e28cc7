"""The drafts of several sessions in one message mean what the single drafts mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.protocol import Draft, Drafts, ProtocolError, are_valid, decode, encode, reason_against

VOCAB = 20


def drafted(session_id: int, size: int = 3, **changes: object) -> Draft:
    fields: dict[str, object] = {
        "session_id": session_id, "epoch": 2, "lane": 1, "base_len": 5 + session_id, "first_id": 10,
        "token_ids": np.arange(size, dtype=np.int32), "parent_ids": np.arange(9, 9 + size, dtype=np.int32),
        "scores": np.linspace(-1, 0, size).astype(np.float16),
    }  # fmt: skip
    return Draft(**fields | changes)  # type: ignore[arg-type]


@st.composite
def any_draft(draw: st.DrawFn) -> Draft:
    """Return a draft that may break any rule."""
    size = draw(st.integers(0, 5))
    columns = [draw(st.lists(one, min_size=size, max_size=size)) for one in (
        st.sampled_from([0, 1, 1, 2, VOCAB]), st.integers(-1, 4), st.sampled_from([-1.0] * 9 + [0.5, float("nan")]),
    )]  # fmt: skip
    return drafted(
        draw(st.integers(0, 9)), epoch=0, lane=draw(st.sampled_from([0, 100, 255])), base_len=draw(st.integers(0, 9)),
        first_id=draw(st.sampled_from([0, 1, 2**31 - 1])), token_ids=np.array(columns[0], np.int32),
        parent_ids=np.array(columns[1], np.int32), scores=np.array(columns[2], np.float16),
    )  # fmt: skip


@given(st.lists(any_draft(), min_size=1, max_size=4))
def test_they_are_valid_iff_each_is(drafts: list[Draft]) -> None:
    assert are_valid(Drafts.of(drafts), VOCAB) == (not any(reason_against(one, VOCAB) for one in drafts))


def test_each_returns_what_was_packed() -> None:
    drafts = [drafted(1), drafted(2, 0), drafted(3, 5)]
    sent = decode(encode(Drafts.of(drafts)))
    assert isinstance(sent, Drafts)
    sent.check()
    assert sent.each() == drafts
    assert sent.take([0, 2]).each() == [drafts[0], drafts[2]]


def test_few_messages_are_sent() -> None:
    """One with distributions goes alone, and so does the only one without. No message is larger than the limit."""
    sampled = drafted(1, 1, q_size=1, q_ids=np.zeros(1), q_weights=np.ones(1), q_rows=np.zeros(1))
    assert Drafts.packed([]) == []
    assert Drafts.packed([sampled, drafted(2)]) == [sampled, drafted(2)]
    assert Drafts.packed([drafted(2), sampled, drafted(3)]) == [sampled, Drafts.of([drafted(2), drafted(3)])]
    large = [drafted(i, 4096, parent_ids=np.full(4096, -1, np.int32)) for i in range(3)]
    assert [len(one.token_ids) for one in Drafts.packed(large)] == [8192, 4096]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("epochs", np.ones(3, np.int64), "epochs has 3 elements, not 2"),
        ("scores", np.zeros(5, np.float16), "scores has 5 elements, not 6"),
        ("num_nodes", np.array([3, 4], np.int32), "token_ids has 6 elements, not 7"),
    ],
)
def test_arrays_that_do_not_fit_together_are_named(field: str, value: object, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        replace(Drafts.of([drafted(1), drafted(2)]), **{field: value}).check()


def test_only_siblings_of_one_draft_must_differ() -> None:
    """Here the first draft has two children of the root with the same token; the others repeat each other."""
    twins = drafted(1, 2, token_ids=np.array([3, 3], np.int32), parent_ids=np.array([-1, -1], np.int32))
    assert not are_valid(Drafts.of([twins, drafted(2)]), VOCAB)
    assert are_valid(Drafts.of([drafted(2), drafted(2)]), VOCAB)
