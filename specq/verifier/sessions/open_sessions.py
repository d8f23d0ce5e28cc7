"""The open sessions in order of precedence, and the sessions of the next step.

The states of all sessions are read from the arrays at once.

The module also decides which sessions have room in the engine. Waiting sessions are opened while their contexts fit. If
needed, others are evicted. A session that can never run is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import structlog

from specq.engines import Engine, reason_against_scored
from specq.protocol import MODES, BoolArray, IntpArray, ModelInfo, Open
from specq.runtime import Faults
from specq.verification import reason_against
from specq.verifier.control.background import Waiting
from specq.verifier.sessions.session import SYNC_PATIENCE, Session, SessionEvent
from specq.verifier.trees import DraftTrees

log = structlog.get_logger(__name__)

SHARED_PREFIX = 16  # number of equal tokens without KV from which a session waits for another's prefill


class Prefill(NamedTuple):
    """A session for which a step computes a part of the context.

    kv_len  the number of tokens that had KV before.
    """

    session: Session
    kv_len: int


def admit(
    running: Sequence[Session],
    most: int,
    sessions: Iterable[Session],
    engine: Engine,
    faults: Faults,
    prefilling: Collection[Prefill] | None = None,
    busy: Collection[int] | None = None,
) -> Sequence[Session]:
    """Open the running sessions whose turn it is and whose contexts fit. Return at most `most` open sessions.

    prefilling  the prefills of the step in flight, or None without such a step. With a step in flight no session is
                evicted, because that step would be lost for it. If room is short then, the result is empty. The
                decision follows when the step has ended.
    busy        the sessions of the steps in flight, by id. Others that are in the background may be evicted. None: not.
    faults      gets the sessions that cannot be opened.

    When a session's turn comes first, it is noted whether more sessions decoded than waited.
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
    parked = [s for s in sessions if s.is_open and s.session_id not in ids]
    if not may_evict:
        parked = [s for s in parked if s.is_background and busy is not None and s.session_id not in busy]
    prefixes = _Prefixes(prefilling or (), turn)
    is_alone = may_evict and not any(session.is_open for session in running)
    num_decoding = int(np.count_nonzero(trees.is_open[places] & (trees.length[places] - trees.kv_len[places] <= 1)))
    are_few = num_decoding > len(turn) - num_decoding  # compared with the sessions that wait for their first tokens
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
    # No session of this turn has room beside the others. The others continue until there is room.
    return _with_room([session for session in running if session.is_open][:most], running, parked, engine, faults)


def _with_room(
    turn: Sequence[Session], running: Sequence[Session], parked: list[Session], engine: Engine, faults: Faults
) -> list[Session]:
    """Evict sessions until the open ones of a turn have room for a row each.

    Returns these, without those at fault.
    """
    if engine.free_slots < _num_open(turn):
        _make_room(running, turn, parked, engine)
    return [session for session in turn if session.is_open and session not in faults]


def _turn(running: Sequence[Session], most: int, engine: Engine) -> Sequence[Session]:
    """Return at most `most` sessions: the ones that have waited longest.

    If there are more, a session without KV waits until its context fits. A turn that evicts the sessions of other turns
    would undo their work. Then perhaps no session would ever end.
    """
    if len(running) <= most:
        return running
    free_slots = engine.free_slots
    return ([s for s in running if s.is_open or s.length < free_slots] or running)[:most]


def _make_room(running: Iterable[Session], turn: Sequence[Session], parked: list[Session], engine: Engine) -> None:
    """Evict sessions until the other sessions of this turn have room for a row each.

    Parked sessions are evicted first. A parked session is open but not running. It is ahead of the journal, or between
    rounds, or in the background. After these, the sessions with the highest ids are evicted, in any turn, those in the
    background first. So the oldest open session always reaches its end.
    """
    opened = [session for session in running if session.is_open]
    opened.sort(key=lambda session: (session.is_background, session.session_id))
    while engine.free_slots < _num_open(turn) and (parked or len(opened) > 1):
        _evict(parked.pop() if parked else opened.pop(), engine)


def _num_open(sessions: Iterable[Session]) -> int:
    return sum(session.is_open for session in sessions)


def reason_to_refuse(message: Open, info: ModelInfo, *, has_codec: bool, scores_prompts: bool = True) -> str:
    """Return the reason why an engine with this model can never open a session, or ""."""
    if reason := _malformed(message):
        return reason
    if not 0 <= message.token_ids.min() <= message.token_ids.max() < info.vocab_size:
        return f"token ids outside the vocabulary of {info.name} (0 to {info.vocab_size - 1})"
    needed = len(message.token_ids) + message.tokens_left
    if needed > info.max_length:
        return f"{needed} tokens (context and those to generate), but {info.name} takes {info.max_length}"
    if needed > info.kv_slots:
        return f"{needed} tokens need as many KV slots; {info.name} has {info.kv_slots} (--kv-slots)"
    return _lacks(message, info, has_codec=has_codec, scores_prompts=scores_prompts)


