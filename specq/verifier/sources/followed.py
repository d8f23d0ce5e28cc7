"""Which rows of a step stand before which tokens of the texts: for sources that read hidden states of whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specq.verification import ends_of
from specq.verifier.sessions.session import Session
from specq.verifier.sources.interface import ComputedDrafts
from specq.verifier.step.rounds import Rounds

Paths = dict[int, Sequence[int]]


class Followed(NamedTuple):
    """Tokens of a session's text from position `first` on; before each stands one of these rows of hidden states."""

    session_id: int
    first: int
    token_ids: Sequence[int]
    rows: Sequence[int]


def accepted_paths(rounds: Rounds) -> Paths:
    """Return the places of the accepted nodes among the verified ones, by session; of sessions that had some."""
    accepted = rounds.is_accepted.nonzero()[0]
    if not len(accepted):
        return {}
    ends = ends_of(rounds.num_nodes)
    of_rounds = np.searchsorted(ends, accepted, side="right")
    places = (accepted - (ends - rounds.num_nodes)[of_rounds]).tolist()
    counts = np.bincount(of_rounds)
    which = counts.nonzero()[0]
    spans = counts[which].cumsum().tolist()
    ids = [rounds.sessions[i].session_id for i in which.tolist()]
    return {i: places[first:end] for i, first, end in zip(ids, [0, *spans], spans, strict=False)}


def followed_rows(
    part: ComputedDrafts, paths: Paths, takes: Callable[[Session], bool]
) -> Iterator[tuple[Session, Followed]]:
    """Yield what each text goes on with behind the rows of hidden states that were computed of it: of the tokens that
    the step computed, and of the accepted path. `takes`: whether a session's text is followed. To be asked after the
    step was committed."""
    shares, hidden = part.shares, part.output.hidden
    if hidden is None:
        return
    batch = shares.batch
    counts = np.diff(hidden.starts) - batch.num_nodes  # of tokens
    firsts = batch.base_lens - counts + 1
    of_sessions = zip(shares.sessions, hidden.starts.tolist(), counts.tolist(), firsts.tolist(), strict=False)
    for session, start, count, first in of_sessions:
        if not takes(session):
            continue
        path, end = paths.get(session.session_id, ()), start + count
        token_ids = session.token_ids[first : first + count + len(path)]
        rows = [*range(start, end), *(end + node for node in path)]
        if len(token_ids) < len(rows):
            rows = rows[: len(token_ids)]
        if rows:
            yield session, Followed(session.session_id, first, token_ids, rows)
