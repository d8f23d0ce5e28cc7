"""What a verifier learns of a colocated draft model's chains, and when it uses them."""

from collections.abc import Callable
from typing import Any

import pytest

from specq.protocol import COLOCATED
from specq.testing.toy_drafters import ToyProposer
from specq.verifier.control.choices import Choice, Step
from tests.drafting.draft_model.colocated import World, complete, make, open_session, turn


def learned_of(own: World) -> list[Step]:
    """Return a list that gets what is learned from now on."""
    found, learn = list[Step](), own.verifier.policy.learn

    def learned(step: Step) -> None:
        found.append(step)
        learn(step)

    own.verifier.policy.learn = learned  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("fan_out", [1, 3])
def test_scores_are_measured_over_all_sessions_and_not_once_more_by_one(fan_out: int) -> None:
    """With siblings as without; the few verdicts of one session would make its chains look worse than they are."""
    own = make(ToyProposer(wrong_every=5))
    own.drafter.fan_out = fan_out
    open_session(own)
    for _ in range(4):
        turn(own)
    own.verifier.begin(0.0)
    own.collect()
    session = own.verifier.sessions[7]
    nodes = session.trees.operations.live(session.place)
    assert len(nodes) > 0
    assert [bool(session.trees.views.is_measured[int(node)]) for node in nodes] == [True] * len(nodes)


def test_only_judged_tokens_are_learned_from() -> None:
    """Tokens after the first rejected one are no evidence."""
    own = make(ToyProposer(wrong_every=5, blind=True), fan_out=1)
    learned = learned_of(own)
    open_session(own)
    complete(own)
    judged = [step.judged[COLOCATED] for step in learned if step.rows.nodes]
    assert len(judged) > 5
    assert {one.tried.sum() - one.accepted.sum() for one in judged} == {0, 1}
    assert all(one.num_rounds == 1 and one.tried.max() == 1 for one in judged)


def test_a_step_drafts_as_it_was_decided_when_it_began() -> None:
    """A decision that falls between holds for the next one."""
    own, learned = make(fan_out=1), list[Step]()
    own.verifier.policy.learn = learned.append  # type: ignore[method-assign]
    open_session(own)
    turn(own)
    for session_id in (8, 9):
        open_session(own, session_id)
    turn(own)
    policy = own.verifier.policy
    for depth, looked_at in ((3, frozenset[str]()), (2, frozenset([COLOCATED])), (1, frozenset[str]())):
        own.verifier.begin(own.verifier.num_steps / 1000)
        policy.depth, policy.looked_at = depth, looked_at
        turn(own)
    own.verifier.control.learn()
    counts = [(step.depth, step.judged[COLOCATED].num_rounds) for step in learned[-2:]]
    assert counts == [(3, 3), (2, 1)]
    assert [step.judged[COLOCATED].nodes.sum() for step in learned[-2:]] == [9, 2]


def test_draft_time_is_not_part_of_the_step_time() -> None:
    """What a draft takes is known by itself; the step's curve does not learn it once more."""
    own, now = make(), 0.0
    learned, collect, compute = learned_of(own), own.chains.collect, own.verifier.engine.step

    def after(seconds: float, does: Callable[..., Any]) -> Callable[..., Any]:
        def done(*given: Any) -> Any:
            nonlocal now
            now += seconds
            return does(*given)

        return done

    own.chains.collect = after(0.01, collect)  # type: ignore[method-assign]
    own.verifier.engine.step = after(0.005, compute)  # type: ignore[method-assign]
    open_session(own)
    while not all(session.finish for session in own.verifier.sessions.values()):
        own.verifier.begin(now)
        own.verifier.step(lambda: now)
    drafted = [step for step in learned if step.rows.nodes]
    assert own.drafter.num_passes > 5
    assert [step.waits[COLOCATED] for step in drafted] == pytest.approx([0.01] * len(drafted))
    assert own.verifier.curve(1) < 0.006


def test_drawn_chains_are_learned_from() -> None:
    """Of each verified node it is known whether the judge took it."""
    own = make()
    learned = learned_of(own)
    open_session(own, strategy="probabilistic", temperature=1.0)
    verdicts = complete(own)
    own.verifier.control.learn()
    num_verified = sum(len(verdict.node_ids) for verdict in verdicts)
    assert sum(step.judged[COLOCATED].nodes.sum() for step in learned) == num_verified


def test_useless_chains_end() -> None:
    """A drafter that is always wrong is asked for nothing but a trial now and then."""
    own = make(ToyProposer(wrong_every=1, blind=True), measures_drafts=True)
    open_session(own)
    complete(own)
    early = own.drafter.num_passes
    open_session(own, 8)
    complete(own)
    assert own.drafter.num_passes - early < 8


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_where_it_does_not_pay_only_synchronous_sessions_are_drafted_for(mode: str) -> None:
    """The controller that measures it decides; what is drafted is counted for it."""
    own = make()
    assert COLOCATED in own.verifier.policy.allowed
    open_session(own, mode=mode)
    own.verifier.policy.used = Choice()
    for _ in range(5):
        turn(own)
    assert bool(own.verifier.sources.num_sent[COLOCATED]) == bool(own.drafter.num_passes) == (mode == "sync")
