"""A service served by a real verifier on a virtual clock: by its controller, or by a choice that stays.

The test uses only messages and settings of the verifier, so that any controller can be judged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from specq.protocol import COLOCATED, REMOTE, Close, Open, SamplingParams, Speculation, Verdict
from specq.verifier import DraftSource, Verifier
from tests.verifier.services.drafters import FixedModel, Foresight, ModelChains, OwnSource, RemoteDrafters, draft_model
from tests.verifier.services.engine import ServiceEngine
from tests.verifier.services.service import WAVES, Service
from tests.verifier.services.texts import Texts
from tests.verifier.services.traffic import Traffic
from tests.verifier.timed_target import TEXT, Machine

LABELS_OF_PHASE = 1_000_000


class Choice(NamedTuple):
    """Sources that always draft, and how many tokens a draft model does. No sources: plain decoding."""

    names: tuple[str, ...] = ()
    depth: int = 0

    def __str__(self) -> str:
        shown = [f"{name}:{self.depth}" if name == COLOCATED else name for name in self.names]
        return "+".join(shown) or "plain"


PLAIN = Choice()


class Log(NamedTuple):
    """What a time of service gave, after each step: f64[steps + 1] each, sums from the start on.

    times    the clock; busy: seconds in which there was something to do
    tokens, rounds   committed tokens, and verdicts
    """

    times: npt.NDArray[np.float64]
    busy: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    rounds: npt.NDArray[np.float64]

    def rate(self, begin: float, end: float) -> float:
        """Return the tokens a busy second between two times."""
        i, j = (int(np.searchsorted(self.times, at, side="right")) - 1 for at in (begin, end))
        busy = self.busy[j] - self.busy[i]
        return float((self.tokens[j] - self.tokens[i]) / busy) if busy else 0.0


class Serving:
    """A verifier and all around it. `choice`: what drafts, always; None: the verifier's controller decides. `phase`:
    the number in the whole service of the first phase, which says which texts there are; `repeat`: which of the runs
    that differ in nothing but the jitter of steps."""

    def __init__(self, service: Service, choice: Choice | None = None, phase: int = 0, repeat: int = 0) -> None:
        self._service, self._choice, self._first_phase = service, choice, phase
        self.machine, self._texts, self._traffic = Machine(), Texts(service), Traffic(service)
        self._foresights = [
            Foresight(service, i, self._texts, self.machine)
            for i, source in enumerate(service.sources)
            if choice is None or source.name in choice.names
        ]
        self._remote = next((RemoteDrafters(one) for one in self._foresights if one.own.name == REMOTE), None)
        sources = [self._source(one) for one in self._foresights if one.own.name != REMOTE]
        self._engine = ServiceEngine(service, self.machine, self._texts, self._slowdown, repeat)
        self.verifier = Verifier(
            self._engine, self._engine.curve(), sources, incarnation=1, max_sessions=256,
            measures_drafts=choice is None,
        )  # fmt: skip
        self._mode = "plain" if choice == PLAIN else "async"
        self._begun: dict[int, int] = {}  # jobs of each phase
        self._log = [(0.0, 0.0, 0, 0)]

    def _source(self, foresight: Foresight) -> DraftSource:
        if foresight.own.name != COLOCATED:
            return OwnSource(foresight, knows_chances=self._choice is not None)
        if self._choice is None:
            return draft_model(foresight)
        return FixedModel(ModelChains(foresight), self._choice.depth)

    def _slowdown(self) -> float:
        """Return by what factor a step takes longer that is launched now."""
        slows = [one.own.slows for one in self._foresights if one.has_drafted and one.own.name != REMOTE]
        if self._remote is not None and self._remote.is_busy(self.machine.now):
            slows += [one.own.slows for one in self._foresights if one.own.name == REMOTE]
        for one in self._foresights:
            one.has_drafted = False
        return 1.0 + sum(slows)

    def serve(self, seconds: float) -> Log:
        """Serve until this time; return what came of it since the start."""
        while self.machine.now < seconds:
            self._open()
            if self.verifier.has_work or self._texts.lengths:
                self._step()
            else:
                self._idle()
        return Log(*np.array(self._log, np.float64).T)

    def _idle(self) -> None:
        """Let the time pass until the next job begins."""
        _, busy, tokens, rounds = self._log[-1]
        self.machine.wait(self._traffic.next_at)
        self._log.append((self.machine.now, busy, tokens, rounds))

    def _open(self) -> None:
        now = self.machine.now
        phase = self._service.phase_at(now)
        for _ in range(self._traffic.begin(now)):
            number = self._begun[phase] = self._begun.get(phase, self._num_clients_at(phase)) + 1
            is_first = not phase and number <= self._num_clients_at(1)
            label = LABELS_OF_PHASE * (self._first_phase + self._service.first_like(phase)) + number
            session_id = self._texts.open(label, is_first=is_first)
            num_tokens, prompt_len = self._texts.lengths[session_id], self._service.prompt_len
            message = Open(
                session_id=session_id, epoch=1, prompt_len=prompt_len, tokens_left=num_tokens,
                params=SamplingParams(max_tokens=num_tokens), speculation=Speculation(mode=self._mode),
                token_ids=TEXT.prompt(session_id, prompt_len),
            )  # fmt: skip
            assert self.verifier.handle(message, now) == []

    def _num_clients_at(self, phase: int) -> int:
        """Return how many clients there are before a phase that send one job after another."""
        is_first = not phase or self._service.arrivals in WAVES
        return 0 if is_first else self._service.phases[phase - 1].num_sessions

    def _step(self) -> None:
        verifier, machine, num_open = self.verifier, self.machine, len(self._texts.lengths)
        verifier.begin(machine.now, machine)
        machine.work(0.3 * (self._service.machine.host_ms + self._service.machine.session_ms * num_open) / 1000)
        if self._remote is not None:
            self._remote.deliver(verifier, machine)
        reports = list(verifier.step(machine))
        verdicts = [one for one in reports if isinstance(one, Verdict)]
        assert len(verdicts) == len(reports), "a session failed"
        for verdict in verdicts:
            self._take(verdict)
        last, busy, tokens, rounds = self._log[-1]
        tokens += sum(len(one.token_ids) for one in verdicts)
        self._log.append((machine.now, busy + machine.now - last, tokens, rounds + len(verdicts)))

    def _take(self, verdict: Verdict) -> None:
        """Check a verdict, and hand it to the drafters."""
        self._texts.check(verdict)
        if self._remote is not None and self._mode != "plain":
            self._remote.hear(verdict, self.machine.now)
        if verdict.finish:
            self._texts.close(verdict.session_id)
            self.verifier.handle(Close(session_id=verdict.session_id, epoch=1), self.machine.now)
            self._traffic.end(self.machine.now, len(self._texts.lengths))
