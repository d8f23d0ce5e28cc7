"""The open sessions of a verifier in order of precedence, and which of them take part in the next step: read from the
arrays, for all at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specq.protocol import MODES, BoolArray, IntpArray
from specq.verifier.sessions.session import SYNC_PATIENCE, Session
from specq.verifier.trees import DraftTrees

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
