"""Trees of the shapes that jobs ask for, drafted in the verifier's process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specq.drafting.draft_model.shaped import ShapedTrees
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.worker import DraftWorker
from specq.protocol import (
    ORIGIN_CODES,
    Ack,
    Close,
    EngineError,
    EngineLostError,
    Open,
    SamplingParams,
    Speculation,
    Verdict,
)
from specq.testing.toy import ToyEngine, toy_text
from specq.testing.toy_drafters import ToyChains, ToyProposer
from specq.verifier import StepCurve, Verifier

PROMPT, LENGTH = [5, 6, 7], 30
TREE = ((0,), (0, 0), (1,))


class Failing(ToyProposer):
    """Raises for one session: an EngineError as for missing memory, or an unexpected exception."""

    error: Exception = RuntimeError("no")
    session_id = 1

    def expand(self, requests: Any) -> Any:
        if any(request.session_id == self.session_id for request in requests):
            raise self.error
        return super().expand(requests)


class World:
    """`of_one`: what drafts trees drafts the chains, too, as a draft model does."""

    def __init__(self, proposer: ToyProposer | None = None, *, of_one: bool = False) -> None:
        proposer = proposer or ToyProposer()
        self.shaped = ShapedTrees(DraftWorker(proposer, incarnation=0))
        chains = proposer.in_chains() if of_one else ToyChains(ToyProposer())
        own = ColocatedSource(chains, StepCurve([1, 64], [0.0005, 0.0005]), shaped=self.shaped)
        curve = StepCurve([1, 64], [0.005, 0.01])
        self.verifier = Verifier(ToyEngine(), curve, (own,), incarnation=1, measures_drafts=False)
        self.texts: dict[int, list[int]] = {}
        self.verdicts: dict[int, list[Verdict]] = {}

    def open(
        self, session_id: int = 0, *, epoch: int = 1, mode: str = "async", strategy: str = "deterministic", **shape: Any
    ) -> None:
        message = Open(
            session_id=session_id, epoch=epoch, prompt_len=len(PROMPT), tokens_left=LENGTH,
            params=SamplingParams(max_tokens=LENGTH, seed=session_id, strategy=strategy),
            speculation=Speculation(mode=mode, **shape), token_ids=np.array(PROMPT, np.int32),
        )  # fmt: skip
        assert not self.verifier.handle(message, 0.0)
        self.texts[session_id], self.verdicts[session_id] = [], []

    def turn(self) -> None:
        self.verifier.begin(0.0)
        for verdict in self.verifier.step(lambda: 0.0):
            assert isinstance(verdict, Verdict)
            self.texts[verdict.session_id] += verdict.token_ids.tolist()
            self.verdicts[verdict.session_id].append(verdict)
            end = verdict.base_len + len(verdict.token_ids)
            self.verifier.handle(Ack(session_id=verdict.session_id, epoch=verdict.epoch, length=end), 0.0)

    def finish(self) -> None:
        for _ in range(4 * LENGTH):
            if all(session.finish for session in self.verifier.sessions.values()):
                return
            self.turn()
        raise AssertionError("the sessions never end")


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("strategy", ["deterministic", "probabilistic"])
@pytest.mark.parametrize(
    ("shape", "tokens"),
    [({"tree": TREE}, 3), ({"num_candidates": 2, "max_depth": 4}, 5), ({"fan_out_hit": (2,), "max_depth": 3}, 5)],
    ids=["tree", "candidates", "fan-outs"],
)
def test_a_perfect_drafter_fills_each_round_of_the_shape(
    mode: str, strategy: str, shape: dict[str, Any], tokens: int
) -> None:
    """Each round but the first and the last commits a token for each level (of fan-outs: and one guessed after the
    chain), and one of the target's own; nobody waits for a beat."""
    world = World()
    world.open(mode=mode, strategy=strategy, **shape)
    world.finish()
    assert world.texts[0] == toy_text(PROMPT, LENGTH)
    if strategy == "deterministic":
        assert {len(verdict.token_ids) for verdict in world.verdicts[0][1:-1]} == {tokens}
    accepted = {code for verdict in world.verdicts[0] for code in verdict.origins.tolist()}
    assert ORIGIN_CODES["colocated"] in accepted


def test_trees_have_the_shape() -> None:
    """With a drafter that is always wrong all three nodes of the tree are judged in each round."""
    world = World(ToyProposer(wrong_every=1, blind=True))
    world.open(tree=TREE)
    world.turn()
    world.turn()
    assert len(world.verdicts[0][1].node_ids) == 3


def test_jobs_without_a_shape_are_not_ours() -> None:
    world = World()
    world.open(0, max_depth=2)
    world.open(1, mode="plain")
    world.finish()
    assert not world.shaped.worker.num_passes


@pytest.mark.parametrize("error", [RuntimeError("no"), EngineError("no room")])
def test_what_it_raises_for_one_session_harms_no_other(error: Exception) -> None:
    """The session at fault goes on without drafts."""
    proposer = Failing()
    proposer.error = error
    world = World(proposer)
    for i in (0, 1):
        world.open(i, tree=TREE)
    world.finish()
    assert world.texts == {i: toy_text(PROMPT, LENGTH, i) for i in (0, 1)}
    assert len(world.verdicts[0]) < LENGTH / 2
    assert len(world.verdicts[1]) == LENGTH


def test_a_lost_device_is_reported() -> None:
    proposer = Failing()
    proposer.error = EngineLostError("gone")
    world = World(proposer)
    world.open(1, tree=TREE)
    with pytest.raises(EngineLostError):
        world.finish()


def test_closed_sessions_leave_no_state() -> None:
    world = World()
    for i in range(3):
        world.open(i, tree=TREE)
    world.turn()
    world.verifier.handle(Close(session_id=1, epoch=1), 0.0)
    world.texts.pop(1)
    world.finish()
    for i in (0, 2):
        world.verifier.handle(Close(session_id=i, epoch=1), 0.0)
    assert not world.shaped.has_work
    assert not world.shaped.worker.sessions
    assert not [value for value in vars(world.shaped).values() if isinstance(value, dict | list) and value]


def test_an_id_may_come_again_with_a_shape() -> None:
    """One drafter drafts for a session in chains, and for the next of the same id a tree: that is not closed with the
    former."""
    world = World(of_one=True)
    world.open(tree=())
    for _ in range(3):
        world.turn()
    world.verifier.handle(Close(session_id=0, epoch=1), 0.0)
    world.open(epoch=2, tree=TREE)
    world.finish()
    assert world.texts[0] == toy_text(PROMPT, LENGTH)
    assert {len(verdict.token_ids) for verdict in world.verdicts[0][1:-1]} == {3}
