"""The sessions of a verifier for which chains are drafted.

It tracks the sessions that the chain drafter knows, the sessions that need chains in a round, and how long their chains
may be. A session is opened at the chain drafter for its first draft. It is closed between two rounds. A refused session
gets no drafts until it is closed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import structlog

from specq.drafting.interface import ChainDrafter
from specq.drafting.worker import drafting_params
from specq.protocol import BoolArray, EngineLostError, IntpArray
from specq.runtime import Faults, traced
from specq.verification import WITH_GRAMMAR
from specq.verifier.sources import NONE, Rounds, Session, promised

log = structlog.get_logger(__name__)


class ChainSessions:
    """Sessions at a chain drafter.

    known, refused   by id.
    gone             ids of sessions closed since the last round.
    """

    def __init__(self, chains: ChainDrafter) -> None:
        self._chains = chains
        self.known: dict[int, Session] = {}
        self.refused: dict[int, Session] = {}
        self.gone: list[int] = []

    def open(self, session: Session) -> bool:
        """Open a new session; return whether that succeeded."""
        faults = Faults()
        self.known[session.session_id] = session
        with faults.of(session, "drafted for"):
            params = drafting_params(session.params, session.speculation)
            self._chains.open(session.session_id, np.array(session.token_ids, np.int32), params, session.owner)
        return session not in faults

    def refuse(self, session: Session) -> None:
        """Stop drafting for a session, which was closed."""
        self.refused[session.session_id] = session

    def close(self, session: Session) -> None:
        """Forget a session, known or not. The chain drafter may be busy with it and closes it between two rounds."""
        self.refused.pop(session.session_id, None)
        if self.known.pop(session.session_id, None) is not None:
            self.gone.append(session.session_id)

    def drop_gone(self) -> None:
        """Close the removed sessions at the chain drafter, between two rounds."""
        for session_id in self.gone:
            self._chains.close(session_id)
        self.gone.clear()

    def commit(self, rounds: Rounds, faults: Faults) -> IntpArray:
        """Append what rounds committed to the contexts, all sessions at once or, if that raises, one by one.

        Returns how many of these tokens the chains had predicted.
        """
        ids = [session.session_id for session in rounds.sessions]
        try:
            return self._chains.commit(ids, rounds.num_tokens, rounds.token_ids)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            log.warning("draft_contexts_failed", num_sessions=len(ids), **traced(error))
        found: IntpArray = np.zeros(len(ids), np.intp)
        for i, done in enumerate(rounds):
            with faults.of(done.session, "drafted for"):
                found[i] = self._chains.commit([ids[i]], rounds.num_tokens[i : i + 1], done.token_ids)[0]
        return found


def without_leads(
    sessions: Sequence[Session], enough: float, *, has_forced: bool, is_behind: bool
) -> Sequence[Session]:
    """Return the sessions that need chains.

    They are synchronous sessions, and sessions whose other drafts promise fewer than `enough` tokens.

    has_forced  whether forced tokens are drafted, too. These are certain, and cost no pass of a draft model.
    is_behind   whether chains of point masses come behind the forced tokens. These do not count then.
    """
    if not sessions:
        return sessions
    trees, places = sessions[0].trees, _places(sessions)
    has_forced &= bool(np.count_nonzero(trees.traits[places] & WITH_GRAMMAR))
    if not has_forced and not np.count_nonzero(trees.num_live[places]):
        return sessions
    forced = [has_forced and not (is_behind and not one.takes_distributions) for one in sessions]
    leads = [0.0 if one.waits else _lead(one, has_forced=own) for one, own in zip(sessions, forced, strict=True)]
    return [one for one, lead in zip(sessions, leads, strict=True) if not lead or lead < enough]


def _lead(session: Session, *, has_forced: bool) -> float:
    """Return how many tokens a session's other drafts promise; 0 if that raises (the verifier's plan reports it)."""
    with Faults().of(session, "drafted for"):
        lead = float(promised([session])[0]) if session.num_live else 0.0
        if not has_forced or session.grammar is None or session.speculation.has_fixed_shape:
            return lead
        return max(lead, float(len(session.grammar.forced())))
    return 0.0


def rooms_for_chains(sessions: Sequence[Session]) -> IntpArray:
    """Return how many levels each session's chain may have, i64[sessions]; the correction takes one position itself.

    It is 0 or less if the room is used up, the session takes no chains, or it is closed.
    """
    if not sessions:
        return np.zeros(0, np.intp)
    trees, places = sessions[0].trees, _places(sessions)
    rooms: IntpArray = np.minimum(trees.longest_chain[places], trees.limit[places] - trees.length[places] - 1).astype(
        np.intp
    )
    rooms[places == NONE] = 0
    return rooms


def chosen(sessions: Sequence[Session], is_chosen: BoolArray) -> Sequence[Session]:
    """Return some of the sessions; the same object if it is all of them."""
    if np.count_nonzero(is_chosen) == len(sessions):
        return sessions
    return [sessions[i] for i in np.flatnonzero(is_chosen).tolist()]


def _places(sessions: Sequence[Session]) -> IntpArray:
    return np.array([session.place for session in sessions], np.intp)
