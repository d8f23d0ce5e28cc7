"""Which rows of a step stand before which tokens of the texts: for sources that read hidden states of whole texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from specq.proposers import Followed
from specq.verifier.rounds import Round
from specq.verifier.session import Session
from specq.verifier.sources.interface import Computed

Paths = dict[int, tuple[int, ...]]


def accepted_paths(rounds: Sequence[Round]) -> Paths:
    """Return the places of the accepted nodes among the verified ones, by session; of sessions that had some."""
    return {one.session.session_id: one.path for one in rounds if len(one.nodes)}


def followed_rows(part: Computed, paths: Paths, takes: Callable[[Session], bool]) -> Iterator[tuple[Session, Followed]]:
    """Yield what each text goes on with behind the rows of hidden states that were computed of it: of the tokens that the step computed, and of
    the accepted path. `takes`: whether a session's text is followed. To be asked after the step was committed."""
    shares, hidden = part.shares, part.output.hidden
    if hidden is None:
        return
    starts, batch = hidden.starts.tolist(), shares.batch
    ends = batch.base_lens.tolist()  # behind each session's own tokens
    for i, session in enumerate(shares.sessions):
        if not takes(session):
            continue
        num_rows = starts[i + 1] - starts[i] - int(batch.num_nodes[i])  # of tokens
        path = paths.get(session.session_id, ())
        first = ends[i] - num_rows + 1
        token_ids = session.token_ids[first : ends[i] + 1 + len(path)]
        behind = [starts[i] + num_rows + node for node in path]
        rows = [*range(starts[i], starts[i] + num_rows), *behind][: len(token_ids)]
        if rows:
            yield session, Followed(session.session_id, first, token_ids, rows)
