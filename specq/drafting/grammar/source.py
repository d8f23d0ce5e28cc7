"""Forced tokens as a source: what a session's grammar allows as the only continuation.

They are drafted behind the transcript, and behind the likeliest leaves of the trees that other sources have drafted. Of
a compact JSON object with four fields, nearly half of the tokens are forced. A draft takes microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from specq.drafting.grammar.leads import batch_of_forced, most_forced
from specq.protocol import GRAMMAR
from specq.runtime import Faults
from specq.verification import WITH_GRAMMAR
from specq.verifier.sources import NONE, Budget, DraftBatch, DraftSource, Session, Setup

MOST_LEAVES = 4  # of a session's tree that are continued, if none is sampled
LEAST_SCORE = math.log(0.05)  # cumulative, of a leaf that is continued


class ForcedTokens(DraftSource):
    """Drafts for the sessions that have a grammar, behind all other sources."""

    name = GRAMMAR
    takes_sync = False

    def among(self, sessions: Sequence[Session]) -> Sequence[Session]:
        """See `DraftSource.among`."""
        if not sessions:
            return sessions
        traits = sessions[0].trees.traits[[session.place for session in sessions]]
        return [sessions[i] for i in (traits & WITH_GRAMMAR).nonzero()[0].tolist()]

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Return the forced tokens of each session, as chains behind its transcript and its leaves."""
        drafted: list[tuple[Session, Trie]] = []
        for session in sessions:
            with Faults().of(session, "drafted for"):
                trie = forced_of(session)
                if trie.token_ids:
                    drafted.append((session, trie))
        if not drafted:
            return ()
        sessions, tries = zip(*drafted, strict=True)
        return [batch_of_forced(sessions, [trie.token_ids for trie in tries], [trie.parents for trie in tries])]


class Trie:
    """Token sequences as a tree, each prefix once: `token_ids` and `parents`, parents first."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._places: dict[tuple[int, int], int] = {}

    def add(self, token_ids: Sequence[int]) -> None:
        """Add a sequence from the root on."""
        at = NONE
        for token in token_ids:
            key = (at, token)
            if key not in self._places:
                self._places[key] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(at)
            at = self._places[key]


def forced_of(session: Session) -> Trie:
    """Return the paths of a session's tree that forced tokens continue, with these tokens."""
    found, grammar = Trie(), session.grammar
    most = 0 if grammar is None else most_forced(session)
    if grammar is None or most <= 0:
        return found
    for path in [(), *_leaves(session)]:
        forced = grammar.forced(path) if len(path) < most else []
        if forced:
            found.add([*path, *forced][:most])
    return found


def _leaves(session: Session) -> list[tuple[int, ...]]:
    """Return the tokens on the paths to the likeliest leaves of a session's tree.

    With sampled nodes all likely ones count: which leaves are the likeliest depends on tokens in other branches, and so
    would the forced tokens (decision 0008).
    """
    trees = session.trees
    if not session.num_live:
        return []
    nodes = trees.operations.live(session.place)
    paths: dict[int, tuple[float, tuple[int, ...]]] = {NONE: (0.0, ())}
    inner = set[int]()
    rows = trees.token[nodes].tolist(), trees.parent[nodes].tolist(), trees.score[nodes].tolist()
    for node, token, parent, score in zip(nodes, *rows, strict=True):
        above, tokens = paths[parent]
        paths[node] = above + min(score, 0.0), (*tokens, token)
        inner.add(parent)
    leaves = [paths[node] for node in nodes if node not in inner]
    likely = sorted((leaf for leaf in leaves if leaf[0] >= LEAST_SCORE and min(leaf[1]) >= 0), reverse=True)
    return [tokens for _, tokens in (likely if session.takes_distributions else likely[:MOST_LEAVES])]


def make(_setup: Setup) -> ForcedTokens:
    """Return the source of a verifier. It drafts only for jobs with a grammar."""
    return ForcedTokens()
