"""A drafter in the verifier's own process: what it drafts needs no message, and is there for the very next step.

It takes part like any other, in a lane of its own: whatever other drafters send hangs from the same trees. Between two
steps it runs one pass over all sessions, so it pays where a pass is short next to a step. What it says its nodes were drawn
from is believed. No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specq.drafter import Drafter
from specq.messages import OWN_LANE, Assign, Message, Release, Verdict
from specq.session import Session
from specq.verifier import Verifier


class OwnDrafter:
    """A `Drafter` and the verifier whose sessions it drafts for."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self.drafter, self.verifier = drafter, verifier

    @property
    def has_work(self) -> bool:
        return self.drafter.has_work or any(self._is_new(session) for session in self.verifier.sessions.values())

    def draft(self, now: float) -> None:
        """Run a pass for the sessions that decode, and hang its nodes onto their trees."""
        self._follow()
        for draft in self.drafter.step():
            self.verifier.sessions[draft.session_id].graft(draft, now)

    def hear(self, messages: Iterable[Message]) -> None:
        """Take the verdicts among what the verifier says."""
        for message in messages:
            if isinstance(message, Verdict):
                self.drafter.handle(message)

    def _follow(self) -> None:
        """Take up sessions that have begun to decode, and drop those that are gone."""
        sessions = self.verifier.sessions
        for known in list(self.drafter.sessions.values()):
            session = sessions.get(known.session_id)
            if session is None or session.epoch != known.epoch:
                self.drafter.handle(Release(session_id=known.session_id, epoch=known.epoch))
        for session in sessions.values():
            if self._is_new(session):
                self.drafter.handle(_assignment(session))

    def _is_new(self, session: Session) -> bool:
        is_drafted_for = session.speculation.mode != "plain" and session.params.strategy != "greedy"
        decodes = session.num_pending == 1 and not session.finish
        return is_drafted_for and decodes and session.session_id not in self.drafter.sessions


def _assignment(session: Session) -> Assign:
    return Assign(
        session_id=session.session_id,
        epoch=session.epoch,
        lane=OWN_LANE,
        prompt_len=session.prompt_len,
        params=session.params,
        speculation=session.speculation,
        token_ids=np.array(session.token_ids, np.int32),
    )
