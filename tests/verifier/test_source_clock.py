"""What a step says of each source of drafts: the seconds in which it was waited for, and what became of its nodes."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specq.drafting.draft_model.source import ColocatedSource
from specq.protocol import COLOCATED, COLOCATED_LANE, EAGLE, REMOTE, SUFFIX, SUFFIX_LANE
from specq.protocol.messages import Open
from specq.protocol.params import SamplingParams
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyChains, ToyProposer
from specq.verifier.control.choices import Step
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.models.token_yield import NUM_LEVELS
from specq.verifier.sources.source_clock import BITS, SourceClock, by_lane, judged_of
from specq.verifier.step.rounds import NO_ROUNDS
from tests.verifier.verifiers import chain, make_verifier, open_session, step

TICK_S = 1e-6
PROMPT = [5, 6, 7]


class OneRound(SimpleNamespace):
    """What is read of `Rounds`."""

    def __len__(self) -> int:
        return 1


def rounds_of(*nodes: tuple[tuple[str, ...], int, bool]) -> Any:
    """Return a round with nodes: the sources of each, its level, and whether it was accepted."""
    sources, levels, accepted = zip(*nodes, strict=True)
    return OneRound(
        nodes=np.arange(len(nodes)), levels=np.array(levels),
        is_accepted=np.array(accepted, np.uint8), num_nodes=np.array([len(nodes)]),
        offers=np.array([sum(BITS[one] for one in own) for own in sources]),
    )  # fmt: skip


def test_nodes_count_for_each_source_that_drafted_them_by_level() -> None:
    rounds = rounds_of(
        ((SUFFIX, REMOTE), 0, True), ((SUFFIX,), 1, False), ((REMOTE,), 1, True),
        ((SUFFIX,), 2, False), ((REMOTE,), NUM_LEVELS + 5, True),
    )  # fmt: skip
    found = judged_of(rounds, {SUFFIX: 2, REMOTE: 1, EAGLE: 3})
    assert {name: one.num_rounds for name, one in found.items()} == {SUFFIX: 2, REMOTE: 1, EAGLE: 3}
    assert (found[SUFFIX].nodes[:4].tolist(), found[SUFFIX].accepted[:3].tolist()) == ([1, 1, 1, 0], [1, 0, 0])
    assert (found[REMOTE].nodes[:2].tolist(), found[REMOTE].accepted[:2].tolist()) == ([1, 1], [1, 1])
    assert found[REMOTE].accepted[-1] == 1, "deeper ones count with the last level"
    assert not found[EAGLE].nodes.any()


def test_siblings_are_tried_together() -> None:
    """If one of three is accepted, the other two are no evidence against their level. Each counts as a node."""
    siblings = [((SUFFIX,), 0, number == 1) for number in range(3)]
    found = judged_of(rounds_of(*siblings, ((SUFFIX,), 1, False), ((SUFFIX,), 1, False)), {SUFFIX: 1})[SUFFIX]
    assert found.nodes[:3].tolist() == [3, 2, 0]
    assert (found.tried[:3].tolist(), found.accepted[:3].tolist()) == ([1, 1, 0], [1, 0, 0])


def test_a_level_is_tried_if_it_was_verified_behind_an_accepted_one() -> None:
    """Whether or not it hangs from the accepted node: a sibling without children ends the round."""
    nodes = [((SUFFIX,), 0, False), ((SUFFIX,), 0, True), ((SUFFIX,), 1, False), ((SUFFIX,), 2, False)]
    found = judged_of(rounds_of(*nodes), {SUFFIX: 1})[SUFFIX]
    assert (found.tried[:4].tolist(), found.accepted[:3].tolist()) == ([1, 1, 0, 0], [1, 0, 0])


def test_a_step_without_nodes_has_had_its_rounds() -> None:
    found = judged_of(NO_ROUNDS, {SUFFIX: 2})
    assert found[SUFFIX].num_rounds == 2
    assert not found[SUFFIX].nodes.any()


def test_of_a_chain_what_precedes_the_first_wrong_token_is_accepted() -> None:
    """In a real verifier, of drafts that were sent."""
    verifier, learned = make_verifier(), list[Step]()
    verifier.policy.learn = learned.append  # type: ignore[method-assign]
    open_session(verifier)
    for _ in range(2):
        step(verifier)
    session = verifier.sessions[7]
    right = toy_text(session.token_ids, 4)
    verifier.handle(chain([*right[:2], 49, right[3]], base_len=session.length, scores=[-0.01] * 4), 0.0)
    step(verifier)
    verifier.control.learn()
    judged = learned[-1].judged[REMOTE]
    assert judged.nodes.tolist() == [1] * 4 + [0] * (NUM_LEVELS - 4)
    assert judged.tried.tolist() == [1] * 3 + [0] * (NUM_LEVELS - 3)
    assert judged.accepted.tolist() == [1, 1] + [0] * (NUM_LEVELS - 2)


@pytest.mark.parametrize("wrong_every", [0, 3])
def test_seconds_and_nodes_of_a_step_are_counted_once(wrong_every: int) -> None:
    """Of each source: what it was asked for, and what was accepted."""
    engine, ticks, learned = ToyEngine(), count(), list[Step]()
    drafter = ColocatedSource(
        ToyChains(ToyProposer(wrong_every=wrong_every)), StepCurve([1, 64], [0.0005, 0.0005]), chain=3, fan_out=1
    )
    curve = StepCurve([1, 64], [0.005, 0.0113])
    verifier = Verifier(engine, curve, (drafter,), incarnation=1, measures_drafts=False)
    verifier.policy.learn = learned.append  # type: ignore[method-assign]
    message = Open(
        session_id=7, epoch=1, prompt_len=3, tokens_left=50, params=SamplingParams(),
        token_ids=np.array(PROMPT, np.int32),
    )  # fmt: skip
    verifier.handle(message, 0.0)
    for _ in range(8):
        verifier.begin(0.0, lambda: TICK_S * next(ticks))
        verifier.step(lambda: TICK_S * next(ticks))
    verifier.control.learn()
    drafted = [one for one in learned if one.rows.nodes]
    assert len(drafted) > 4
    for one in drafted:
        assert 3 * TICK_S <= one.waits[COLOCATED] < 100 * TICK_S  # begin, collect, observe: each asks the clock twice
        assert one.num_tokens == 1 + one.judged[COLOCATED].accepted.sum()
        assert one.rows.nodes == one.judged[COLOCATED].nodes.sum() > 0
        assert not one.judged[REMOTE].nodes.any()
    assert verifier.sources.clock.take(1, curve)[COLOCATED] == 0.0


def test_scratch_rows_cost_what_rows_cost() -> None:
    """They are requested and not judged. The taken rows are then gone."""
    clock, curve = SourceClock([EAGLE, SUFFIX]), StepCurve([1, 11], [0.01, 0.06])
    clock.add(EAGLE, 0.5, num_scratch=10)
    assert clock.take(11, curve) == {EAGLE: pytest.approx(0.55), SUFFIX: 0.0}
    assert clock.take(11, curve) == {EAGLE: 0.0, SUFFIX: 0.0}


def test_without_a_clock_no_time_is_counted() -> None:
    clock, ticks = SourceClock([SUFFIX]), count()
    with clock.of(SUFFIX, None):
        pass
    with clock.of(SUFFIX, lambda: float(next(ticks))):
        pass
    assert clock.take(1, StepCurve([1, 2], [1.0, 1.0])) == {SUFFIX: 1.0}


def test_nodes_are_counted_by_lane() -> None:
    lanes = np.array([COLOCATED_LANE, SUFFIX_LANE, COLOCATED_LANE], np.uint8)
    found = by_lane(lanes, np.array([1, 0, 0], np.uint8))
    assert found[COLOCATED_LANE].tolist() == [2, 1]
    assert found[SUFFIX_LANE].tolist() == [1, 0]
