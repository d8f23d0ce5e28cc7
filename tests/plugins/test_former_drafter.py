"""A proposer of the previous version, without a base class, drafts as a `Drafter` does."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from specq.drafting import Children, Drafter, Expansion, as_drafter
from specq.drafting.worker import DraftWorker
from specq.proposers import ProposerSpec
from specq.protocol import (
    BF16,
    NO_ACTIVATIONS,
    ActivationRequest,
    Assign,
    ConfigError,
    Draft,
    Float32Array,
    SamplingParams,
)
from specq.testing import ProposerConformance
from specq.testing.toy_drafters import ToyProposer


class Before:
    """The four methods that a proposer needed."""

    def __init__(self, model: str = "") -> None:
        toy = ToyProposer()
        self.info, self.open, self.close, self.commit, self.expand = (
            *(toy.info, toy.open, toy.close, toy.commit, toy.expand),
        )


class BeforeWithAll(Before):
    """Those that it could have, too, and notes of their calls."""

    has_chains, activations, width = True, ActivationRequest((0, 1), BF16, 8), 6
    maker: object = "maker"

    def __init__(self, model: str = "") -> None:
        super().__init__(model)
        self.calls: list[tuple[object, ...]] = []

    def expand_chain(self, requests: Sequence[Expansion], depth: int) -> list[list[Children]]:
        self.calls.append(("expand_chain", depth))
        return Drafter.expand_chain(self, requests, depth)  # type: ignore[arg-type]

    def rewind(self, session_id: int, length: int) -> None:
        self.calls.append(("rewind", session_id, length))

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:
        self.calls.append(("observe", session_id, first, len(states)))

    def knows(self, session_id: int) -> bool:
        return ("observe", session_id, 1, 2) in self.calls


class TestBefore(ProposerConformance):
    @pytest.fixture
    def proposer(self) -> Drafter:
        return as_drafter(ProposerSpec(Before).make())


def drafts(made: object) -> list[tuple[list[int], list[int]]]:
    """Return the tokens and parents that a draft worker with it sends in three passes."""
    worker = DraftWorker(made, incarnation=1, chain=4)  # type: ignore[arg-type]
    worker.handle(
        Assign(
            session_id=7, epoch=1, lane=0, prompt_len=3, params=SamplingParams(), token_ids=np.array([5, 6, 7],
            np.int32)
        )
    )  # fmt: skip
    if worker.drafter.activations.layers:
        assert not worker.step()  # it has no states to draft from
        worker.drafter.observe(7, 1, np.zeros((2, 6), np.float32))
    sent: list[Draft] = [draft for _ in range(3) for draft in worker.step()]
    return [(draft.token_ids.tolist(), draft.parent_ids.tolist()) for draft in sent]


def test_a_draft_worker_drafts_with_it() -> None:
    """As with one that is derived from `Drafter`."""
    assert drafts(Before()) == drafts(ToyProposer()) != []


def test_what_it_could_have_is_used() -> None:
    made = BeforeWithAll()
    assert drafts(made)
    assert made.calls[:2] == [("observe", 7, 1, 2), ("expand_chain", 4)]
    drafter = as_drafter(made)
    assert (drafter.activations, drafter.width, drafter.has_chains) == (made.activations, 6, True)
    assert drafter.rewind(7, 2)
    assert made.calls[-1] == ("rewind", 7, 2)
    drafter.maker = "another"
    assert (made.maker, drafter.maker) == ("another", "another")


def test_what_it_has_not_is_as_of_a_drafter_without() -> None:
    drafter = as_drafter(Before())
    assert as_drafter(drafter) is drafter
    assert (drafter.activations, drafter.maker, drafter.has_chains) == (NO_ACTIVATIONS, None, False)
    assert (drafter.rewind(7, 2), drafter.knows(7)) == (False, True)


class BeforeOwners(Before):
    """Written when texts had no owners."""

    def __init__(self, model: str = "") -> None:
        super().__init__(model)
        toy_open = self.open

        def opened(session_id: int, token_ids: Sequence[int], params: SamplingParams) -> None:
            toy_open(session_id, np.array(token_ids, np.int32), params)

        self.open = opened


def test_one_that_knows_no_owners_drafts_the_same():
    assert drafts(BeforeOwners()) == drafts(Before())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "NoneType is not a drafter: its `info` must be a specq.protocol.ModelInfo"),
        (SimpleNamespace(info=None), "its `info` must be"),
        (SimpleNamespace(info=Before().info, open=print, close=print, commit=print), "it has no `expand`"),
    ],
)
def test_an_invalid_drafter_class_is_named(made: object, said: str):
    with pytest.raises(ConfigError, match=re.escape(said)):
        as_drafter(made)
