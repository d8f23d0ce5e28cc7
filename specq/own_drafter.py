"""A drafter in the verifier's own process: what it drafts needs no message, and is there for the very next step.

It takes part like any other, in a lane of its own: whatever other drafters send hangs from the same trees. A round is one
pass over all sessions, then the step; rounds that do better without the pass go without (`specq.round_choice`). What it says
its nodes were drawn from is believed. No I/O; time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from specq.drafter import Drafter
from specq.messages import OWN_LANE, Assign, Message, Release, Verdict
from specq.round_choice import RoundChoice
from specq.session import Session
from specq.verifier import Verifier


class OwnDrafter:
    """A `Drafter` and the verifier whose sessions it drafts for."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self.drafter, self.verifier = drafter, verifier
        self._choice = RoundChoice()
        self._began = 0.0  # when the last round did
        self._num_tokens = 0  # that it gave

    @property
    def has_work(self) -> bool:
        return self.drafter.has_work or any(self._is_new(session) for session in self.verifier.sessions.values())

    def draft(self, now: float) -> None:
        """Begin a round: hang new nodes onto the trees of the sessions that decode, if that pays."""
        self._follow()
        self._choice.learn(self._num_tokens, now - self._began)
        self._began, self._num_tokens = now, 0
        sessions = self.drafter.sessions.values()
        if not self._choice.choose(len(sessions)) and not any(session.is_sync for session in sessions):
            return
        for draft in self.drafter.step():
            self.verifier.sessions[draft.session_id].graft(draft, now)

    def hear(self, messages: Iterable[Message]) -> None:
        """Take the verdicts among what the verifier says."""
        for message in messages:
            if isinstance(message, Verdict):
                self._num_tokens += len(message.token_ids)
                self.drafter.handle(message)

    def pause(self) -> None:
        """Note that no round follows the last one at once."""
        self._choice.pause()

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
