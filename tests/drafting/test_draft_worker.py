"""What a draft worker does before it registers."""

import numpy as np
import pytest

from specq.config.sections import DraftConfig
from specq.proposers import PROPOSERS, ProposerSpec
from specq.protocol.messages import Assign
from specq.protocol.params import SamplingParams
from specq.testing.toy import ToyProposer
from workers.draft import build_drafter


class Counting(ToyProposer):
    """Keeps the number of rows, and the temperatures, of each pass."""

    def __init__(self, model: str, **options: object) -> None:
        super().__init__()
        self.passes = []

    def expand(self, requests):
        rows = [len(self.contexts[r.session_id]) if r.node_id < 0 else 1 for r in requests]
        self.passes.append((sum(rows), {self.params[r.session_id].temperature for r in requests}))
        return super().expand(requests)


COUNTING = ProposerSpec(Counting)


@pytest.fixture(name="drafter")
def _drafter(monkeypatch):
    monkeypatch.setitem(PROPOSERS, "counting", f"{__name__}:COUNTING")
    return build_drafter(DraftConfig(model="tiny", proposer="counting"))


def test_it_has_drafted_in_all_ways_that_differ(drafter):
    """Few and many rows, with and without noise: whatever a GPU compiles for them is compiled."""
    passes = drafter.proposer.passes
    assert {0.0, 0.8} == {temperature for _, temperatures in passes for temperature in temperatures}
    for low, high in ((1, 1), (2, 16), (17, 32), (33, 512)):
        assert any(low <= rows <= high for rows, _ in passes), (low, high)


def test_nothing_is_left_of_it(drafter):
    """No session, no acceptance statistics, and no pass that the broker would take for work."""
    assert drafter.proposer.contexts == {}
    assert (drafter.sessions, drafter.acceptance_stats, drafter.num_passes) == ({}, {}, 0)
    context, params = np.array([5, 6], np.int32), SamplingParams()
    drafter.handle(Assign(session_id=1, epoch=1, lane=0, prompt_len=2, params=params, token_ids=context))
    assert [draft.session_id for draft in drafter.step()] == [1]
