"""`specq.simulate.world` for tests: any models, one client that keeps its messages, and lines that lose and double.

All messages travel as frames through `specq.protocol.wire`, as over sockets. Events run one at a time in order of time.
The same seed gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specq.drafting import Children, Drafter, Expansion
from specq.drafting.worker import DraftWorker
from specq.engines import Engine
from specq.protocol import (
    NO_TAP,
    Accepted,
    Failed,
    Frames,
    JobTokens,
    Message,
    SamplingParams,
    SessionStep,
    Speculation,
    Status,
    StepOutput,
    Submit,
    Tap,
    Tokens,
    decode,
    encode,
)
from specq.simulate.machine import LineSettings
from specq.simulate.settings import HostSettings
from specq.simulate.world import SimulatedWorld
from specq.testing.toy import ToyEngine
from specq.testing.toy_drafters import ToyProposer
from specq.verifier import StepCurve, Verifier

CLIENT = b"client"
NO_HOST = HostSettings(broker_us=0, draft_us=0, graft_us=0, verdict_us=0, plan_us=0, hear_us=0, send_us=0)


@dataclass
class ReceivedText:
    """The client's view of one job."""

    token_ids: list[int] = field(default_factory=list)
    finish: str = ""
    failed: Failed | None = None
    stats: dict[str, object] = field(default_factory=dict)
    prompt_rows: bytes = b""


class TimedToy:
    """A model that does not know the virtual clock. Here its steps and passes take virtual time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.pass_s, self.busy_s = 0.001, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        self.busy_s += self._model.step_times([sum(step.num_rows for step in steps)])[0]
        output: StepOutput = self._model.step(steps, tap)
        return output

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        self.busy_s += self.pass_s
        children: list[Children] = self._model.expand(requests)
        return children


class World:
    """A broker and its workers, a network between them, and a clock."""

    def __init__(
        self,
        *,
        seed: int = 0,
        delay_s: float = 0.0002,
        loss: float = 0.0,
        double: float = 0.0,
        pass_s: float = 0.001,
        host: HostSettings = NO_HOST,
        max_jobs: int = 10_000,
    ) -> None:
        self.pass_s = pass_s
        self.simulated = SimulatedWorld(seed=seed, host=host, max_jobs=max_jobs)
        self.broker = self.simulated.broker
        self.verifiers: dict[bytes, Verifier] = {}
        self.drafters: dict[bytes, DraftWorker] = {}
        self.received: dict[int, ReceivedText] = {}
        self.others: list[Message] = []  # messages to the client that do not belong to a job
        spoilt = bool(loss or double)
        self.line = LineSettings(
            delay_s, jitter_s=1.5 * delay_s * spoilt, loss=loss, double=double, in_order=not spoilt
        )
        # A client repeats its requests by itself. The tests do not cover that here.
        self.simulated.add_client(CLIENT, self._hear, LineSettings(delay_s))

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.simulated.queue.now

    def at(self, delay: float, action: Callable[[], object]) -> None:
        """Run an action after `delay` seconds."""
        self.simulated.queue.at(self.now + delay, action)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.simulated.queue.run(seconds)

    def run_until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        """Let time pass until the condition holds. Fails after the limit."""
        self.simulated.queue.run_until(condition, limit_s)

    # --- workers ----------------------------------------------------------------------------------------------------

    def add_verifier(self, identity: bytes = b"v0", engine: Engine | None = None, **options: Any) -> Verifier:
        """Start a verifier. Without an engine it has a toy."""
        model = _timed(engine or ToyEngine())
        sizes = [1, 8, 64]
        curve = StepCurve(sizes, model.step_times(sizes))
        self.verifiers[identity] = self.simulated.add_verifier(identity, model, curve, self.line, **options)
        return self.verifiers[identity]

    def add_drafter(self, identity: bytes = b"d0", proposer: Drafter | None = None, **options: int) -> DraftWorker:
        """Start a drafter. Without a proposer it has a toy."""
        model = _timed(proposer or ToyProposer())
        model.pass_s = self.pass_s
        self.drafters[identity] = self.simulated.add_drafter(identity, model, self.line, **options)
        return self.drafters[identity]

    def kill(self, identity: bytes) -> None:
        """Stop a worker without a message to the broker."""
        self.simulated.kill(identity)
        self.verifiers.pop(identity, None)
        self.drafters.pop(identity, None)

    @property
    def refused(self) -> dict[bytes, str]:
        """Return why the broker refused workers for good."""
        return {name: process.refusal for name, process in self.simulated.processes.items() if process.refusal}

    # --- the client -------------------------------------------------------------------------------------------------

    def submit(
        self, job_id: int, prompt: Sequence[int], *, speculation: Speculation | None = None, **params: Any
    ) -> ReceivedText:
        """Submit a job, and return the object that receives its tokens."""
        message = Submit(
            job_id=job_id,
            params=SamplingParams(**params).validate(),
            speculation=speculation or Speculation(),
            prompt_ids=np.array(prompt, np.int32),
        )
        received = self.received.setdefault(job_id, ReceivedText())
        self.send(message)
        return received

    def send(self, message: Message) -> None:
        """Send a message to the broker as the client."""
        self.simulated.send(CLIENT, message)

    def _hear(self, frames: Frames) -> None:
        message = decode(frames)
        if isinstance(message, JobTokens):
            for tokens in message.each():
                self._hear(encode(tokens))
        elif isinstance(message, Tokens):
            received = self.received[message.job_id]
            known = len(received.token_ids) - message.base_len
            assert known >= 0, "a gap in what the client hears"
            received.token_ids += message.token_ids.tolist()[known:]
            received.finish, received.stats = message.finish, message.stats
            received.prompt_rows = received.prompt_rows or message.prompt_rows.tobytes()
        elif isinstance(message, Failed) and message.job_id:
            self.received[message.job_id].failed = message
        elif not isinstance(message, Accepted):
            self.others.append(message)

    def status(self) -> dict[str, object]:
        """Return the broker's status report."""
        found = [message for message in self.others if isinstance(message, Status)]
        return found[-1].report


def _timed(model: Any) -> Any:
    return model if hasattr(model, "busy_s") else TimedToy(model)
