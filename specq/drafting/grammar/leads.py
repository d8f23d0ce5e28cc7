"""What a grammar forces behind the transcript: other sources draft behind it, as if it were committed.

Masks allow nothing else there, so these tokens are certain. They are grafted in the lane of forced tokens, before what
other sources draft behind them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.drafting.interface import FORCED_SCORE
from specq.protocol import GRAMMAR_LANE, Int32Array
from specq.runtime import Faults
from specq.verification import WITH_GRAMMAR
from specq.verifier.sources import NEXT_IDS, Budget, DraftBatch, Session, longest_chain

MOST_DEPTH = 64  # of a draft, with the other drafts that it continues


class Leads:
    """The forced tokens behind the transcripts of some sessions, by session id. Sessions without any are left out."""

    def __init__(self, sessions: Sequence[Session], token_ids: dict[int, list[int]]) -> None:
        self._sessions, self._token_ids = sessions, token_ids

    def __bool__(self) -> bool:
        return bool(self._token_ids)

    def of(self, session: Session) -> list[int]:
        """Return the forced tokens of a session."""
        return self._token_ids.get(session.session_id, [])

    def batches(self) -> list[DraftBatch]:
        """Return the forced tokens as a batch of chains: a list of one or none."""
        some = [session for session in self._sessions if session.session_id in self._token_ids]
        if not some:
            return []
        tries = [self.of(session) for session in some]
        return [batch_of_forced(some, tries, [range(-1, len(own) - 1) for own in tries])]

    def before(self, batch: DraftBatch) -> DraftBatch:
        """Return drafts of chains or trees in one lane, with NEXT_IDS, behind the forced tokens of their sessions."""
        if not self or not any(self.of(session) for session in batch.sessions):
            return batch
        sizes, token_ids, parents, scores = list[int](), list[int](), list[int](), list[float]()
        ends = np.cumsum(batch.sizes).tolist()
        for session, first, end in zip(batch.sessions, [0, *ends], ends, strict=False):
            lead = self.of(session)
            sizes.append(len(lead) + end - first)
            token_ids += [*lead, *batch.token_ids[first:end].tolist()]
            parents += [
                *range(-1, len(lead) - 1),
                *(parent + len(lead) for parent in batch.parent_ids[first:end].tolist()),
            ]
            scores += [*[FORCED_SCORE] * len(lead), *batch.scores[first:end].tolist()]
        nodes = np.array(token_ids, np.int32), np.array(parents, np.int32), np.array(scores, np.float64)
        heads = batch.sessions, batch.lanes, batch.base_lens, NEXT_IDS, sizes
        return DraftBatch(*heads, *nodes, is_measured=batch.is_measured)


NO_LEADS = Leads((), {})


def leads_of(sessions: Sequence[Session], budget: Budget) -> Leads:
    """Return the leads of sessions that take drafts, if forced tokens are drafted.

    Sessions with sampled nodes have none.
    """
    if not budget.has_forced or not sessions:
        return NO_LEADS
    traits = sessions[0].trees.traits[[session.place for session in sessions]]
    some = [sessions[i] for i in (traits & WITH_GRAMMAR).nonzero()[0].tolist()]
    found = dict[int, list[int]]()
    for session in some:
        with Faults().of(session, "drafted for"):
            most = most_forced(session)
            if most > 0 and not session.takes_distributions and session.grammar is not None:
                found[session.session_id] = session.grammar.forced()[:most]
    return Leads(some, {session_id: lead for session_id, lead in found.items() if lead})


def most_forced(session: Session) -> int:
    """Return how many tokens may be drafted behind the transcript; 0 if the session takes no forced tokens."""
    if session.waits or not session.takes_drafts or session.speculation.has_fixed_shape:
        return 0
    return min(longest_chain(session.speculation, MOST_DEPTH), int(session.limit) - session.length - 1)


def batch_of_forced(
    sessions: Sequence[Session], token_ids: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]
) -> DraftBatch:
    """Return trees of forced tokens, parents first, one for each session."""
    flat: Int32Array = np.array([token for own in token_ids for token in own], np.int32)
    return DraftBatch(
        sessions=sessions,
        lanes=GRAMMAR_LANE,
        base_lens=[session.length for session in sessions],
        first_ids=NEXT_IDS,
        sizes=[*map(len, token_ids)],
        token_ids=flat,
        parent_ids=np.array([parent for own in parents for parent in own], np.int32),
        scores=np.full(len(flat), FORCED_SCORE, np.float32),
    )
