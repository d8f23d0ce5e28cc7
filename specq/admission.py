"""Which sessions have room in the engine: those that wait are opened while their contexts fit, others are evicted if need be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import structlog

from specq.engines import Engine
from specq.session import Session

log = structlog.get_logger(__name__)

SHARED_PREFIX = 16  # tokens in common from which it pays to wait for another session's prefill


def admit(running: Sequence[Session], sessions: Iterable[Session], engine: Engine) -> None:
    """Open those of the running sessions whose contexts fit. Where even one row each does not, evict those that are parked
    (open, but not running: ahead of the journal, or between rounds), then the youngest."""
    ids = {session.session_id for session in running}
    parked = [s for s in sessions if s.is_open and s.session_id not in ids]
    for session in [s for s in running if not s.is_open]:
        if not _awaits_prefix(session, running) and _fits(session, running, parked, engine):
            session.kv_len = engine.open(session.session_id, np.array(session.token_ids, np.int32))
            session.is_open = True
    opened = sorted((session for session in running if session.is_open), key=lambda session: session.session_id)
    while engine.free_slots < len(opened) and (parked or len(opened) > 1):
        _evict(parked.pop() if parked else opened.pop(), engine)


def _fits(session: Session, running: Sequence[Session], parked: list[Session], engine: Engine) -> bool:
    """Return whether a session's context fits; where nothing else runs, it is given the room of parked ones."""
    is_alone = not any(other.is_open for other in running)
    while is_alone and parked and session.length >= engine.free_slots:
        _evict(parked.pop(), engine)
    return is_alone or session.length < engine.free_slots


def _awaits_prefix(session: Session, running: Sequence[Session]) -> bool:
    """Is another session computing a prefix that this one could share a step later?"""
    start = session.token_ids[:SHARED_PREFIX]
    return any(
        other.is_open and other.num_pending > 1 and other.token_ids[:SHARED_PREFIX] == start for other in running
    )


def _evict(session: Session, engine: Engine) -> None:
    engine.close(session.session_id)
    session.is_open, session.kv_len = False, 0
    log.info("session_evicted", session=session.session_id, length=session.length)
