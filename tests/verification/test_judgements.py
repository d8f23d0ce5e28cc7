"""Judgements as arrays: an invalid judgement may not take data of another session."""

from __future__ import annotations

import numpy as np
import pytest

from specq.protocol import EngineError, EngineLostError, Fault, Judgement
from specq.runtime import Faults
from specq.verification import Judgements
from specq.verifier.step.node_choice import NO_SHARES
from specq.verifier.step.verdicts import commit
from tests.each import each


def judgement(session_id: int, path: tuple[int, ...], num_tokens: int, fault: Fault | None = None) -> Judgement:
    return Judgement(session_id, path, np.arange(num_tokens, dtype=np.int32), fault=fault)


@each("wrong", [judgement(7, (0, 1), 2), judgement(7, (), 0), judgement(7, (), 1, Fault("no")), judgement(7, (0,), 3)])
def test_tokens_that_do_not_fit_the_path_are_an_error(wrong: Judgement) -> None:
    """The totals of two may fit all the same."""
    others = [judgement(8, (), 2), judgement(9, (0,), 2)]
    with pytest.raises(EngineError, match=r"session [78] was judged wrongly"):
        Judgements.of([wrong, *others])


def test_matching_judgements_keep_their_nodes() -> None:
    found = Judgements.of([judgement(7, (2, 4), 3), judgement(8, (), 0, Fault("no")), judgement(9, (), 1)])
    assert [(one.path, len(one.token_ids)) for one in found] == [((2, 4), 3), ((), 0), ((), 1)]


def test_as_many_judgements_as_sessions() -> None:
    with pytest.raises(EngineLostError, match="1 judgements for 0 sessions"):
        commit(NO_SHARES, Judgements.of([judgement(7, (), 1)]), 0, Faults())