def _lacks(message: Open, info: ModelInfo, *, has_codec: bool, scores_prompts: bool) -> str:
    """Return the reason why this verifier cannot do what a job asks for, or ""."""
    if message.params.stop and not has_codec:
        return f"stop strings need a tokenizer, and {info.name} has none"
    if message.params.prompt_logprobs >= 0 and not scores_prompts:
        return reason_against_scored(info)
    return ""


def _malformed(message: Open) -> str:
    """Return the reason why no verifier could open a session, or ""."""
    length = len(message.token_ids)
    if not length or message.tokens_left < 1:
        return "an empty context, or no tokens left to generate"
    if not 0 < message.prompt_len <= length:
        return f"a context of {length} tokens with a prompt of {message.prompt_len}"
    return reason_against(message.params.strategy)


def _fits(session: Session, parked: list[Session], engine: Engine, num_open: int, *, is_alone: bool) -> bool:
    """Return whether a session's context fits beside one row for each of `num_open` open sessions.

    Otherwise it would be evicted at once. If no other session runs, parked sessions are evicted for it. Those in the
    background are in any case, unless it is in the background too.
    """
    while is_alone and parked and session.length >= engine.free_slots:
        _evict(parked.pop(), engine)
    yielding = [] if session.is_background else [one for one in parked if one.is_background]
    while yielding and session.length + num_open >= engine.free_slots:
        parked.remove(yielding[-1])
        _evict(yielding.pop(), engine)
    return is_alone or session.length + num_open < engine.free_slots


