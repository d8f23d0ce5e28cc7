"""The open sessions in order of precedence, and the sessions of the next step.

The states of all sessions are read from the arrays at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from specq.protocol import MODES, BoolArray, IntpArray
from specq.verifier.control.background import Waiting
from specq.verifier.sessions.session import SYNC_PATIENCE, Session
from specq.verifier.trees import DraftTrees

SYNC, JIT = MODES.index("sync"), MODES.index("jit")


class _States(NamedTuple):
    """The states of all sessions, in order of precedence.

    `may_run` marks the sessions that have tokens left to generate and are not too far ahead of the journal. The others
    mark the sessions that take part in steps now, and in the next step. They also show which sessions need one more
    computed token before the next one is known. `may_join` includes sessions in the background that wait.
    """

    sessions: list[Session]
    may_run: BoolArray
    runs: BoolArray
    joins: BoolArray
    decodes: BoolArray
    may_join: BoolArray
    are_prompts: BoolArray


class OpenSessions(dict[int, Session]):
    """Sessions by their ids; the sessions that have waited longest come first, those in the background last.

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
        self._num_others = 0  # sessions in `_order` that are not
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
        """Move the sessions of a step behind all others, if some waited. Those in the background keep their turn."""
        if len(sessions) == len(self):
            return
        moved = sessions
        if self._have_background:
            moved = [session for session in sessions if not session.is_background]
            if len(moved) == self._num_others:
                return
        for session in moved:
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
    def num_in_front(self) -> int:
        """The number of sessions in the next step that may have draft nodes: without the background beside others."""
        states = self._states()
        others = states.runs if self._order is None else states.runs & ~self._order[2]
        return int(np.count_nonzero(others)) or self.num_running

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
        decoding = _chosen(states.sessions, states.decodes)
        return without_background(decoding) if self._have_background else decoding

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
            sessions = sorted(self.values(), key=attrgetter("is_background"))
            in_background = np.array([session.is_background for session in sessions], np.bool_)
            self._order = sessions, np.array([session.place for session in sessions], np.intp), in_background
            self._num_others = len(sessions) - int(np.count_nonzero(in_background))
            self._have_background = self._num_others < len(sessions)
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
