"""The sources of a verifier, called one after the other. Each sees the drafts of the sources before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import structlog

from specq.engines import Engine, takes_unread
from specq.protocol import (
    NO_DRAFTS,
    NO_SCRATCH,
    Activations,
    ConfigError,
    Draft,
    Drafts,
    EngineLostError,
    GetActivations,
    ProtocolError,
    StepOutput,
    Tap,
)
from specq.runtime import traced
from specq.verification import NO_TOKEN, DeviceTokens
from specq.verifier.control.choices import Sources
from specq.verifier.sessions.grafting import DraftBatch, graft_batch
from specq.verifier.sessions.session import Session
from specq.verifier.sources.interface import Budget, ComputedDrafts, DraftSource
from specq.verifier.sources.mailbox import Mailbox, MailTime
from specq.verifier.sources.source_clock import SourceClock
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.rounds import Rounds

log = structlog.get_logger(__name__)

R = TypeVar("R")

NODE_COST_FADE = 0.02
MOST_REFUSALS = 8  # most refusals in the log, because drafters repeat their requests


class SourceSet:
    """The mailbox of remote drafts, and the other sources of a verifier.

    waited_s     seconds from `begin` to the end of the last `collect`, if it waited for sources. They include the
                 host's own work meanwhile.
    node_s       seconds to receive a draft node and to graft it.
    mail_s       limit on the seconds of remote drafts between two steps (`specq.verifier.sources.mailbox`).
    num_sent     all draft nodes so far, by the name of their source.
    num_scratch  all scratch rows so far, by the name of their source.
    num_dropped  drafts for which there was no time or no room.
    drafted      the tokens that are grafted unread, from `collect` until `read`.
    clock        the seconds of each source since the controller last learned from a step.
    looked_at    sources that draft for one session only, apart from synchronous sessions.
    asleep       sources that receive no hidden states, except from steps with synchronous sessions.
    """

    def __init__(self, sources: Iterable[DraftSource], engine: Engine) -> None:
        """Add the mailbox to `sources`. Raises ConfigError if a source needs what the engine does not support."""
        self.mailbox = Mailbox()
        self._engine = engine
        self.sources: list[DraftSource] = [self.mailbox, *sources]
        for source in self.sources:
            _check(source, engine)
        self._uses_scratch = any(source.uses_scratch for source in self.sources)
        self._with_scratch: list[Session] = []  # sessions with scratch rows in the last step
        self.waited_s = self.node_s = 0.0
        self._mail_time, self._mail_took_s = MailTime(overlaps=engine.overlaps), 0.0
        self.num_dropped = 0
        self.looked_at: Sources = frozenset()
        self.asleep: Sources = frozenset()
        self.drafted: DeviceTokens | None = None
        self._unread: DraftSource | None = None  # the source of `drafted`
        self._began_at: float | None = None  # None: the step does not wait for a source
        self._receiving_s = 0.0  # seconds to receive drafts since the last `collect`
        self._refused = set[tuple[int, ...]]()  # layers that a drafter asked for and that do not exist; logged once
        self._num_counted = 0  # nodes of the mailbox that `node_s` has learned from
        self.num_sent = {source.name: 0 for source in self.sources}
        self.num_scratch = dict(self.num_sent)
        self.clock = SourceClock(self.num_sent)

    @property
    def has_work(self) -> bool:
        return any(self._ask("has_work", lambda source: source.has_work))

    @property
    def mail_s(self) -> float:
        return self._mail_time.limit_s

    def control(self, looked_at: Sources, asleep: Sources) -> None:
        """Set which sources draft for one session only, and which need not follow the texts (see the policy)."""
        self.looked_at, self.asleep = looked_at, asleep

    def _sleeps(self, source: DraftSource, sessions: Sequence[Session]) -> bool:
        """Return whether a source that drafts by hidden states, or within steps, gets nothing of a step.

        When it is in use again, it begins behind the gap.
        """
        is_own = bool(source.layers or source.engine_drafts != NO_DRAFTS) and source is not self.mailbox
        return is_own and source.name in self.asleep and not any(session.waits for session in sessions)

    def are_own_awaited(self, sessions: Sequence[Session], allowed: Sources) -> bool:
        """Return whether the verifier's own sources draft for some of these sessions before each step.

        None of the sessions is synchronous.
        """
        own = (source for source in self.sources if source is not self.mailbox and source.name in allowed)
        return any(session.takes_drafts for source in own for session in source.among(sessions))

    def put(self, session: Session, draft: Draft) -> None:
        """Add a remote draft that was checked to the mailbox, or drop it if there is no room."""
        self.put_all([session], draft)

    def put_all(self, sessions: Sequence[Session], drafts: Draft | Drafts) -> None:
        """Add the remote drafts of several sessions, as `put` adds one."""
        if self.mailbox.put_all(sessions, drafts):
            self.num_sent[self.mailbox.name] += len(drafts.token_ids)
        else:
            self.num_dropped += len(sessions)

    def ask_activations(self, session: Session, message: GetActivations) -> list[Activations]:
        """Send hidden states to a remote drafter from now on; return the messages with the states that are kept.

        Raises ProtocolError for layers that the engine does not provide.
        """
        layers, num_layers = message.tap_layers, self._engine.num_tap_layers
        if layers and not max(layers) < num_layers:
            said = f"has layers 0 to {num_layers - 1}" if num_layers else "gives none"
            reason = f"a drafter reads hidden states of layers {layers}; the {self._engine.info.engine} engine {said}"
            if layers not in self._refused and len(self._refused) < MOST_REFUSALS:
                self._refused.add(layers)
                log.warning("activations_refused", reason=reason)
            raise ProtocolError(reason)
        return self.mailbox.feeds.ask(session, message)

    def account(self, seconds: float) -> None:
        """Add the seconds that it took to receive drafts since the last `collect`."""
        self._receiving_s += seconds

    def begin(
        self,
        sessions: Sequence[Session],
        allowed: Sources,
        budget: Budget,
        now: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Let the sources begin to draft for sessions that decode.

        Sources that are not in `allowed` draft only for synchronous sessions.
        """
        begun = self._ask(
            "begin", lambda source: source.begin(self._drafted_for(sessions, source, allowed), budget, now), clock
        )
        self._began_at = now if any(begun) else None

    def collect(
        self, sessions: Sequence[Session], allowed: Sources, budget: Budget, clock: Callable[[], float]
    ) -> None:
        """Graft the drafts of the sources onto the trees. `sessions` and `allowed` are as for `begin`."""
        self._take_mail(budget, clock)
        self._ask("collect", lambda source: self._collect(source, sessions, allowed, budget, clock), clock)
        if self._uses_scratch:
            self._set_scratch(sessions, allowed)
        if self.drafted is None:
            self._end_waiting(clock)

    def _end_waiting(self, clock: Callable[[], float]) -> None:
        self.waited_s = 0.0 if self._began_at is None else clock() - self._began_at
        self._began_at = None

    def _collect(
        self,
        source: DraftSource,
        sessions: Sequence[Session],
        allowed: Sources,
        budget: Budget,
        clock: Callable[[], float],
    ) -> None:
        if budget.unread_vocab and (not takes_unread(self._engine) or self._is_followed(source, sessions, allowed)):
            budget = budget._replace(unread_vocab=0)
        for batch in source.collect(self._drafted_for(sessions, source, allowed), budget, clock):
            if batch.drafted is not None:
                self.drafted, self._unread = batch.drafted, source
            self._hang(source, batch, clock())
            self.num_sent[source.name] += len(batch.token_ids)

    def _is_followed(self, source: DraftSource, sessions: Sequence[Session], allowed: Sources) -> bool:
        """Return whether a later source drafts for some sessions, and so reads their trees."""
        later = self.sources[self.sources.index(source) + 1 :]
        return any(
            one.takes_sync or not session.waits
            for one in later
            for session in self._drafted_for(sessions, one, allowed)
        )

    def read(self, clock: Callable[[], float]) -> bool:
        """Wait for drafts that are grafted unread, and put them in place; return whether any were."""
        drafted, source, self.drafted, self._unread = self.drafted, self._unread, None, None
        if drafted is None or source is None:
            return False
        try:
            with self.clock.of(source.name, clock):
                source.read(clock)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self._drop(source, "read", error)
            drafted.read(np.full(len(drafted.tokens), NO_TOKEN, np.int32))
        self._end_waiting(clock)
        return True

    def _set_scratch(self, sessions: Sequence[Session], allowed: Sources) -> None:
        """Ask the sources for scratch rows. A session has the rows of the first source that returns some.

        Rows of the last step are removed from all sessions. They belong where texts ended then.
        """
        for session in self._with_scratch:
            session.scratch = NO_SCRATCH
        self._ask("scratch", lambda source: self._add_scratch(source, self._drafted_for(sessions, source, allowed)))
        self._with_scratch = [session for session in sessions if session.scratch.num_rows]

    def _add_scratch(self, source: DraftSource, sessions: Sequence[Session]) -> None:
        for session in sessions if source.uses_scratch else ():
            if not session.scratch.num_rows:
                session.scratch = source.scratch(session)
                self.num_scratch[source.name] += session.scratch.num_rows
                self.clock.add(source.name, 0.0, session.scratch.num_rows)

    def tap(self, shares: Shares) -> Tap:
        """Return which hidden states the sources need from a step of these shares."""
        awake = [source for source in self.sources if not self._sleeps(source, shares.sessions)]
        drafts = max((source.engine_drafts for source in awake), default=NO_DRAFTS)
        if drafts == 0 and any(session.waits and session.takes_drafts for session in shares.sessions):
            # a synchronous session waits for drafts behind its prompt, too
            drafts = max(source.most_levels for source in awake if source.engine_drafts != NO_DRAFTS)
        if drafts != NO_DRAFTS and not any(session.takes_drafts for session in shares.sessions):
            drafts = NO_DRAFTS
        tapping = [source for source in awake if source.layers]
        if not tapping:
            return Tap(drafts=drafts)
        is_prompt = (shares.batch.num_tokens > 1) | ~shares.batch.is_judged
        sessions = [shares.sessions[i] for i in is_prompt.nonzero()[0].tolist()]
        whole = {one.session_id for one in sessions if any(source.wants_prompt(one) for source in tapping)}
        return Tap(tuple(sorted({layer for source in tapping for layer in source.layers})), frozenset(whole), drafts)

    def _take_mail(self, budget: Budget, clock: Callable[[], float]) -> None:
        """Graft remote drafts for as long as there is time, and drop the others; learn the seconds of a node."""
        started = clock()
        last = started + max(self.mail_s - self._receiving_s, 0.0)
        while self.mailbox.has_work:
            for batch in self.mailbox.collect((), budget, clock):
                self._hang(self.mailbox, batch, started)
            if clock() > last:
                self.num_dropped += self.mailbox.clear()
        self._mail_took_s = self._receiving_s + clock() - started
        self.clock.add(self.mailbox.name, self._mail_took_s)
        num_sent = self.num_sent[self.mailbox.name]
        num_nodes, self._num_counted = num_sent - self._num_counted, num_sent
        if num_nodes:
            self.node_s += NODE_COST_FADE * (self._mail_took_s / num_nodes - self.node_s)
        self._receiving_s = 0.0

    def _hang(self, source: DraftSource, batch: DraftBatch, now: float) -> None:
        """Graft drafts onto their sessions' trees. If that raises an error, forget all drafts of these sessions."""
        try:
            graft_batch(batch, now)
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self._not_hung(source, batch, error)

    def _not_hung(self, source: DraftSource, batch: DraftBatch, error: Exception) -> None:
        log.error("draft_graft_failed", source=source.name, num_drafts=len(batch.sessions), **traced(error))
        for session in batch.sessions:
            session.forget_drafts()
            source.refuse(session)

    def observe(
        self,
        rounds: Rounds,
        done: Sequence[tuple[Shares, StepOutput]],
        step_s: float,
        clock: Callable[[], float] | None = None,
        idle_s: float | None = None,
    ) -> None:
        """Let the sources learn what a step of `step_s` seconds committed.

        `idle_s`: seconds that the host waited for it with the next step in flight. None: no next step was in flight.
        """
        self._mail_time.learn(step_s, self._mail_took_s, idle_s)
        computed = [ComputedDrafts(*part) for part in done]
        self._ask("observe", lambda source: self._show(source, rounds, computed), clock)

    def _show(self, source: DraftSource, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        if not self._sleeps(source, [session for part in computed for session in part.shares.sessions]):
            source.observe(rounds, [part.of_layers(source.layers) for part in computed])

    def _drafted_for(self, sessions: Sequence[Session], source: DraftSource, allowed: Sources) -> Sequence[Session]:
        """Return the sessions that a source may draft for: always the synchronous ones, since they requested drafts."""
        sessions = source.among(sessions)
        if source.name in allowed - self.looked_at:
            return sessions
        others = [session for session in sessions if not session.waits] if source.name in allowed else []
        return [session for session in sessions if session.waits] + others[:1]

    def close(self, session: Session) -> None:
        """Let the sources forget a session."""
        self._ask("close", lambda source: source.close(session))

    def _ask(self, doing: str, ask: Callable[[DraftSource], R], clock: Callable[[], float] | None = None) -> list[R]:
        """Call each source, and count its seconds if there is a clock. A source that raises an error is removed."""
        answers = []
        for source in tuple(self.sources):
            started = clock() if clock is not None else 0.0
            try:
                answers.append(ask(source))
            except EngineLostError:
                raise
            except Exception as error:  # noqa: BLE001 - drafts are hints
                self._drop(source, doing, error)
                continue
            if clock is not None:
                self.clock.add(source.name, clock() - started)
        return answers

    def _drop(self, source: DraftSource, doing: str, error: Exception) -> None:
        self.sources.remove(source)
        log.error("source_failed", source=source.name, doing=doing, **traced(error))


def _check(source: DraftSource, engine: Engine) -> None:
    """Raise ConfigError if a source needs what the engine does not support."""
    name = engine.info.engine
    if source.layers and not max(source.layers) < engine.num_tap_layers > 0:
        said = f"has layers 0 to {engine.num_tap_layers - 1}" if engine.num_tap_layers else "gives none"
        raise ConfigError(f"{source.name} drafts by hidden states of layers {source.layers}; the {name} engine {said}")
    if source.uses_scratch and not engine.takes_scratch:
        raise ConfigError(f"{source.name} needs scratch rows in each step, which the {name} engine does not support")
