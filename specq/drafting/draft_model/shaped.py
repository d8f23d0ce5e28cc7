"""Trees of the shapes that jobs ask for, drafted in the verifier's process by the `DraftWorker` of draft workers.

A job with `tree`, `num_candidates` or fixed fan-outs sets what is drafted for it, at any cost. So this module has no
choice to make. Each step asks for the whole tree, one pass a level. Nodes on the verdict's path are kept, as at a draft
worker.

Rule: an exception costs a session only its drafts from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from specq.drafting.worker import DraftWorker
from specq.protocol import COLOCATED_LANE, Assign, Draft, EngineLostError, Message, ProtocolError, Release, SpecqError
from specq.verifier.sources import DraftBatch, Round, Session, batch_of, verdict_of

MOST_PASSES = 64  # passes of a step, which is the maximum number of levels of a shape
MOST_NODES = 64  # nodes that one pass expands, of all sessions together; at least one of each


class ShapedTrees:
    """Sessions with shapes of their own, and the worker that grows their trees."""

    def __init__(self, worker: DraftWorker) -> None:
        self.worker = worker
        self._known: dict[int, Session] = {}
        self._refused: dict[int, Session] = {}
        self._waiting: list[Session] = []  # sessions to draft for when drafts are collected

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def begin(self, sessions: Sequence[Session]) -> bool:
        """Note which of these decoding sessions need drafts; return whether any does."""
        self._waiting = [session for session in sessions if _has_shape(session) and self._knows(session)]
        return bool(self._waiting)

    def collect(self) -> Sequence[DraftBatch]:
        """Grow the trees of the noted sessions."""
        self._waiting = [session for session in self._waiting if self._known.get(session.session_id) is session]
        if not self._waiting:
            return ()
        self._waiting.clear()
        drafts: list[Draft] = []
        for _ in range(MOST_PASSES):
            if not self.worker.has_work:
                break
            drafts += self.worker.step()
        arrived = [(self._known[draft.session_id], draft) for draft in drafts]
        return [batch_of(arrived)] if arrived else ()

    def observe(self, rounds: Sequence[Round], min_accept_prob: float) -> None:
        """Apply the rounds to the trees; `min_accept_prob` as in `Budget`."""
        for done in rounds if self._known else ():
            if self._known.get(done.session.session_id) is done.session:
                self._tell(done.session, verdict_of(done, round(1000 * min_accept_prob), (0, 0)))
                if done.session.finish:
                    self.close(done.session)

    def _knows(self, session: Session) -> bool:
        """Give a session to the worker if it is new; return whether it drafts for it."""
        session_id = session.session_id
        if session_id in self._refused:
            return False
        if session_id not in self._known:
            self._known[session_id] = session
            self._tell(session, _assigned(session))
        elif session_id not in self.worker.sessions:  # it raised an exception
            self.refuse(session)
        return session_id in self._known

    def _tell(self, session: Session, message: Message) -> None:
        """Hand the worker a message on a session. If the worker cannot handle it, the session's drafts end."""
        try:
            self.worker.handle(message)
        except EngineLostError:
            raise
        except SpecqError:
            self.refuse(session)

    def refuse(self, session: Session) -> None:
        """Stop drafting for a session."""
        self.close(session)
        self._refused[session.session_id] = session

    def close(self, session: Session) -> None:
        """Forget a session, known or not."""
        self._refused.pop(session.session_id, None)
        if self._known.pop(session.session_id, None) is not None and session.session_id in self.worker.sessions:
            with suppress(ProtocolError):
                self.worker.handle(Release(session_id=session.session_id, epoch=session.epoch))


def _has_shape(session: Session) -> bool:
    """Return whether a session has its own shape, takes drafts, and has room for them."""
    return session.takes_drafts and session.speculation.has_fixed_shape and session.limit - session.length > 1


def _assigned(session: Session) -> Assign:
    """Return the message that assigns the session to a draft worker."""
    return Assign(
        session_id=session.session_id,
        epoch=session.epoch,
        lane=COLOCATED_LANE,
        prompt_len=session.prompt_len,
        params=session.params,
        speculation=session.speculation,
        token_ids=np.array(session.token_ids, np.int32),
    )
