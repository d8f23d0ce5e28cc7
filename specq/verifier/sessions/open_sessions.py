"""The open sessions of a verifier in order of precedence, and which of them take part in the next step: read from the
arrays, for all at once.

Which sessions have room in the engine: sessions that wait are opened while their contexts fit, others are evicted if
need be. A session that can never run is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog

from specq.engines import Engine
from specq.protocol import MODES, BoolArray, IntpArray, ModelInfo, Open
from specq.runtime import Faults
from specq.verification import reason_against
from specq.verifier.sessions.session import SYNC_PATIENCE, Session, SessionEvent
from specq.verifier.trees import DraftTrees

log = structlog.get_logger(__name__)

SHARED_PREFIX = 16  # tokens in common, and without KV yet; with as many, a session waits for another's prefill


class Prefill(NamedTuple):
    """A session of whose context a step computes a part; kv_len: tokens that had KV before."""

    session: Session
    kv_len: int


def admit(
    running: Sequence[Session],
    most: int,
    sessions: Iterable[Session],
    engine: Engine,
    faults: Faults,
    prefilling: Collection[Prefill] | None = None,
) -> Sequence[Session]:
    """Open the running sessions whose turn it is and whose contexts fit; return those that are open, at most so many.

    `prefilling`: None, or, where a step is in flight, the prefills in it. Then nobody is evicted, since that step would
    be lost for a session in it: where there is no room, nobody is returned, and it is decided when the step has ended.

    If the open ones have no room for one row each, evict parked sessions (open, but not running: ahead of the journal,
    or between rounds), then those with the highest id, whether it is their turn or not: the oldest one that is open
    always comes to its end. `faults` gets the sessions that cannot be opened. Of each session it is noted whether more
    decoded than waited when its turn came first.
    """
    turn = _turn(running, most, engine)
    if not turn:
        return turn
    places, trees = [session.place for session in turn], turn[0].trees
    num_open = int(np.count_nonzero(trees.is_open[places]))
    if num_open == len(turn) and engine.free_slots >= num_open:
        return turn
    ids = {session.session_id for session in running}
    may_evict = prefilling is None
    parked = [s for s in sessions if s.is_open and s.session_id not in ids] if may_evict else []
    prefixes = _Prefixes(prefilling or (), turn)
    is_alone = may_evict and not any(session.is_open for session in running)
    num_decoding = int(np.count_nonzero(trees.is_open[places] & (trees.length[places] - trees.kv_len[places] <= 1)))
    are_few = num_decoding > len(turn) - num_decoding  # those that wait for their first tokens
    for session in [s for s in turn if not s.is_open]:
        if session.yields_to_decode is None:
            session.yields_to_decode = are_few
        if least := prefixes.awaited_by(session):
            session.waited_for = least
        elif _fits(session, parked, engine, num_open, is_alone=is_alone):
            with faults.of(session, "opened"):
                session.open_in(engine)
                is_alone = False
                num_open += 1
                prefixes.add(session, session.kv_len)
    if not may_evict and engine.free_slots < num_open:
        return ()
    opened = _with_room(turn, running, parked, engine, faults)
    if opened or not may_evict:
        return opened
    # Nobody whose turn it is has room beside the others, which go on until there is some.
    return _with_room([session for session in running if session.is_open][:most], running, parked, engine, faults)


def _with_room(
    turn: Sequence[Session], running: Sequence[Session], parked: list[Session], engine: Engine, faults: Faults
) -> list[Session]:
    """Evict sessions until those of a turn that are open have room for a row each, and return these, but for those at
    fault."""
    if engine.free_slots < _num_open(turn):
        _make_room(running, turn, parked, engine)
    return [session for session in turn if session.is_open and session not in faults]


def _turn(running: Sequence[Session], most: int, engine: Engine) -> Sequence[Session]:
    """Return at most so many sessions, those that have waited longest. Where there are more, one without KV waits until
    its context fits: a turn that evicts those of other turns would undo what they computed, and none might ever come to
    its end."""
    if len(running) <= most:
        return running
    free_slots = engine.free_slots
    return ([s for s in running if s.is_open or s.length < free_slots] or running)[:most]


def _make_room(running: Iterable[Session], turn: Sequence[Session], parked: list[Session], engine: Engine) -> None:
    """Evict sessions until the others whose turn it is have room for a row each."""
    opened = sorted((session for session in running if session.is_open), key=lambda session: session.session_id)
    while engine.free_slots < _num_open(turn) and (parked or len(opened) > 1):
        _evict(parked.pop() if parked else opened.pop(), engine)


def _num_open(sessions: Iterable[Session]) -> int:
    return sum(session.is_open for session in sessions)


def reason_to_refuse(message: Open, info: ModelInfo, *, has_codec: bool) -> str:
    """Return why a session can never be opened at an engine with this model, or ""."""
    if reason := _malformed(message):
        return reason
    if not 0 <= message.token_ids.min() <= message.token_ids.max() < info.vocab_size:
        return f"token ids outside the vocabulary of {info.name} (0 to {info.vocab_size - 1})"
    needed = len(message.token_ids) + message.tokens_left
    if needed > info.max_length:
        return f"{needed} tokens (context and those to generate), but {info.name} takes {info.max_length}"
    if needed > info.kv_slots:
        return f"{needed} tokens need as many KV slots; {info.name} has {info.kv_slots} (--kv-slots)"
    if message.params.stop and not has_codec:
        return f"stop strings need a tokenizer, and {info.name} has none"
    return ""


def _malformed(message: Open) -> str:
    """Return why no verifier could open a session, or ""."""
    length = len(message.token_ids)
    if not length or message.tokens_left < 1:
        return "an empty context, or no tokens left to generate"
    if not 0 < message.prompt_len <= length:
        return f"a context of {length} tokens with a prompt of {message.prompt_len}"
    return reason_against(message.params.strategy)


def _fits(session: Session, parked: list[Session], engine: Engine, num_open: int, *, is_alone: bool) -> bool:
    """Return whether a session's context fits beside a row of each of so many that are open: else it would be evicted
    at once. If no other session runs, parked ones are evicted for it."""
    while is_alone and parked and session.length >= engine.free_slots:
        _evict(parked.pop(), engine)
    return is_alone or session.length + num_open < engine.free_slots


class _Prefixes:
    """What open sessions are about to compute: SHARED_PREFIX tokens more than they have KV of, by how many these are
    from the first on. Nobody waits for a session of another owner: the KV is not shared, and the wait would say what
    that one asked for.

    Where what a session begins with has KV already, as a system prompt soon has, nobody waits for what only the other
    needs. Nor for what a session computes that has waited for the same tokens itself: they are none that can be shared,
    as where they end in no whole block.
    """

    def __init__(self, prefilling: Iterable[Prefill], running: Sequence[Session]) -> None:
        self._known: dict[int, set[tuple[str, bytes]]] = {}
        for session, kv_len in prefilling:
            if session.is_open:
                self.add(session, kv_len)
        trees, places = running[0].trees, [session.place for session in running]
        computes = trees.is_open[places].astype(np.bool_) & (trees.length[places] - trees.kv_len[places] > 1)
        for i in computes.nonzero()[0].tolist():
            self.add(running[i], running[i].kv_len)

    def add(self, session: Session, kv_len: int) -> None:
        """Note what an open session is about to compute, so many of whose tokens have KV."""
        least = kv_len + SHARED_PREFIX
        if least < session.length and least != session.waited_for:
            self._known.setdefault(least, set()).add((session.owner, session.context()[:least].tobytes()))

    def awaited_by(self, session: Session) -> int:
        """Return the first how many tokens the session may have KV of a step later, SHARED_PREFIX or more of which
        others compute; 0: of none. Its last token is computed in any case."""
        context, num_shared = session.context(), 0
        for least, prefixes in self._known.items():
            if num_shared < least < len(context) and (session.owner, context[:least].tobytes()) in prefixes:
                num_shared = least
        return num_shared


def _evict(session: Session, engine: Engine) -> None:
    engine.close(session.session_id)
    session.note(SessionEvent.EVICTED)
    session.kv_len = 0
    log.info("session_evicted", session=session.session_id, length=session.length)


SYNC, JIT = MODES.index("sync"), MODES.index("jit")


class _States(NamedTuple):
    """Of all sessions in order of precedence: which have tokens left to generate and are not too far ahead of the
    journal, which take part in steps now, which of them in the next one, and which need one token more to be computed
    before the next is known."""

    sessions: list[Session]
    may_run: BoolArray
    runs: BoolArray
    joins: BoolArray
    decodes: BoolArray


class OpenSessions(dict[int, Session]):
    """Sessions by their ids: those that have waited longest come first.

    `changed` must be called after any change to a session, but for those made here. `has_flight`: a step is in flight;
    then a session all of whose tokens have KV, or will have, is one token longer than is known, and joins the next step
    unless that token must be known to the host by then.
    """

    def __init__(self, trees: DraftTrees, max_uncommitted: int) -> None:
        super().__init__()
        self.trees, self._max_uncommitted = trees, max_uncommitted
        self._order: tuple[list[Session], IntpArray] | None = None  # and their places
        self._known: _States | None = None
        self._have_waiting = False  # whether some of those in `_order` wait for drafters at times
        self.has_flight = False

    def add(self, session: Session) -> None:
        """Take in a new session, behind all others."""
        self[session.session_id] = session
        self._order = self._known = None

    def remove(self, session_id: int) -> Session | None:
        """Take a session out, if it is there."""
        self._order = self._known = None
        return self.pop(session_id, None)

    def put_behind(self, sessions: Sequence[Session]) -> None:
        """Let sessions go behind all others."""
        for session in sessions:
            self[session.session_id] = self.pop(session.session_id)
        self._order = self._known = None

    def listed(self) -> dict[str, Any]:
        """Return the sessions as a `Heartbeat` lists them."""
        return {
            "session_ids": np.array(list(self), np.int64),
            "epochs": np.array([session.epoch for session in self.values()], np.int64),
            "lengths": np.array([session.length for session in self.values()], np.int32),
        }

    def changed(self) -> None:
        """Look at all sessions anew."""
        self._known = None

    def drafted(self) -> None:
        """Look anew at sessions for which something was drafted: that matters to those alone that wait for it."""
        if self._have_waiting:
            self._known = None

    @property
    def has_work(self) -> bool:
        """Whether a session takes part in the next step."""
        return self.num_running > 0

    @property
    def num_running(self) -> int:
        return int(np.count_nonzero(self._states().runs))

    @property
    def has_prompts(self) -> bool:
        """Whether the next step computes a part of a prompt."""
        states = self._states()
        return bool((states.joins & ~states.decodes).any())

    def running(self) -> list[Session]:
        """Return the sessions that take part in the next step."""
        states = self._states()
        return _chosen(states.sessions, states.joins)

    def all_go_on(self, places: IntpArray) -> bool:
        """Return whether those that take part now are the sessions at these places, in this order, and all of their
        tokens have KV, or will have it when what is in flight has ended; none needs a token that the host does not
        know."""
        states, trees = self._states(), self.trees
        assert self._order is not None
        own = self._order[1][states.runs]
        return (
            np.array_equal(own, places)
            and np.count_nonzero(states.joins) == len(own)
            and not np.count_nonzero(trees.length[own] > trees.kv_len[own])
        )

    def num_pending(self) -> int:
        """Return how many tokens the sessions that take part in the next step have without KV."""
        places = [session.place for session in self.running()]
        pending = self.trees.length[places] - self.trees.kv_len[places]
        return int(np.maximum(pending, 0).sum())  # of those in flight none is known yet

    def decoding(self) -> list[Session]:
        """Return the sessions whose next step gives a token."""
        states = self._states()
        return _chosen(states.sessions, states.decodes)

    def awaiting(self) -> list[Session]:
        """Return the sessions that wait for drafts."""
        states = self._states()
        return _chosen(states.sessions, states.may_run & ~states.runs)

    def _states(self) -> _States:
        if self._known is None:
            self._known = self._look()
        return self._known

    def _look(self) -> _States:
        if self._order is None:
            sessions = list(self.values())
            self._order = sessions, np.array([session.place for session in sessions], np.intp)
            self._have_waiting = any(session.waits for session in sessions)
        sessions, places = self._order
        t = self.trees
        length = t.length[places]
        num_pending = length - t.kv_len[places]
        foreseen = length + np.maximum(1 - num_pending, 0) if self.has_flight else length
        may_run = (t.has_ended[places] == 0) & (foreseen - t.journaled[places] <= self._max_uncommitted)
        if self.has_flight:
            may_run &= foreseen < t.limit[places]
        runs, decodes = may_run, may_run & (num_pending == 1)
        if self._have_waiting:
            mode = t.mode[places]
            waits = (mode == SYNC) | ((mode == JIT) & (t.num_live[places] == 0))
            # They wait until their drafter has answered, or has been silent for too long.
            awaits = waits & (num_pending <= 1) & (t.drafted_at[places] < length) & (length < t.limit[places] - 1)
            runs = may_run & ~(awaits & (t.beats_waited[places] < SYNC_PATIENCE))
        joins = runs & ((num_pending > 0) | (t.needs_history[places] == 0)) if self.has_flight else runs
        return _States(sessions, may_run, runs, joins, decodes)


def _chosen(sessions: list[Session], is_chosen: BoolArray) -> list[Session]:
    if np.count_nonzero(is_chosen) == len(sessions):
        return sessions
    return [sessions[i] for i in is_chosen.nonzero()[0].tolist()]
