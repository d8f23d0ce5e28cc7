"""Which sessions have room in the engine.

Waiting sessions are opened while their contexts fit. Those of different brokers take turns. If needed, others are
evicted. A session that can never run is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import structlog

from specq.engines import Engine, reason_against_scored
from specq.protocol import ModelInfo, Open
from specq.runtime import Faults
from specq.verification import reason_against
from specq.verifier.sessions.session import Session, SessionEvent

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
    may_evict = prefilling is None
    parked = _parked(running, sessions, busy, may_evict=may_evict)
    prefixes = _Prefixes(prefilling or (), turn)
    is_alone = may_evict and not any(session.is_open for session in running)
    num_decoding = int(np.count_nonzero(trees.is_open[places] & (trees.length[places] - trees.kv_len[places] <= 1)))
    are_few = num_decoding > len(turn) - num_decoding  # compared with the sessions that wait for their first tokens
    for session in _by_turns([s for s in turn if not s.is_open], [s for s in turn if s.is_open]):
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


def _parked(
    running: Sequence[Session], sessions: Iterable[Session], busy: Collection[int] | None, *, may_evict: bool
) -> list[Session]:
    """Return the open sessions that do not run and may be evicted."""
    ids = {session.session_id for session in running}
    parked = [session for session in sessions if session.is_open and session.session_id not in ids]
    if may_evict:
        return parked
    return [one for one in parked if one.is_background and busy is not None and one.session_id not in busy]


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


def _by_turns(sessions: list[Session], others: Iterable[Session] = ()) -> list[Session]:
    """Return the sessions so that their brokers take turns: the broker with the fewest comes first.

    Then no broker's sessions keep all others waiting. The sessions of a broker stay in order, and sessions in the
    background come behind all others.

    others  sessions that the brokers have already.
    """
    if len({session.broker for session in sessions}) < 2:
        return sessions
    num_before = Counter(session.broker for session in others)
    places = list[tuple[bool, int]]()
    for session in sessions:
        places.append((session.is_background, num_before[session.broker]))
        num_before[session.broker] += 1
    return [sessions[i] for i in sorted(range(len(sessions)), key=places.__getitem__)]


def _make_room(running: Iterable[Session], turn: Sequence[Session], parked: list[Session], engine: Engine) -> None:
    """Evict sessions until the other sessions of this turn have room for a row each.

    Parked sessions are evicted first. A parked session is open but not running. It is ahead of the journal, or between
    rounds, or in the background. After these, the sessions with the highest ids are evicted, in any turn, those in the
    background first. So the open session with the lowest id always reaches its end. With several brokers, each keeps
    equally many sessions.
    """
    opened = [session for session in running if session.is_open]
    opened.sort(key=lambda session: (session.is_background, session.session_id))
    opened = _by_turns(opened)
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
