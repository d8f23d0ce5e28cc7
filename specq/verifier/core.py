"""A verifier without its sockets: messages from brokers in, messages to brokers out, one engine inside.

    handle(message)   opens and closes sessions, accepts drafts, sends verdicts again.
    begin()           lets the draft sources begin, while the host sends and receives.
    gather()          returns how long the next step waits for the other sessions of a burst.
    step()            plan -> launch -> collect -> commit -> report. If the engine overlaps steps, the collected step
                      was launched before the planned one (`specq.verifier.step.in_flight`).

Rules: a verifier never waits for remote drafters or for the broker. Only the verifier commits tokens. It keeps them
until the session is closed, so that it can send a lost verdict again. A session pauses when it is more than
`max_uncommitted` tokens ahead of the journal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from specq.engines import Engine, check_works, judges_late, scores_rows, tidy
from specq.protocol import CAPABILITIES, GRAMMAR, PROMPT_LOGPROBS, Heartbeat, Message, StepOutput
from specq.runtime import Faults, Tracer
from specq.verification import Judgements
from specq.verifier.control.bursts import is_burst
from specq.verifier.control.controller import Controller
from specq.verifier.control.prefill_limit import MAX_SLOWDOWN, silent_s
from specq.verifier.inbox import VerifierInbox
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.grammars import Builder, SessionGrammars
from specq.verifier.sessions.open_sessions import OpenSessions
from specq.verifier.sessions.session import Session
from specq.verifier.sources import Budget, DraftSource, SourceSet
from specq.verifier.step.in_flight import CollectedStep, CommittedStep, InFlightStep, StepsInFlight
from specq.verifier.step.meter import (
    Moments,
    StepMeter,
    trace_close,
    trace_decisions,
    trace_step,
    verifier_metrics,
)
from specq.verifier.step.node_choice import Shares
from specq.verifier.step.planner import StepPlanner
from specq.verifier.step.rounds import Rounds, in_one
from specq.verifier.step.verdicts import NO_REPORTS, Reports, commit, failure, verdicts_of
from specq.verifier.trees import DraftTrees

log = structlog.get_logger(__name__)
MOST_SILENT_MS = 600_000


class Verifier:
    """The sessions, the engine, the draft sources, and the body of the loop that connects them.

    sources               draft sources in this process. The source of remote drafts is always added.
    curve                 step times with the engine as it is now.
    unhelped_curve        step times without threads on other cores. Default: `curve`.
    max_prefill_slowdown  see `PrefillLimit`.
    grammar_builder       builds the grammars of jobs. None: jobs with a grammar are refused.
    max_prefill_rows      most rows of a step that computes prompts, if more than `max_step_rows`.
    """

    def __init__(
        self,
        engine: Engine,
        curve: StepCurve,
        sources: Iterable[DraftSource] = (),
        *,
        incarnation: int,
        unhelped_curve: StepCurve | None = None,
        max_sessions: int = 64,
        max_step_rows: int = 512,
        max_prefill_slowdown: float = MAX_SLOWDOWN,
        max_prefill_rows: int = 0,
        max_uncommitted: int = 1024,
        trust_drafts: bool = True,
        measures_drafts: bool = True,
        tokenizer_files: dict[str, str] | None = None,
        grammar_builder: Builder | None = None,
    ) -> None:
        self.engine, self.incarnation = engine, incarnation
        self.trees = DraftTrees()  # of all sessions
        self.sessions = OpenSessions(self.trees, max_uncommitted)
        self.grammars = SessionGrammars(grammar_builder, self.sessions, judges_late=judges_late(engine))
        self.sources = SourceSet(sources, engine)
        self.control = Controller(
            *(engine, self.sources, (unhelped_curve or curve, curve)),
            max_prefill_slowdown=max_prefill_slowdown,
            measures_drafts=measures_drafts,
        )
        self.policy = self.control.policy
        self.planner = StepPlanner(
            *(engine, self.sessions, self.sources, self.control),
            max_sessions=max_sessions,
            max_step_rows=max_step_rows,
            max_prefill_rows=max_prefill_rows,
        )
        self.tracer, self.meter = Tracer(), StepMeter()
        self.inbox = VerifierInbox(
            *(engine.info, self.sessions, self.sources, self.control, self.planner, self.tracer, self._forget),
            trust_drafts=trust_drafts,
            tokenizer_files=tokenizer_files or {},
            grammars=self.grammars,
            scores_prompts=scores_rows(engine),
        )
        self.in_flight = StepsInFlight(engine, self.sources.tap, self.control.awaits)
        self.state, self.num_steps = "ready", 0
        self._step_s = 0.0  # seconds of the last step, with the drafting for it
        self._faults = Faults()  # of the next step
        self._has_begun = False  # to draft for the next step
        self._drafting = self.control.drafting  # how the next step drafts
        self._is_filling = False  # many sessions began in the last step: the load is known after the next messages

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What it can do, for `Hello`."""
        return (*CAPABILITIES, *((PROMPT_LOGPROBS,) if scores_rows(self.engine) else ()), *self.grammars.capabilities)

    def handle(self, message: Message, now: float, broker: str = "") -> list[Message]:
        """Handle one message from a broker; return the answers. `broker`: its name, if there are several.

        Raises ProtocolError if it is not for a verifier, or for a session of another broker.
        """
        return self.inbox.handle(message, now, broker)

    def forget_broker(self, broker: str) -> None:
        """Close the sessions of a broker that will not come back."""
        for session_id in [session.session_id for session in self.sessions.values() if session.broker == broker]:
            self._forget(session_id)
        self.tracer.forget(broker)

    def take_grammars(self) -> list[Message]:
        """Let sessions begin whose grammars have been built; return the messages about refused ones."""
        faults = Faults()
        for session, fault in self.grammars.take():
            faults.add(session, fault)
        return self._fail(faults) if faults.found else []

    # --- the step ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.in_flight) or self.sessions.has_work or self.sources.has_work

    def begin(self, now: float, clock: Callable[[], float] | None = None) -> None:
        """Let the sources begin to draft for the next step, unless they have begun already.

        The host is free until `step`. With `clock` the seconds of each source are measured.
        """
        if not self._has_begun and not self._is_filling:
            self._has_begun = True
            self._decide()
            self.sources.begin(self._decoding(), self._drafting.sources, self._budget(), now, clock)

    def _decide(self) -> None:
        """Decide how the next step drafts. This holds until it is planned, even if another step ends before."""
        self._drafting = self.control.drafting
        self.sources.control(self._drafting.looked_at, self._drafting.asleep)

    def gather(self, now: float) -> float:
        """Open the sessions of an arriving burst; return for how many seconds the next step waits for the rest of it.

        The caller waits no longer than until the next session arrives. 0: do not wait.
        """
        if not self.control.bursts.is_arriving or not self.sessions.has_prompts:
            return 0.0
        running = self.sessions.running()
        wait_s = self.control.wait_s(self.sessions, len(running), now)
        if wait_s:  # opening sessions takes time, and the host is idle now
            self.in_flight.judge()
            self.planner.admit(running, self.in_flight.newest, self._faults)
        return wait_s

    def step(self, clock: Callable[[], float]) -> Reports:
        """Plan and launch the next step. Collect, commit and report the oldest step in flight, if it is due."""
        began, faults = self._begin_step(clock)
        committed = self._commit(self.in_flight.collect(faults, clock)) if self._ends_first() else None
        if self._may_plan(committed, clock):
            planned = self._plan(began, faults, clock)
            self._launch(planned, faults, clock)
        if self.engine.overlaps:
            self.control.learn()  # from a step after which the device was idle, while it computes this one
        if committed is None and self.in_flight.is_due:
            collected = self.in_flight.collect(faults, clock)
            committed = self._commit(collected)
        return self._report(committed, faults, clock)

    def _begin_step(self, clock: Callable[[], float]) -> tuple[float, Faults]:
        """Return when the step began, and the faults of sessions that `gather` opened for it."""
        faults, self._faults, began = self._faults, Faults(), clock()
        self.control.bursts.begin_step()
        self.in_flight.begin_call()
        self.in_flight.judge()
        return began, faults

    def _ends_first(self) -> bool:
        """Return whether the older of two steps in flight is collected before the next step is planned.

        It is not if the next step has the same sessions as the newest one, each one token further.
        """
        newest = self.in_flight.newest
        if newest is None or len(self.in_flight) == 1:
            return False
        return self._is_filling or not self.sessions.all_go_on(newest.shares.places)

    def _may_plan(self, committed: CommittedStep | None, clock: Callable[[], float]) -> bool:
        """Collect drafts; return whether the next step may be launched before the newest one in flight has ended."""
        if committed is not None and not self.in_flight:  # it failed, and the step behind it was dropped
            return False
        self.control.follow_load(self.sessions, self.planner.max_sessions)
        if self._is_filling:
            self._is_filling = False
            self.begin(clock(), clock)
        if not self._has_begun:
            self._decide()
        self._has_begun = False
        self.sources.collect(self._decoding(), self._drafting.sources, self._budget(), clock)
        return self.in_flight.is_open

    def _plan(self, began: float, faults: Faults, clock: Callable[[], float]) -> InFlightStep:
        drafted, planner = clock(), self.planner
        shares = planner.plan(self.in_flight.newest, faults)
        counts = planner.num_rows, planner.priced
        moments = self.sources.waited_s, began, drafted, clock()
        return InFlightStep(shares, *counts, *moments, self._drafting, self.control.is_helped, planner.background)

    def _launch(self, step: InFlightStep, faults: Faults, clock: Callable[[], float]) -> None:
        self.in_flight.launch(step, faults)
        if self.sources.read(clock):
            step.waits_for_drafts(self.sources.waited_s, clock())
        self.num_steps += len(step.parts)
        self.sessions.put_behind(step.shares.sessions)
        self.sessions.has_flight = bool(self.in_flight)
        self.sessions.changed()

    def _commit(self, collected: CollectedStep) -> CommittedStep:
        """Commit the results of a step, and give up the sessions at fault."""
        step, faults = collected.step, collected.faults
        self._step_s = collected.ended - step.began
        self.sessions.has_flight = bool(self.in_flight)
        rounds = in_one([self._commit_part(collected, *part) for part in collected.done])
        self.sessions.changed()
        self._is_filling |= is_burst(step.shares.prompts[1], len(step.shares))
        self.grammars.begin_masks(rounds.sessions, is_behind=bool(self.in_flight))
        failed = self._fail(faults)
        if not collected.done:
            self._check_works(step, faults)
        return CommittedStep(collected, rounds, failed)

    def _commit_part(self, collected: CollectedStep, shares: Shares, output: StepOutput) -> Rounds:
        """Commit the engine's results for these shares; return the rounds that could be judged."""
        step, judgements = collected.step, Judgements.of(output.judgements)
        for place, scores in output.scored.items():
            shares.sessions[place].take_scores(int(shares.batch.starts[place]), scores)
        rounds = commit(shares, judgements, step.min_accept_prob, collected.faults, is_late=step.is_late)
        self.control.note_commit(rounds, collected.ended)
        return rounds

    def _report(self, committed: CommittedStep | None, faults: Faults, clock: Callable[[], float]) -> Reports:
        """Return the messages about a step, if one has ended, and about sessions at fault in the next one."""
        reports = NO_REPORTS if committed is None else self._end(committed, clock)
        if committed is None or committed.collected.faults is not faults:
            for session_id in [*faults.found]:  # sessions that have ended meanwhile need no message
                session = self.sessions.get(session_id)
                if session is None or session.finish:
                    del faults.found[session_id]
            reports = reports.and_of(self._fail(faults))
        launched = self.in_flight.launched
        if launched is not None and (committed is None or committed.collected.step is not launched):
            self._check_works(launched, faults)
        return reports

    def _end(self, committed: CommittedStep, clock: Callable[[], float]) -> Reports:
        """Let the sources and the counts follow a committed step, and return the messages about it."""
        (step, done, faults, ended, waited_s), rounds, failed = committed
        started, last_end = self.control.started(step), self.control.last_end
        self.sources.observe(rounds, done, ended - started, clock, waited_s)
        if self.engine.overlaps and not self.in_flight and not faults.found:
            self.begin(clock(), clock)  # the device is idle, so drafts begin before deferred work
        tidy(self.engine)
        moments, asked = Moments(last_end, step.began, step.drafted, step.planned, ended), self.planner.asked
        self.control.bursts.end(rounds.num_finished, ended)
        self.control.end(committed.collected, rounds, goes_on=len(step.shares) > 0 and self.has_work)
        if self.in_flight:
            self.control.learn()
        self.meter.note_all(moments, done, step.num_rows, rounds)
        own = Faults()
        verdicts = verdicts_of(rounds, asked, int((ended - started) * 1e6), step.drafted, own)
        decided = self.meter.decided(self.policy)
        if self.tracer.is_on:
            trace_step(self.tracer, step.shares, rounds, moments, clock())
            trace_decisions(self.tracer, decided, self.sessions.running(), clock())
        failed = [*failed, *self._fail(own)]
        return verdicts.and_of(failed).behind(self.sources.mailbox.feeds.fresh(self.control.allows_remote))

    def _check_works(self, step: InFlightStep, faults: Faults) -> None:
        """Raise EngineLostError if a step failed with all its sessions, and fails with a session of the engine too."""
        if len(step.shares) and faults.is_unexpected and not self.in_flight:
            check_works(self.engine)

    @property
    def curve(self) -> StepCurve:
        """The expected step times now, with or without help from other cores."""
        return self.control.curve

    def _decoding(self) -> list[Session]:
        """Return the sessions whose next step yields a token, and may have drafts."""
        return self.sessions.drafting()[: self.planner.max_sessions]

    def _budget(self) -> Budget:
        unread_vocab = 0 if self.in_flight else self.engine.info.vocab_size
        return Budget(
            *(self.curve, self.planner.min_accept_prob, unread_vocab, self.planner.max_step_rows),
            depth=self._drafting.depth,
            promised=self._drafting.promised,
            is_unread=self._drafting.is_unread,
            has_forced=GRAMMAR in (self._drafting.sources & self.sources.num_sent.keys()) - self._drafting.looked_at,
        )

    # --- failures and state -----------------------------------------------------------------------------------------

    def _fail(self, faults: Faults) -> list[Message]:
        """Give up the sessions at fault. The broker decides how to continue their jobs."""
        failed: list[Message] = [failure(self.sessions[i], fault) for i, fault in faults.found.items()]
        for session_id in faults.found:
            self._forget(session_id)
        return failed

    def _forget(self, session_id: int) -> None:
        session = self.sessions.remove(session_id)
        if session is None:
            return
        self._faults.found.pop(session_id, None)  # if it could not be opened while a burst was gathered
        trace_close(self.tracer, session_id, session.length)
        self.grammars.forget(session_id)
        self.sources.close(session)
        self._has_begun &= self.sources.has_work  # without pending drafts they may begin again, and so forget it
        is_open = session.is_open
        session.close()
        if is_open:
            with Faults().of(session, "closed"):
                self.engine.close(session_id)

    def heartbeat(self) -> Heartbeat:
        """Return the state of this verifier and the position of each session. To be called at regular intervals."""
        self.sessions.wait_a_beat()
        num_running = self.sessions.num_running
        silence = silent_s(self.curve, num_running, self.planner.max_prefill_rows, self._step_s)
        return Heartbeat(
            incarnation=self.incarnation,
            state=self.state,
            load=len(self.sessions),
            steps=self.num_steps,
            pending=num_running,
            step_ms=min(int(1000 * silence), MOST_SILENT_MS),
            free_slots=0 if self.state == "failed" else self.engine.free_slots,  # a lost engine cannot be asked
            metrics=verifier_metrics(self.meter, self.trees, self.sources, self.policy),
            **self.sessions.listed(),
        )
