"""A drafter in the verifier's own process."""

from typing import Any

import numpy as np
import pytest

from specq.curve import StepCurve
from specq.drafter import Drafter
from specq.messages import Close, Committed, Open, Verdict
from specq.own_drafter import OwnDrafter
from specq.params import SamplingParams, Speculation
from specq.verifier import Verifier
from tests.toy import ToyEngine, ToyProposer, toy_text

PROMPT = [5, 6, 7]


def make(proposer: ToyProposer | None = None) -> OwnDrafter:
    """Return a drafter of toy text beside its verifier, without sessions."""
    verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.005, 0.01]), incarnation=1, backup=False)
    return OwnDrafter(Drafter(proposer or ToyProposer(), incarnation=2), verifier)


def open_session(own: OwnDrafter, session_id: int = 7, *, epoch: int = 1, mode: str = "async", **params: Any) -> None:
    """Open a session of fifty tokens."""
    message = Open(
        session_id=session_id, epoch=epoch, prompt_len=3, tokens_left=50, speculation=Speculation(mode=mode),
        params=SamplingParams(max_tokens=50, **params), token_ids=np.array(PROMPT, np.int32),
    )  # fmt: skip
    own.verifier.handle(message, 0.0)


def turn(own: OwnDrafter) -> list[Verdict]:
    """Draft, step, hear; the broker confirms all. Every round takes a millisecond."""
    own.draft(own.verifier.num_steps / 1000)
    verdicts = own.verifier.step(lambda: 0.0)
    own.hear(verdicts)
    for verdict in verdicts:
        end = verdict.base_len + len(verdict.token_ids)
        own.verifier.handle(Committed(session_id=verdict.session_id, epoch=verdict.epoch, length=end), 0.0)
    return verdicts


def complete(own: OwnDrafter, most: int = 200) -> list[Verdict]:
    """Take turns until the one session has ended."""
    verdicts: list[Verdict] = []
    while not (verdicts and verdicts[-1].finish):
        verdicts += turn(own)
        assert len(verdicts) < most
    return verdicts


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
    assert not own.drafter.sessions


@pytest.mark.parametrize(("mode", "strategy"), [("plain", "deterministic"), ("async", "greedy")])
def test_who_wants_no_drafts_gets_none(mode: str, strategy: str) -> None:
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
    assert own.drafter.sessions[7].epoch == 1
    open_session(own, epoch=2)
    turn(own)
    turn(own)
    assert own.drafter.sessions[7].epoch == 2
    assert own.drafter.sessions[7].token_ids == own.verifier.sessions[7].token_ids
    own.verifier.handle(Close(session_id=7, epoch=2), 0.0)
    own.draft(0.0)
    assert not own.drafter.sessions
    assert not own.has_work


def test_several_sessions_share_a_pass() -> None:
    """All texts are right, and passes are no more than steps."""
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
