"""A verifier with a colocated drafter of toy chains."""

from typing import Any

import numpy as np

from specq.drafting.draft_model.source import ColocatedSource
from specq.protocol import COLOCATED, REMOTE
from specq.protocol.messages import Ack, Open, Verdict
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.toy import ToyEngine
from specq.testing.toy_drafters import ToyChains, ToyProposer
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sources import Budget

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