class _Prefixes:
    """The tokens that open sessions are about to compute.

    The key is the prefix that extends SHARED_PREFIX tokens beyond the session's KV. A session never waits for a session
    of another owner. Their KV is not shared, and the wait would reveal what the other owner requested.

    The start of a session may have KV already, as a system prompt soon has. Then no session waits for the rest of
    another's prompt. A session also does not wait for one that waited for the same tokens. Such tokens cannot be
    shared, for example because they do not fill a whole block.
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
        """Note what an open session is about to compute, if `kv_len` of its tokens have KV."""
        least = kv_len + SHARED_PREFIX
        if least < session.length and least != session.waited_for:
            self._known.setdefault(least, set()).add((session.owner, session.context()[:least].tobytes()))

    def awaited_by(self, session: Session) -> int:
        """Return the length of the prefix for which a session should wait, or 0.

        The session may have KV of this prefix one step later. Others compute at least SHARED_PREFIX of its tokens. The
        session's last token is computed in any case.
        """
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
    """The states of all sessions, in order of precedence.

    `may_run` marks the sessions that have tokens left to generate and are not too far ahead of the journal. The others
    mark the sessions that take part in steps now, and in the next step. They also show which sessions need one more
    computed token before the next one is known. Of those that `may_join`, some in the background wait (`joins`).
    """

    sessions: list[Session]
    may_run: BoolArray
    runs: BoolArray
    joins: BoolArray
    decodes: BoolArray
    may_join: BoolArray
    are_prompts: BoolArray


class OpenSessions(dict[int, Session]):
    """Sessions by their ids; the sessions that have waited longest come first.

    `changed` must be called after any change to a session, except the changes made here. `has_flight` means that a step
    is in flight. Then a session has one more token than is known if all its tokens will have KV. Such a session joins
    the next step, unless the host must know that token by then.
    """

    def __init__(self, trees: DraftTrees, max_uncommitted: int) -> None:
        super().__init__()
        self.trees, self._max_uncommitted = trees, max_uncommitted
        self._order: tuple[list[Session], IntpArray, BoolArray] | None = None  # places, whether in the background
        self._known: _States | None = None
        self._have_grammars = False  # whether some sessions in `_order` have one
        self._have_waiting = False  # whether some sessions in `_order` wait for drafters at times
        self._have_background = False  # whether some sessions in `_order` are in the background
        self._share: tuple[int, bool] = 0, False  # see `share_background`
        self.has_flight = False

    def add(self, session: Session) -> None:
        """Add a new session behind all others."""
        self[session.session_id] = session
        self._order = self._known = None

    def remove(self, session_id: int) -> Session | None:
        """Remove and return a session, if it exists."""
        self._order = self._known = None
        return self.pop(session_id, None)

    def put_behind(self, sessions: Sequence[Session]) -> None:
        """Move sessions behind all others."""
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
        """Read the states of all sessions again."""
        self._known = None

    def drafted(self) -> None:
        """Read the states again after new drafts; drafts matter only to sessions that wait for them."""
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
        """Return whether the present sessions are those at these places, in this order.

        All their tokens must have KV, or have it when the steps in flight have ended. None may need a token that the
        host does not know.
        """
        states, trees = self._states(), self.trees
        assert self._order is not None
        own = self._order[1][states.runs]
        return (
            np.array_equal(own, places)
            and np.count_nonzero(states.joins) == len(own)
            and not np.count_nonzero(trees.length[own] > trees.kv_len[own])
        )

    def num_pending(self) -> int:
        """Return the number of tokens without KV in the next step's sessions."""
        places = [session.place for session in self.running()]
        pending = self.trees.length[places] - self.trees.kv_len[places]
        return int(np.maximum(pending, 0).sum())  # tokens of steps in flight are not known yet

    def drafting(self) -> list[Session]:
        """Return the sessions that get a token in the next step and may have drafts."""
        states = self._states()
        return without_background(_chosen(states.sessions, states.decodes))

    def waiting(self) -> Waiting | None:
        """Return which sessions could join the next step, if some are in the background and others are not."""
        states = self._states()
        if not self._have_background or self._order is None:
            return None
        in_background, may_join = self._order[2], states.may_join
        others, own = may_join & ~in_background, may_join & in_background
        num_others = int(np.count_nonzero(others & ~states.are_prompts))
        if not num_others:
            return None
        num_decoding = int(np.count_nonzero(own & ~states.are_prompts))
        has_prompts, is_behind = (bool((one & states.are_prompts).any()) for one in (own, others))
        return Waiting(num_others, num_decoding, has_prompts, is_behind)

    def share_background(self, num_decoding: int, *, takes_prompts: bool) -> None:
        """Set how many decoding sessions in the background join a step beside others, and whether their prompts do."""
        if self._share != (num_decoding, takes_prompts):
            self._share, self._known = (num_decoding, takes_prompts), None

    def wait_a_beat(self) -> None:
        """Let the sessions that wait for drafts count a heartbeat."""
        states = self._states()
        for session in _chosen(states.sessions, states.may_run & ~states.runs):
            session.wait_a_beat()
        self.changed()

    def _states(self) -> _States:
        if self._known is None:
            self._known = self._look()
        return self._known

    def _look(self) -> _States:
        if self._order is None:
            sessions = list(self.values())
            in_background = np.array([session.is_background for session in sessions], np.bool_)
            self._order = sessions, np.array([session.place for session in sessions], np.intp), in_background
            self._have_background = bool(in_background.any())
            self._have_waiting = any(session.waits for session in sessions)
            self._have_grammars = any(session.params.grammar for session in sessions)
        sessions, places, in_background = self._order
        t = self.trees
        length = t.length[places]
        num_pending = length - t.kv_len[places]
        foreseen = length + np.maximum(1 - num_pending, 0) if self.has_flight else length
        may_run = (t.has_ended[places] == 0) & (foreseen - t.journaled[places] <= self._max_uncommitted)
        if self.has_flight:
            may_run &= foreseen < t.limit[places]
        if self._have_grammars:
            may_run &= t.awaits_grammar[places] == 0
        runs, decodes = may_run, may_run & (num_pending == 1)
        if self._have_waiting:
            mode = t.mode[places]
            waits = (mode == SYNC) | ((mode == JIT) & (t.num_live[places] == 0))
            has_context = (num_pending <= 1) & (t.kv_len[places] > 0)
            # They wait until their drafter has answered, or has been silent for too long.
            awaits = waits & has_context & (t.drafted_at[places] < length) & (length < t.limit[places] - 1)
            runs = may_run & ~(awaits & (t.beats_waited[places] < SYNC_PATIENCE))
        joins = runs & ((num_pending > 0) | (t.needs_history[places] == 0)) if self.has_flight else runs
        may_join, are_prompts = joins, num_pending > 1
        if self._have_background:
            kept = ~self._held_back(in_background, joins, are_prompts)
            runs, joins, decodes = runs & kept, joins & kept, decodes & kept
        return _States(sessions, may_run, runs, joins, decodes, may_join, are_prompts)

    def _held_back(self, in_background: BoolArray, joins: BoolArray, are_prompts: BoolArray) -> BoolArray:
        """Return bool[sessions]: those in the background that wait, because others run."""
        others = joins & ~in_background
        if not np.count_nonzero(others):
            return np.zeros_like(joins)
        if not np.count_nonzero(others & ~are_prompts):
            return in_background
        num_decoding, takes_prompts = self._share
        takes_prompts = takes_prompts and not np.count_nonzero(others & are_prompts)
        place = np.cumsum(in_background & joins & ~are_prompts)
        held: BoolArray = in_background & np.where(are_prompts, not takes_prompts, place > num_decoding)
        return held


def without_background(sessions: list[Session]) -> list[Session]:
    """Return the sessions that are not in the background, or all if there are no such sessions."""
    return [session for session in sessions if not session.is_background] or sessions


def _chosen(sessions: list[Session], is_chosen: BoolArray) -> list[Session]:
    if np.count_nonzero(is_chosen) == len(sessions):
        return sessions
    return [sessions[i] for i in is_chosen.nonzero()[0].tolist()]
