"""A drafter in the verifier's own process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specq.drafting.draft_model.source import ColocatedSource
from specq.protocol import COLOCATED, REMOTE
from specq.protocol.messages import COLOCATED_LANE, Ack, Close, Draft, Open, Verdict
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyChains, ToyProposer
from specq.verifier.control.choices import Choice, Step
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sources import Budget
from tests.verifier.sessions import candidates, live_nodes

PROMPT = [5, 6, 7]


class World:
    """A drafter of toy text and its verifier, which always uses it unless drafts are measured. A level takes half a
    millisecond."""

    def __init__(
        self, proposer: ToyProposer | None = None, chain: int = 6, *, fan_out: int = 3, measures_drafts: bool = False
    ) -> None:
        self.chains = ToyChains(proposer)
        levels, curve = StepCurve([1, 64], [0.0005, 0.0005]), StepCurve([1, 64], [0.005, 0.01])
        self.drafter = ColocatedSource(self.chains, levels, chain=chain, fan_out=fan_out)
        self.verifier = Verifier(ToyEngine(), curve, (self.drafter,), incarnation=1, measures_drafts=measures_drafts)

    def collect(self) -> None:
        """Hang what was drafted onto the trees, without a step."""
        self.verifier.sources.collect((), frozenset([REMOTE, COLOCATED]), Budget(self.verifier.curve, 0.0), lambda: 0.0)


def make(proposer: ToyProposer | None = None, **options: Any) -> World:
    """Return a drafter beside its verifier, without sessions."""
    return World(proposer, **options)


def open_session(own: World, session_id: int = 7, *, epoch: int = 1, mode: str = "async", **options: Any) -> None:
    """Open a session of fifty tokens; options are of its sampling or of its speculation."""
    shape = {name: options.pop(name) for name in list(options) if name in Speculation.__dataclass_fields__}
    message = Open(
        session_id=session_id, epoch=epoch, prompt_len=3, tokens_left=50, speculation=Speculation(mode=mode, **shape),
        params=SamplingParams(max_tokens=50, **options), token_ids=np.array(PROMPT, np.int32),
    )  # fmt: skip
    own.verifier.handle(message, 0.0)


def turn(own: World) -> list[Any]:
    """Draft and step; the broker confirms all. Every round takes a millisecond."""
    own.verifier.begin(own.verifier.num_steps / 1000)
    verdicts = list(own.verifier.step(lambda: own.verifier.num_steps / 1000))
    for verdict in verdicts:
        end = verdict.base_len + len(verdict.token_ids)
        own.verifier.handle(Ack(session_id=verdict.session_id, epoch=verdict.epoch, length=end), 0.0)
    return verdicts


def complete(own: World, most: int = 200) -> list[Verdict]:
    """Take turns until the one session has ended."""
    verdicts: list[Verdict] = []
    while not (verdicts and verdicts[-1].finish):
        verdicts += turn(own)
        assert len(verdicts) < most
    return verdicts


def learned_of(own: World) -> list[Step]:
    """Return a list that gets what is learned from now on."""
    found, learn = list[Step](), own.verifier.policy.learn

    def learned(step: Step) -> None:
        found.append(step)
        learn(step)

    own.verifier.policy.learn = learned  # type: ignore[method-assign]
    return found


def text(verdicts: list[Verdict]) -> list[int]:
    return [token for verdict in verdicts for token in verdict.token_ids.tolist()]


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("wrong_every", [0, 4])
def test_text_is_the_targets_in_fewer_rounds(mode: str, wrong_every: int) -> None:
    """Drafts are there for the next step, in both modes; a synchronous session never waits for them."""
    own = make(ToyProposer(wrong_every=wrong_every))
    open_session(own, mode=mode)
    verdicts = complete(own)
    assert text(verdicts) == toy_text(PROMPT, 50)
    assert len(verdicts) < 30
    assert sum(int(verdict.mask.sum()) for verdict in verdicts) > 20
    assert not sources(own)


@pytest.mark.parametrize(("mode", "strategy"), [("plain", "deterministic"), ("async", "greedy")])
def test_sessions_that_take_no_drafts_get_none(mode: str, strategy: str) -> None:
    """Such sessions decode plainly."""
    own = make()
    open_session(own, mode=mode, strategy=strategy)
    assert len(complete(own)) == 50


def test_closed_and_reopened_sessions_are_followed() -> None:
    """A session that is gone is dropped, one that is opened anew is taken up from where it stands then."""
    own = make()
    open_session(own)
    turn(own)
    turn(own)
    assert sources(own) == {7: own.verifier.sessions[7].token_ids}
    open_session(own, epoch=2)
    turn(own)
    turn(own)
    assert sources(own) == {7: own.verifier.sessions[7].token_ids}
    own.verifier.handle(Close(session_id=7, epoch=2), 0.0)
    own.verifier.begin(0.0)
    assert not sources(own)
    assert not own.verifier.has_work


def test_a_session_may_end_while_it_is_drafted_for() -> None:
    """What was drafted has no effect then."""
    own = make()
    for session_id in (1, 2):
        open_session(own, session_id, seed=session_id)
    turn(own)
    own.verifier.begin(0.0)
    own.verifier.handle(Close(session_id=1, epoch=1), 0.0)
    open_session(own, 2, epoch=2, seed=2)
    first = turn(own)
    assert text(first + complete(own)) == toy_text(PROMPT, 50, 2)


def test_several_sessions_share_a_round() -> None:
    """All texts are right, and rounds are no more than steps."""
    own = make()
    for session_id in (1, 2, 3):
        open_session(own, session_id, seed=session_id)
    verdicts: list[Verdict] = []
    for _ in range(60):
        verdicts += turn(own)
    for session_id in (1, 2, 3):
        mine = [verdict for verdict in verdicts if verdict.session_id == session_id]
        assert text(mine) == toy_text(PROMPT, 50, session_id)
    assert own.drafter.num_passes <= own.verifier.num_steps
    assert own.chains.num_started.count(3) >= 4


def test_drafts_of_others_hang_beside_ours() -> None:
    """A session with a doubtful node of a draft worker takes ours onto the same tree; the text is right, both are
    verified."""
    own = make(ToyProposer(wrong_every=3, blind=True))
    open_session(own)
    verdicts = turn(own)
    for round_number in range(200):
        session = own.verifier.sessions[7]
        others = Draft(
            session_id=7, epoch=1, lane=0, base_len=session.length, first_id=round_number,
            token_ids=np.array([49], np.int32), parent_ids=np.array([-1], np.int32), scores=np.array([-1], np.float16),
        )  # fmt: skip
        own.verifier.handle(others, 0.0)
        verdicts += turn(own)
        if verdicts[-1].finish:
            break
    assert text(verdicts) == toy_text(PROMPT, 50)
    assert any({0, COLOCATED_LANE} <= set(verdict.node_lanes.tolist()) for verdict in verdicts)


def test_no_chain_is_drafted_when_other_drafts_promise_enough() -> None:
    """A tree that promises as much as a chain would is enough; one that is nearly empty is not."""
    own = make()
    open_session(own)
    turn(own)
    turn(own)
    session = own.verifier.sessions[7]
    for count, is_drafted_for in ((1, True), (8, False)):
        others = Draft(
            session_id=7, epoch=1, lane=count, base_len=session.length, first_id=0,
            token_ids=np.array(toy_text(session.token_ids, count), np.int32),
            parent_ids=np.arange(-1, count - 1, dtype=np.int32), scores=np.full(count, -0.01, np.float16),
        )  # fmt: skip
        own.verifier.handle(others, 0.0)
        own.collect()
        own.verifier.policy.promised = 4.0
        own.verifier.begin(0.0)
        before = own.drafter.num_passes
        own.collect()
        assert (own.drafter.num_passes > before) is is_drafted_for


def test_what_a_drawn_tree_promises_is_not_looked_at() -> None:
    """Whether our nodes stand beside it must not depend on its tokens, and so on what hangs from these."""
    own = make()
    open_session(own, strategy="probabilistic", temperature=1.0)
    turn(own)
    session = own.verifier.sessions[7]
    count = 8
    drawn = Draft(
        session_id=7, epoch=1, lane=1, base_len=session.length, first_id=0, token_ids=np.full(count, 9, np.int32),
        parent_ids=np.arange(-1, count - 1, dtype=np.int32), scores=np.full(count, -0.01, np.float16), q_size=1,
        q_ids=np.full(count, 9, np.int32), q_weights=np.full(count, 65535, np.uint16),
        q_rows=np.arange(count, dtype=np.int32),
    )  # fmt: skip
    own.verifier.handle(drawn, 0.0)
    own.collect()
    own.verifier.policy.promised = 4.0
    assert sum(node.reach_prob for node in candidates(session, 0.0)) > own.verifier.policy.promised
    own.verifier.begin(0.0)
    before = own.drafter.num_passes
    own.collect()
    assert own.drafter.num_passes > before


def test_chains_carry_their_lane_beside_those_of_others() -> None:
    """A drafter that has sent something before does not take our nodes for its own."""
    own = make()
    open_session(own)
    turn(own)
    gone = Draft(
        session_id=7, epoch=1, lane=0, base_len=1, first_id=0,
        token_ids=np.array([49], np.int32), parent_ids=np.array([-1], np.int32), scores=np.array([-1], np.float16),
    )  # fmt: skip
    own.verifier.handle(gone, 0.0)
    own.drafter.fan_out = 1
    (verdict,) = turn(own)
    assert verdict.seen == (0, 0, COLOCATED_LANE, len(verdict.node_ids) - 1)
    assert verdict.node_lanes.tolist() == [COLOCATED_LANE] * len(verdict.node_ids)


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
    num_verified = sum(len(verdict.node_ids) for verdict in verdicts)
    assert sum(step.judged[COLOCATED].nodes.sum() for step in learned) == num_verified


@pytest.mark.parametrize("speculation", [{"max_depth": 2}, {"max_nodes": 2}])
def test_a_jobs_bounds_are_kept(speculation: dict[str, int]) -> None:
    """No round verifies more than the job allows; levels have three children where only their number is bounded."""
    own = make()
    open_session(own, **speculation)
    verdicts = complete(own)
    assert max(int(verdict.mask.sum()) for verdict in verdicts) == 2
    assert max(len(verdict.node_ids) for verdict in verdicts) == (6 if "max_depth" in speculation else 2)


def test_a_shape_of_its_own_is_left_to_draft_workers() -> None:
    """Without draft workers, such a job decodes plainly."""
    own = make()
    open_session(own, num_candidates=2)
    assert len(complete(own)) == 50


def test_without_room_at_the_drafter_the_others_are_drafted_for() -> None:
    """The session that found none decodes plainly."""
    own = make()
    own.chains.most_sessions = 1
    for session_id in (1, 2):
        open_session(own, session_id, seed=session_id)
    verdicts: list[Verdict] = []
    for _ in range(60):
        verdicts += turn(own)
    rounds = [sum(verdict.session_id == session_id for verdict in verdicts) for session_id in (1, 2)]
    assert min(rounds) < 30
    assert max(rounds) > 40
    for session_id in (1, 2):
        assert text([v for v in verdicts if v.session_id == session_id]) == toy_text(PROMPT, 50, session_id)


def test_useless_chains_end() -> None:
    """A drafter that is always wrong is asked for nothing but a trial now and then."""
    own = make(ToyProposer(wrong_every=1, blind=True), measures_drafts=True)
    open_session(own)
    complete(own)
    early = own.drafter.num_passes
    open_session(own, 8)
    complete(own)
    assert own.drafter.num_passes - early < 8


def test_drawn_chains_are_judged_as_drawn() -> None:
    """Under `probabilistic` the chain travels with its draft distributions, and is accepted about as often as they
    predict."""
    own = make()
    open_session(own, strategy="probabilistic", temperature=1.0)
    turn(own)
    own.verifier.begin(0.0)
    own.collect()
    nodes = live_nodes(own.verifier.sessions[7])
    assert nodes
    assert all(node.distribution is not None for node in nodes)


def sources(own: World) -> dict[int, list[int]]:
    """Return the contexts that the source of chains holds."""
    return own.chains.drafter.contexts


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


@pytest.mark.parametrize("fan_out", [1, 3])
def test_a_chain_without_room_is_dropped(fan_out):
    """A text may have come to its end between the beginning of its chain and the step; others get theirs."""
    own = make()
    own.drafter.fan_out = fan_out
    for session_id in (1, 2):
        open_session(own, session_id)
    for _ in range(4):
        turn(own)
    own.verifier.begin(0.0)
    ended, other = (own.verifier.sessions[session_id] for session_id in (1, 2))
    own.verifier.trees.limit[ended.place] = ended.length
    own.collect()
    assert live_nodes(other)
    assert not live_nodes(ended)
