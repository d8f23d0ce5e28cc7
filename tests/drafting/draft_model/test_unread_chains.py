"""Chains that a step verifies before the host has read them: what is said is what would be said of chains that were
read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specq.drafting.draft_model.offered_chains import UsualScores, batch_of_unread, distinct
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.suffix.source import SuffixDecoder
from specq.protocol import COLOCATED
from specq.protocol.messages import Close, Open, Verdict
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.late import LateEngine
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyProposer, UnreadToyChains
from specq.verification import NO_TOKEN, DeviceTokens, handles
from specq.verifier.control.choices import Choice, Step
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.grafting import graft_batch
from tests.verifier.timed_target import Machine

PROMPT = [5, 6, 7]
LEVELS = 4


class KnowingEngine(LateEngine):
    """It overlaps, but drafted tokens are to be known when a step is launched, as for vLLM."""

    takes_unread = False


class World:
    """A verifier whose engine overlaps, and a colocated drafter of toy text."""

    def __init__(
        self, is_unread: bool | None, width: int = 3, engine: ToyEngine | None = None, sources: Any = (),
        curve: StepCurve | None = None, measures_drafts: bool = False, **params: Any,
    ) -> None:  # fmt: skip
        self.chains = UnreadToyChains(ToyProposer(wrong_every=4))
        levels = StepCurve([1, 64], [0.0002, 0.0002])
        self.drafter = ColocatedSource(self.chains, levels, fan_out=width, chain=LEVELS, is_unread=is_unread)
        curve = curve or StepCurve([1, 64], [0.005, 0.0051])
        given = [self.drafter, *sources]
        self.verifier = Verifier(engine or LateEngine(), curve, given, incarnation=1, measures_drafts=measures_drafts)
        self.params = SamplingParams(**params)

    def open(self, session_id: int, mode: str = "sync", **shape: Any) -> None:
        message = Open(
            session_id=session_id, epoch=1, prompt_len=3, tokens_left=60, params=self.params, explain=True,
            token_ids=np.array(PROMPT, np.int32), speculation=Speculation(mode=mode, **shape),
        )  # fmt: skip
        assert self.verifier.handle(message, 0.0) == []

    def run(self) -> list[Verdict]:
        """Step until all sessions have ended."""
        said: list[Any] = []
        for _ in range(200):
            self.verifier.begin(0.0)
            if not self.verifier.has_work:
                return said
            said += self.verifier.step(lambda: 0.0)
        raise AssertionError("the sessions never end")


def learned_of(world: World) -> list[Step]:
    """Return a list that gets what is learned from now on."""
    found = list[Step]()
    world.verifier.policy.learn = found.append  # type: ignore[method-assign]
    return found


def test_what_is_said_is_what_would_be_said_of_chains_that_were_read() -> None:
    """The same tokens, nodes, and fates of these; and the drafter learns the same."""
    worlds = [World(is_unread, width=1) for is_unread in (True, False)]
    told, learned = [], []
    for world in worlds:
        for session_id in (7, 8):
            world.open(session_id)
        learned.append(learned_of(world))
        told.append(
            [
                (one.session_id, *(part.tolist() for part in (one.token_ids, one.node_ids, one.mask, one.node_tokens)))
                for one in world.run()
            ]
        )
    assert told[0] == told[1]
    assert [world.chains.num_unread > 10 for world in worlds] == [True, False]
    scores = np.log(np.array([0.8, 0.1]))
    probabilities = [[world.drafter.calibration.probability(score) for score in scores] for world in worlds]
    assert probabilities[0] == probabilities[1]
    judged = [[str(step.judged[COLOCATED]) for step in steps] for steps in learned]
    assert judged[0] == judged[1]
    assert sum(step.judged[COLOCATED].accepted.sum() for step in learned[0]) > 20
    tokens = [token for session_id, own, *_ in told[0] if session_id == 7 for token in own]
    assert tokens == toy_text(PROMPT, 60)


@pytest.mark.parametrize("engine", [LateEngine, ToyEngine])
def test_the_next_chains_begin_before_the_verdicts_are_made(engine: type[ToyEngine]) -> None:
    """With an engine on a device, which has nothing to do meanwhile; and they begin once."""
    world = World(True, engine=engine())
    world.open(7)
    for turn in range(1, 8):
        world.verifier.begin(0.0)
        assert len(world.chains.num_started) == turn - 1  # nothing to draft for before the prompt is computed
        assert len(list(world.verifier.step(lambda: 0.0))) == 1
        assert world.drafter.has_work is (engine is LateEngine)
        assert len(world.chains.num_started) == turn - (engine is ToyEngine)


@pytest.mark.parametrize(
    ("why", "are_unread"),
    [
        ({}, True),
        ({"mode": "async"}, True),
        ({"engine": ToyEngine}, False),
        ({"engine": KnowingEngine}, False),
        ({"is_unread": False}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logprobs": 0}, False),
        ({"strategy": "probabilistic", "temperature": 1.0}, False),
        ({"strategy": "probabilistic"}, False),
        ({"sources": [SuffixDecoder]}, True),
        ({"sources": [SuffixDecoder], "mode": "async"}, False),
        ({"max_nodes": 4}, False),
    ],
    ids=str,
)
def test_where_something_is_to_be_looked_at_chains_are_read_first(why: dict[str, Any], are_unread: bool) -> None:
    """By the plan, by the judge, or by another source."""
    why = {"is_unread": True} | why
    shape = {name: why.pop(name) for name in ("mode", "max_nodes") if name in why}
    engine, sources = why.pop("engine", LateEngine)(), [make() for make in why.pop("sources", ())]
    world = World(engine=engine, sources=sources, **why)
    world.open(7, **shape)
    verdicts = world.run()
    assert (world.chains.num_unread > 0) is are_unread
    if "strategy" not in why:
        assert [token for one in verdicts for token in one.token_ids.tolist()] == toy_text(PROMPT, 60)


@pytest.mark.parametrize(("launch_s", "more_s", "are_unread"), [(0.003, 0.0, True), (0.001, 0.004, False)])
def test_chains_are_unread_where_that_is_found_to_be_faster(launch_s: float, more_s: float, are_unread: bool) -> None:
    """It saves the time in which the device waits for the host to launch a step, unless the step takes so much more
    then."""
    world, machine, done_at = World(None, width=1, measures_drafts=True), Machine(), dict[str, float]()
    start, finish, launch = world.chains.start, world.chains.collect, world.verifier.engine.launch  # type: ignore[attr-defined]
    collect = world.verifier.engine.collect  # type: ignore[attr-defined]

    def started(*given: Any) -> Any:
        done_at["draft"] = machine.launch(0.004)
        return start(*given)

    def finished() -> Any:
        machine.wait(done_at["draft"])
        return finish()

    def launched(batch: Any, *given: Any) -> Any:
        machine.work(launch_s)
        done_at["step"] = machine.launch(0.005 + more_s * (batch.drafted is not None))
        return launch(batch, *given)

    def collected(late: Any) -> Any:
        machine.wait(done_at["step"])
        return collect(late)

    world.chains.start, world.chains.collect = started, finished  # type: ignore[method-assign]
    world.verifier.engine.launch, world.verifier.engine.collect = launched, collected  # type: ignore[attr-defined]
    num_rounds = 0
    for session_id in range(16):  # one after the other
        world.open(session_id, "async")
        while world.verifier.has_work:
            world.verifier.begin(machine.now)
            world.verifier.step(machine)
            num_rounds += 1
        world.verifier.handle(Close(session_id=session_id, epoch=1), 0.0)
    assert num_rounds > 200
    assert (world.chains.num_unread > 0.7 * num_rounds) is are_unread
    assert (world.chains.num_unread < 0.2 * num_rounds) is not are_unread


@pytest.mark.parametrize(("is_unread", "waits_s"), [(True, 0.004), (True, 0.0), (False, 0.004), (False, 0.0)])
@pytest.mark.parametrize("is_chosen", [True, False])
def test_what_a_draft_takes_is_what_the_host_waits_for_it(is_unread: bool, waits_s: float, is_chosen: bool) -> None:
    """Not what it takes to launch the step, before or after. Only where that is left to choose, steps of unread drafts
    are of a kind of their own."""
    world, now = World(None if is_chosen else is_unread, width=1), [0.0]
    world.verifier.policy.used = Choice(frozenset({COLOCATED}), is_unread)
    finish, launch = world.chains.collect, world.verifier.engine.launch  # type: ignore[attr-defined]

    def after(seconds: float, does: Any) -> Any:
        def done(*given: Any) -> Any:
            now[0] += seconds
            return does(*given)

        return done

    world.chains.collect = after(waits_s, finish)  # type: ignore[method-assign]
    world.verifier.engine.launch = after(0.003, launch)  # type: ignore[attr-defined]
    learned = learned_of(world)
    world.open(7)
    for _ in range(8):
        world.verifier.begin(now[0])
        world.verifier.step(lambda: now[0])
    assert (world.chains.num_unread > 3) is is_unread
    drafted = [step for step in learned if step.judged[COLOCATED].nodes.any()]
    assert len(drafted) > 3
    kinds = {step.kind.is_unread for step in drafted[1:]}  # of the first one nothing is usual yet
    assert kinds == {is_unread and is_chosen}
    assert all(step.waits[COLOCATED] == pytest.approx(waits_s) for step in drafted)


def test_a_tree_with_other_nodes_is_read_first() -> None:
    """Since a token that is not known may be one that hangs there already."""
    world = World(True)
    world.open(7)
    while world.chains.num_unread < 2:
        world.verifier.begin(0.0)
        world.verifier.step(lambda: 0.0)
    session = world.verifier.sessions[7]
    world.verifier.begin(0.0)
    own = DeviceTokens(np.array([49], np.int32))
    graft_batch(batch_of_unread([session], own, np.array([1]), np.full((1, 1), -0.1, np.float32)), 0.0)
    before = world.chains.num_unread
    world.verifier.sources.collect(
        [session], world.verifier.policy.allowed, world.verifier._budget(), lambda: 0.0
    )  # fmt: skip
    assert world.chains.num_unread == before


def test_chains_have_the_shape_that_they_would_have() -> None:
    """Levels below the first of the one before; no more of them than a session takes; one with none is left out."""
    world = World(True)
    for session_id in (7, 8, 9):
        world.open(session_id)
    sessions = list(world.verifier.sessions.values())
    scores = np.log(np.array([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]], np.float32))  # [depth, width]
    batch = batch_of_unread(sessions, DeviceTokens(None), np.array([3, 0, 1]), scores)
    assert [session.session_id for session in batch.sessions] == [7, 9]
    assert np.asarray(batch.sizes).tolist() == [6, 2]
    assert batch.parent_ids.tolist() == [-1, -1, 0, 0, 2, 2, -1, -1]
    # The tokens lie level by level, of each of the three sessions two.
    assert batch.token_ids.tolist() == handles(np.array([0, 1, 6, 7, 12, 13, 4, 5])).tolist()
    assert np.exp(batch.scores).round(3).tolist() == pytest.approx([0.9, 0.1, 0.8, 0.2, 0.7, 0.3, 0.9, 0.1])


def test_what_is_usual_is_the_mean_of_what_was_promised() -> None:
    usual = UsualScores(3, 2)
    assert usual.of(1, 1) is None
    tokens = np.array([[[4, 5], [6, NO_TOKEN]], [[7, 8], [NO_TOKEN, NO_TOKEN]]])  # [sessions, depth, width]
    usual.learn(np.array([[[0.9, 0.2], [0.5, 0.1]], [[0.7, 0.1], [0.3, 0.1]]]), tokens)
    found = usual.of(2, 1)
    assert found is not None
    assert np.exp(found).tolist() == [[pytest.approx(0.8)], [pytest.approx(0.5)]]
    assert usual.of(2, 2) is None  # nothing was seen there
    assert usual.of(4, 1) is None
    usual.learn(np.full((1, 1, 1), 0.4), np.full((1, 1, 1), 3))
    (((first,),)) = np.exp(usual.of(1, 1)).tolist()  # type: ignore[arg-type]
    assert 0.7 < first < 0.8


def test_of_equal_siblings_the_first_counts() -> None:
    tokens = np.array([[[4, 5, 4], [6, 6, 6]], [[1, 2, 3], [3, 2, 1]]], np.int32)
    expected = [[[4, 5, NO_TOKEN], [6, NO_TOKEN, NO_TOKEN]], [[1, 2, 3], [3, 2, 1]]]
    assert distinct(tokens).tolist() == expected
    assert tokens[0, 0, 2] == 4
