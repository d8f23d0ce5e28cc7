"""A verifier without its sockets: messages of the broker in, messages to the broker out, one engine inside.

    handle(message)   opens, closes, takes drafts in, sends again
    begin()           sources of drafts begin, while the host sends and receives
    gather()          whether the step is put off while sessions of a burst arrive
    step()            propose -> schedule -> forward and judge -> commit -> verdicts; with an engine that overlaps, the next forward begins
                      before what the last one gave is committed (flights.py)

Rules: a verifier waits for nobody, neither remote drafters nor the broker. It alone commits tokens, and keeps what it committed
until the session is closed, so that a lost verdict can be sent again. A session further than `max_uncommitted` tokens
ahead of the journal pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import structlog

from specq.engines import Engine, check_works, even_chains, is_apart, tidy
from specq.protocol import (
    REMOTE,
    Ack,
    Clock,
    Close,
    Draft,
    Fault,
    FetchTokenizer,
    GetActivations,
    Heartbeat,
    Message,
    Open,
    ProtocolError,
    SpecqError,
    StepOutput,
    reason_against,
    stripped,
    trace_events,
)
from specq.runtime import Faults, Tracer, in_halves, traced
from specq.text import TextCodec, tokenizer_chunks
from specq.verification import Judgements
from specq.verifier.arms import MOST_ROUND_TRIP_S, Arms
from specq.verifier.bursts import Bursts, is_burst
from specq.verifier.early_steps import EarlySteps
from specq.verifier.flights import Done, Flight, Flights
from specq.verifier.kv_admission import admit, reason_to_refuse
from specq.verifier.meter import Moments, StepMeter, verifier_metrics
from specq.verifier.open_sessions import OpenSessions
from specq.verifier.prefill_limit import LEAST_ROWS, MAX_SLOWDOWN, PrefillLimit, longest_s
from specq.verifier.round_trips import RoundTrips
from specq.verifier.rounds import Rounds, commit, in_one
from specq.verifier.scheduler import plan
from specq.verifier.session import Session
from specq.verifier.shares import NO_SHARES, Shares
from specq.verifier.source_yields import Yields
from specq.verifier.sources import Budget, DraftSource, SourceSet
from specq.verifier.step_curve import StepCurve
from specq.verifier.tracing import trace_close, trace_open, trace_step
from specq.verifier.trees import DraftTrees
from specq.verifier.verdicts import NO_REPORTS, Reports, failure, verdict_again, verdicts_of

log = structlog.get_logger(__name__)
MAX_MIN_ACCEPT_PROB = 9999
SLOWER = 4.0  # times as long as is expected, that a step may take on a machine that others have begun to use
MOST_SILENT_MS = 600_000
# A step says something of the sources of drafts if it computes so few rows of prompts; or if these take no more than such a part of its seconds, since
# where sessions come all the time each step has some.
MOST_PROMPT_ROWS, MOST_PROMPT_PART = 64, 0.8


class Landed(NamedTuple):
    """A step that has ended, and what was committed of it.

    done      what came of its parts; failed: what is said of the sessions at fault
    ended     when the host had its answer; waited_s: for so long, if another one was in flight behind it
    """

    flight: Flight
    done: Done
    rounds: Rounds
    faults: Faults
    failed: list[Message]
    ended: float
    waited_s: float | None


class Verifier:
    """Sessions, an engine, sources of drafts beside the remote drafters, and the loop's body between them."""

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
    ) -> None:
        """`curve`: of steps as the engine is now; `unhelped_curve`: of those in which no thread on another core takes part. `curves` are both,
        that of unhelped steps first. `max_prefill_slowdown`: see `PrefillLimit`. `max_prefill_rows`: of a step that computes prompts, if more
        than `max_step_rows`."""
        self.engine, self.incarnation = engine, incarnation
        self._can_be_helped, self.curves = engine.is_helped, (unhelped_curve or curve, curve)
        self.max_sessions, self.max_step_rows = max_sessions, max_step_rows
        self._prefill, self._max_prefill_rows = PrefillLimit(max_prefill_slowdown), max_prefill_rows
        self.trust_drafts = trust_drafts
        self.sources = SourceSet(sources, engine)
        self._flights = Flights(engine, self.sources.tap)
        self.tokenizer_files = tokenizer_files or {}
        self.codec = TextCodec(self.tokenizer_files) if "tokenizer.json" in self.tokenizer_files else None
        self.trees = DraftTrees()  # of all sessions
        self.sessions = OpenSessions(self.trees, max_uncommitted)
        self.state = "ready"
        self.num_steps = 0
        self._step_s = 0.0  # that the last step took, with what was drafted for it
        self._last_end: float | None = None  # of the last step, if there was work to go on with at once
        # Of the last step, in thousandths, as in `Verdict`: with what it takes to receive a node.
        self._min_accept_prob = 0
        self.min_accept_prob = 0.0  # with which verifying a node that is here already just paid in the last step
        names, unpriced = ([one.name for one in found] for found in (self.sources.sources, self.sources.unpriced))
        self.arms = Arms(names, unpriced=unpriced, is_measured=measures_drafts)
        self._num_met = 0  # sessions of the load that the arms met last
        self._even_chains, self._is_apart = even_chains(engine), is_apart(engine)
        self._early = EarlySteps(engine, self.sources, self.arms)
        self._round_trips, self._bursts = RoundTrips(MOST_ROUND_TRIP_S), Bursts()
        self._faults = Faults()  # of the next step
        self.tracer, self.meter = Tracer(), StepMeter()
        self._num_rows = 0  # of the step that was planned last
        self._has_begun = False  # to draft for the next one
        self._is_filling = False  # many sessions began in the last step, so the load is not yet what it will be when messages have been handled
        self._handlers: dict[type[Message], Callable[..., list[Message]]] = {
            Open: self._open,
            Close: self._close,
            Ack: self._ack,
            Draft: self._draft,
            FetchTokenizer: self._fetch_tokenizer,
            GetActivations: self._get_activations,
            Clock: self._clock,
        }

    # --- messages in ------------------------------------------------------------------------------------------------

    def handle(self, message: Message, now: float) -> list[Message]:
        """Take one message from the broker and return the answers; raises ProtocolError for one that is not for a verifier."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a verifier takes no {message.TYPE}")
        self.sessions.changed()
        try:
            return handler(message, now)
        except SpecqError:
            raise
        except Exception as error:  # noqa: BLE001 - a message harms no session but its own
            return self._not_handled(message, error)

    def _not_handled(self, message: Message, error: Exception) -> list[Message]:
        """Fail a session that could not be opened; drop any other message."""
        log.error("message_not_handled", kind=message.TYPE, **traced(error))
        if isinstance(message, Open):
            faults = Faults()
            faults.note(message, "opened", error)
            self._forget(message.session_id)
            return [failure(message, faults.found[message.session_id])]
        raise ProtocolError(f"a {message.TYPE} could not be handled: {type(error).__name__}") from error

    def _open(self, message: Open, now: float) -> list[Message]:
        known = self.sessions.get(message.session_id)
        if known is not None and known.epoch >= message.epoch:
            return []
        reason = reason_to_refuse(message, self.engine.info, has_codec=self.codec is not None)
        if reason:
            return [failure(message, Fault(reason))]
        self._forget(message.session_id)
        self.sessions.add(Session.of(message, self.engine.info, self.trees, self.codec))
        self._bursts.arrive(now)
        trace_open(self.tracer, message, now)
        return []

    def _close(self, message: Close, now: float) -> list[Message]:
        session = self.sessions.get(message.session_id)
        if session is not None and session.epoch <= message.epoch:
            self._forget(message.session_id)
        return []

    def _ack(self, message: Ack, now: float) -> list[Message]:
        session = self.sessions.get(message.session_id)
        if session is None or session.epoch != message.epoch or message.length > session.length:
            return []
        session.journaled = max(session.journaled, message.length)
        if not message.resend or message.length == session.length:
            return []
        return [verdict_again(session, message.length, self._asked)]

    def _draft(self, message: Draft, now: float) -> list[Message]:
        session = self.sessions.get(message.session_id)
        if session is None or session.epoch != message.epoch:
            return []
        reason = reason_against(message, self.engine.info.vocab_size)
        if reason:
            raise ProtocolError(f"a draft was dropped: {reason}")
        took_s = self._round_trips.answer(message.session_id, message.base_len, now)
        if took_s is not None:
            self.arms.learn_round_trip(took_s)
        self.sources.put(session, message if self.trust_drafts else stripped(message))
        if self.tracer.is_on:
            values = (message.lane, len(message.token_ids), message.base_len)
            self.tracer.note(message.session_id, trace_events.DRAFT_ARRIVED, now, *values)
        return []

    def _get_activations(self, message: GetActivations, now: float) -> list[Message]:
        session = self.sessions.get(message.session_id)
        if session is None or session.epoch != message.epoch:
            return []
        return [*self.sources.ask_activations(session, message)]

    def _fetch_tokenizer(self, message: FetchTokenizer, now: float) -> list[Message]:
        return list(tokenizer_chunks(self.engine.info, self.tokenizer_files))

    def _clock(self, message: Clock, now: float) -> list[Message]:
        self.tracer.take_clock(message)
        return []

    # --- the step ---------------------------------------------------------------------------------------------------

    @property
    def max_prefill_rows(self) -> int:
        """The most rows of a step that computes prompts."""
        return max(self._max_prefill_rows, self.max_step_rows)

    @property
    def has_work(self) -> bool:
        return self._flights.newest is not None or self.sessions.has_work or self.sources.has_work

    def begin(self, now: float, clock: Callable[[], float] | None = None) -> None:
        """Let sources begin to draft for the next step, unless they have; the host is free until `step`. `clock`: to see what they take."""
        if not self._has_begun and not self._is_filling:
            self._has_begun = True
            self.sources.control(self.arms.looked_at, self.arms.asleep)
            self.sources.begin(self._decoding(), self.arms.allowed, self._budget(), now, clock)

    def gather(self, now: float) -> float:
        """Open sessions that have arrived, if they are a burst's, and return for how many seconds the next step is put off for the others of
        it, unless one arrives before."""
        if not self._bursts.is_arriving or not self.sessions.has_prompts:
            return 0.0
        running = self.sessions.running()
        as_such_s, of_rows_s = self._prefill.parts_s(self.sessions.num_pending(), self.curve)
        wait_s = self._bursts.wait_s(now, len(running), as_such_s) if 2 * of_rows_s < as_such_s else 0.0
        if wait_s:  # opening them takes the host some time, and it has nothing else to do
            self._admit(running, self._flights.newest, self._faults)
        return wait_s

    def step(self, clock: Callable[[], float]) -> Reports:
        """Run one step for every session that can take part, or begin it and end the one before; return the verdicts."""
        faults, self._faults, began = self._faults, Faults(), clock()
        self._bursts.begin_step()
        older, self._flights.older = self._flights.older, None
        oldest: Flight | Landed | None = older
        if older is not None and not self._all_go_on():
            oldest = self._land(older, clock)
            if self._flights.newest is None:  # it failed, and what was launched behind it is gone
                return self._tell_oldest(oldest, faults, clock)
        self._follow_load()
        if self._is_filling:
            self._is_filling = False
            self.begin(clock(), clock)
        self._has_begun = False
        self.sources.control(self.arms.looked_at, self.arms.asleep)
        self.sources.collect(self._decoding(), self.arms.allowed, self._budget(), clock)
        before, self._flights.newest = self._flights.newest, None
        if before is not None and not self._can_follow(before):
            if oldest is None:
                return self._finish(before, faults, clock)
            self._flights.newest = before
            return self._tell_oldest(oldest, faults, clock)
        flight = self._begin_step(before, faults, began, clock)
        if before is None and not self._can_follow(flight):
            return self._finish(flight, faults, clock)
        self._keep(flight)
        if before is None or oldest is not None or (self._is_apart and flight.parts):
            return self._go_on(before, flight, oldest, faults, clock)
        reports = self._finish(before, faults, clock)
        self._check_works(flight, faults)
        return reports

    def _all_go_on(self) -> bool:
        """Return whether the next step is one of the same sessions as the newest, each a token further, so that it can be planned before the steps in
        flight have said anything."""
        newest = self._flights.newest
        return newest is not None and not self._is_filling and self.sessions.all_go_on(newest.shares.places)

    def _go_on(
        self,
        before: Flight | None,
        flight: Flight,
        oldest: Flight | Landed | None,
        faults: Faults,
        clock: Callable[[], float],
    ) -> Reports:
        """Leave two steps in flight, or one where no session goes on behind it; return what is said of the oldest one."""
        if flight.parts:
            self._flights.older = before
        elif before is not None:
            self._keep(before)
        reports = self._tell_oldest(oldest, faults, clock)
        self._check_works(flight, faults)
        return reports

    def _tell_oldest(self, oldest: Flight | Landed | None, faults: Faults, clock: Callable[[], float]) -> Reports:
        """Return what is said of the oldest step, for which the host waits unless it has landed; and of the sessions at fault in the next one."""
        landed = self._land(oldest, clock) if isinstance(oldest, Flight) else oldest
        reports = NO_REPORTS if landed is None else self._tell(landed, clock)
        for session_id in [*faults.found]:  # what was planned in vain of sessions that have ended meanwhile is nobody's
            session = self.sessions.get(session_id)
            if session is None or session.finish:
                del faults.found[session_id]
        return reports.and_of(self._fail(faults))

    def _keep(self, flight: Flight) -> None:
        """Leave a step in flight until the next call."""
        flight.is_late = True
        self._flights.newest = flight if flight.parts else None
        self.sessions.has_flight = bool(flight.parts)
        self.sessions.changed()

    def _can_follow(self, flight: Flight) -> bool:
        """Return whether another step may begin before this one has ended."""
        return self._flights.can_follow(flight, partial(self._early.awaits, self.curve))

    def _begin_step(self, before: Flight | None, faults: Faults, began: float, clock: Callable[[], float]) -> Flight:
        """Plan and launch a step, behind the newest one in flight if there is one."""
        drafted = clock()
        shares = self._schedule(faults, before)
        flight = Flight(
            shares, self._num_met, self._num_rows, self._min_accept_prob, self.sources.waited_s, began, drafted, clock()
        )
        flight.is_behind = before is not None
        self._flights.launch(flight, before, faults)
        if self.sources.read(clock):
            flight.waits_for_drafts(self.sources.waited_s, clock())
        self.num_steps += len(flight.parts)
        if len(shares) < len(self.sessions):
            self.sessions.put_behind(shares.sessions)
        return flight

    def _finish(self, flight: Flight, faults: Faults, clock: Callable[[], float]) -> Reports:
        """Wait for a step, commit what it gave, and return what is said of it."""
        return self._tell(self._land(flight, clock, faults), clock)

    def _land(self, flight: Flight, clock: Callable[[], float], faults: Faults | None = None) -> Landed:
        """Wait for a step, commit what it gave, and give up the sessions at fault; `faults`: of what was planned with it."""
        faults = Faults() if faults is None else faults
        asked_at, is_followed = clock(), self._flights.newest is not None
        done = self._flights.collect(flight, faults)
        ended = clock()
        self._step_s = ended - flight.began
        self.sessions.has_flight = self._flights.newest is not None
        rounds = in_one([self._commit(flight, shares, output, ended, faults) for shares, output in done])
        self.sessions.changed()
        self._is_filling |= is_burst(flight.shares.prompts()[1], len(flight.shares))
        failed = self._fail(faults)
        if not done:
            self._check_works(flight, faults)
        return Landed(flight, done, rounds, faults, failed, ended, ended - asked_at if is_followed else None)

    def _tell(self, landed: Landed, clock: Callable[[], float]) -> Reports:
        """Learn from a step that has landed, and return what is said of it."""
        flight, done, rounds, faults, failed, ended, waited_s = landed
        # The device began with this step when it had ended the one before.
        started = flight.drafted if self._last_end is None else max(flight.drafted, self._last_end)
        self.sources.observe(rounds, done, ended - started, clock, waited_s)
        if self.engine.overlaps and self._flights.newest is None and not faults.found:
            self.begin(clock(), clock)  # the device has nothing to do, so whatever can wait comes behind it
        tidy(self.engine)
        moments, asked = Moments(self._last_end, flight.began, flight.drafted, flight.planned, ended), self._asked
        self._bursts.end(rounds.num_finished, ended)
        self._end_step(flight, rounds, ended, is_whole=len(done) == 1 and not faults.found)
        self.meter.note_all(moments, done, flight.num_rows, rounds)
        own = Faults()
        verdicts = verdicts_of(rounds, asked, int((ended - started) * 1e6), flight.drafted, own)
        if self.tracer.is_on:
            trace_step(self.tracer, flight.shares, rounds, moments, clock())
        failed = [*failed, *self._fail(own)]
        return verdicts.and_of(failed).behind(self.sources.mailbox.feeds.fresh(REMOTE in self.arms.allowed))

    def _check_works(self, flight: Flight, faults: Faults) -> None:
        """Raise EngineLostError if a step failed with every session, and so does one that is nobody's."""
        if len(flight.shares) and faults.is_unexpected and self._flights.newest is None:
            check_works(self.engine)

    @property
    def curve(self) -> StepCurve:
        """What steps take, with help from other cores or without, as it is now."""
        return self.curves[self.engine.is_helped or not self._can_be_helped]

    def _follow_load(self) -> None:
        """Use the sources of drafts that pay with so many sessions; and take help from the cores of drafters only while those are asked for
        nothing, or there are none, or prompts are computed: steps of many rows gain by it whoever else computes there."""
        if num_sessions := self.sessions.num_running:
            self._num_met = min(num_sessions, self.max_sessions)
            self.arms.meet(self._num_met)
        if self._can_be_helped:
            self.arms.hear(self.sources.num_sent)
            self.engine.is_helped = self.sessions.has_prompts or not self.arms.uses(REMOTE)

    # --- propose and schedule ---------------------------------------------------------------------------------------------------

    def _decoding(self) -> list[Session]:
        """Return the sessions whose next step gives a token."""
        return self.sessions.decoding()[: self.max_sessions]

    def _budget(self) -> Budget:
        unread_vocab = self.engine.info.vocab_size if self._flights.newest is None else 0
        return Budget(self.curve, self.min_accept_prob, unread_vocab, self.max_step_rows)

    def _schedule(self, faults: Faults, before: Flight | None) -> Shares:
        """Return the shares of those sessions that can be planned together, behind the newest step in flight if there is one."""
        self.sessions.drafted()
        opened = self._admit(self.sessions.running(), before, faults)
        planned = in_halves(opened, partial(self._plan, before), faults, "planned")
        return planned[0][1] if planned else NO_SHARES

    def _admit(self, running: Sequence[Session], before: Flight | None, faults: Faults) -> Sequence[Session]:
        """Open those sessions whose turn it is and for which there is room; return those that are open."""
        prefilling = None if before is None else before.prefilling()
        return admit(running, self.max_sessions, self.sessions.values(), self.engine, faults, prefilling)

    def _plan(self, before: Flight | None, sessions: Sequence[Session]) -> Shares:
        """Plan a step of these sessions. What waiting for drafts has taken counts among the round's time, so that nodes seem the cheaper."""
        planned = plan(
            sessions,
            self.curve.after(self.sources.waited_s),
            max_rows=self.max_prefill_rows if self.sessions.has_prompts else self.max_step_rows,
            free_slots=self.engine.free_slots,
            max_chain=self.engine.max_chain,
            even_chains=self._even_chains,
            before=None if before is None else before.parts[0][0],
            drafted=self.sources.drafted,
            prefill=self._prefill,
            saved_s=self._early.saved_s(self.curve, sessions) if before is None else 0.0,
        )
        self._num_rows = planned.num_rows
        self.min_accept_prob = planned.goodput * self.curve.slope(planned.num_rows)
        of_remote = self.min_accept_prob + planned.goodput * self.sources.node_s
        self._min_accept_prob = min(int(of_remote * 1000), MAX_MIN_ACCEPT_PROB)
        return planned.shares

    @property
    def _asked(self) -> int:
        """The minimum acceptance probability that drafters are told: so much that they fall silent where they bring nothing."""
        return self._min_accept_prob if REMOTE in self.arms.allowed else MAX_MIN_ACCEPT_PROB

    # --- commit -----------------------------------------------------------------------------------------------------

    def _commit(self, flight: Flight, shares: Shares, output: StepOutput, ended: float, faults: Faults) -> Rounds:
        """Commit what the engine gave for these shares; return the rounds of those that could be judged."""
        judgements = Judgements.of(output.judgements)
        rounds = commit(shares, judgements, flight.min_accept_prob, faults, is_late=flight.is_late)
        if REMOTE in self.arms.allowed:
            drafted = next((one for one in rounds.sessions if one.takes_drafts and not one.finish), None)
            if drafted is not None:
                self._round_trips.commit(drafted.session_id, drafted.length, ended)
        return rounds

    def _end_step(self, flight: Flight, rounds: Rounds, ended: float, *, is_whole: bool) -> None:
        """Learn from a step that came at once after another and went well."""
        yields = self.sources.clock.yields(rounds, flight.num_rows, self.curve)
        if is_whole and self._last_end is not None:
            self._learn(flight, rounds, ended - self._last_end, yields)
        self._last_end = ended if len(flight.shares) and self.has_work else None

    def _learn(self, flight: Flight, rounds: Rounds, seconds: float, yields: Yields) -> None:
        """Learn what a step takes; and which sources pay, where nobody waits for a drafter."""
        shares, prompts_s = flight.shares, 0.0
        num_rows, num_first = shares.prompts()
        num_decoding = shares.num_decoding if num_rows else len(shares)
        is_told = shares.modes in ({"async"}, {"async", "plain"})
        if is_told and num_rows:
            prompts_s = self._prompts_s(flight, num_rows, num_decoding)
        self._prefill.learn(shares, flight.num_rows, seconds - flight.waited_s, self.curve, is_late=flight.is_late)
        self._early.learn(flight, len(rounds.token_ids), seconds, self.curve)
        if is_told and (num_rows <= MOST_PROMPT_ROWS or prompts_s <= MOST_PROMPT_PART * seconds):
            num_tokens, beyond = max(len(rounds.token_ids) - num_first, 0), max(seconds - prompts_s, 0.0)
            self.arms.learn(
                flight.num_met,
                num_tokens,
                beyond,
                self.sources.num_added,
                yields,
                num_decoding=num_decoding,
                is_crowded=num_rows > 0,
            )

    def _prompts_s(self, flight: Flight, num_rows: int, num_decoding: int) -> float:
        """Return what so many rows of prompts would have added to a step in which nothing was drafted: few of them by the profile, many by what was learned of
        prompts. What they take longer beside a source of drafts counts against that."""
        if num_rows <= MOST_PROMPT_ROWS:
            profiled = self.curves[-1].profiled
            return profiled(num_decoding + num_rows) - profiled(num_decoding)
        chunks = flight.shares.prompt_chunks()
        return self._prefill.prompts_s(chunks, num_decoding, self.curve, is_late=flight.is_late)

    # --- failures and state -----------------------------------------------------------------------------------------

    def _fail(self, faults: Faults) -> list[Message]:
        """Give up the sessions at fault; the broker decides what becomes of them."""
        failed: list[Message] = [failure(self.sessions[i], fault) for i, fault in faults.found.items()]
        for session_id in faults.found:
            self._forget(session_id)
        return failed

    def _forget(self, session_id: int) -> None:
        session = self.sessions.remove(session_id)
        if session is None:
            return
        trace_close(self.tracer, session_id, session.length)
        self.sources.close(session)
        self._has_begun &= self.sources.has_work  # else there is nothing to wait for before they forget it
        is_open = session.is_open
        session.close()
        if is_open:
            with Faults().of(session, "closed"):
                self.engine.close(session_id)

    @property
    def silent_s(self) -> float:
        """For how many seconds this verifier may send nothing, since a step takes so long: SLOWER times the longest that can be planned before
        the next heartbeat, or that the last one took."""
        num_rows = self.sessions.num_running
        planned = max(longest_s(self.curve(num_rows)), self.curve(num_rows + LEAST_ROWS))
        return SLOWER * max(min(planned, self.curve(self.max_prefill_rows)), self._step_s)

    def heartbeat(self) -> Heartbeat:
        """Return the state of this verifier and the position of each session; called at regular intervals."""
        for session in self.sessions.awaiting():
            session.wait_a_beat()
        self.sessions.changed()
        return Heartbeat(
            incarnation=self.incarnation,
            state=self.state,
            load=len(self.sessions),
            steps=self.num_steps,
            pending=self.sessions.num_running,
            step_ms=min(int(1000 * self.silent_s), MOST_SILENT_MS),
            free_slots=0 if self.state == "failed" else self.engine.free_slots,  # a lost engine cannot be asked
            metrics=verifier_metrics(self.meter, self.trees, self.sources, self.arms),
            **self.sessions.listed(),
        )
