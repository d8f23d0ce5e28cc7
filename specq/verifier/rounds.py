"""A round is one step of one session: from the engine's judgement to committed tokens and counts."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from specq.protocol import Int32Array, Judgement
from specq.verifier.scheduler import ScheduledSession
from specq.verifier.session import Session


class Round(NamedTuple):
    """What a step committed to a session.

    base_len    the committed length before; token_ids i32[m]: the accepted path, then the correction or bonus
    accepted    indices of the accepted among the share's nodes, or among those of its chain
    """

    share: ScheduledSession
    base_len: int
    token_ids: Int32Array
    accepted: AbstractSet[int]

    @property
    def session(self) -> Session:
        return self.share.session

    def waited_us(self, started: float) -> int:
        """Return the microseconds that the oldest verified node had waited when the step started."""
        if not self.share.nodes:
            return 0
        return int((started - min(node.arrived for node in self.share.nodes)) * 1e6)


def commit(share: ScheduledSession, judgement: Judgement, min_accept_prob: int) -> Round:
    """Commit what was judged, up to the token that ends the text, and count it; return the round.

    The counting looks at the tree as it was verified, so it comes before the transcript grows.
    """
    session, base_len = share.session, share.session.length
    session.kv_len += len(judgement.path)
    tokens = judgement.token_ids.tolist()
    num_kept, session.finish = session.up_to_end(tokens)
    accepted = set(judgement.path[:num_kept])
    _count(share, accepted, min_accept_prob)
    if judgement.logprobs is not None:
        session.logprobs.add(judgement.logprobs, num_kept)
    session.commit(tokens[:num_kept], len(share.nodes))
    return Round(share, base_len, judgement.token_ids[:num_kept], accepted)


def _count(share: ScheduledSession, accepted: AbstractSet[int], min_accept_prob: int) -> None:
    session = share.session
    if session.chain is not None:
        session.count_chain_round(share.chain_len, len(accepted))
    else:
        session.count_round(share.nodes, accepted)
    session.stats.min_accept_probs += min_accept_prob
