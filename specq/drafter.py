"""A draft worker without its sockets: verdicts in, drafts out, one proposer inside.

For each session it keeps the committed context and the tree of nodes drafted beyond it. The tree grows best first: each
pass expands, in one batched call over all sessions, the nodes likeliest to lie on the target's path. Nothing is waited
for; verdicts are heard between passes, cut the tree and move its root.

Rules: a drafter only hints. Where that is of no use (a poor model, or a verifier too busy to check more than it must) it
falls silent and rests, but for a pass now and then. What it sends names positions, so that late, doubled or lost messages
do no harm. If verdict after verdict uses none of the nodes that were sent, they were lost, and are sent again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import structlog

from specq.draft_session import DraftNode, DraftSession
from specq.errors import EngineError, ProtocolError
from specq.experience import Experience
from specq.messages import Assign, Draft, Heartbeat, Message, Release, Verdict
from specq.proposers import Children, Expansion, Proposer
from specq.proposers.chains import ChainProposer, expand_chain, level_ids
from specq.types import Int32Array
from specq.verification import STRATEGIES

log = structlog.get_logger(__name__)

CHAIN_WIDTH = 2  # chains of a pass, for few sessions: each more makes a pass longer, in which no verdict is heard


class Drafter:
    """Sessions, a proposer, and the loop's body between them."""

    def __init__(
        self,
        proposer: Proposer,
        *,
        incarnation: int,
        width: int = 8,
        fan_out: int = 3,
        max_ahead: int = 32,
        chain: int = 1,
    ) -> None:
        """`width` nodes at most, but at least one a session, are expanded a pass, `fan_out` children drafted for each,
        `max_ahead` tokens deep; below each, where the proposer can do that at little cost, a chain of `chain` levels."""
        self.proposer, self.incarnation = proposer, incarnation
        self.width, self.fan_out, self.max_ahead = width, fan_out, max_ahead
        self.chain = chain if isinstance(proposer, ChainProposer) and proposer.has_chains else 1
        self.sessions: dict[int, DraftSession] = {}
        self.experience: dict[
            str, Experience
        ] = {}  # by strategy: nodes that are drawn fare worse than those that are not
        self.state = "ready"
        self.num_passes = 0
        self._handlers: dict[type[Message], Callable[..., None]] = {
            Assign: self._assign,
            Release: self._release,
            Verdict: self._verdict,
        }

    def handle(self, message: Message) -> None:
        """Take one message; raises ProtocolError for one that is no drafter's."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"a drafter takes no {message.TYPE}")
        handler(message)

    def _assign(self, message: Assign) -> None:
        if not 0 < message.prompt_len <= len(message.token_ids):
            length = len(message.token_ids)
            raise ProtocolError(f"a context of {length} tokens, of which {message.prompt_len} are the prompt")
        if message.params.strategy not in STRATEGIES:
            raise ProtocolError(f"unknown strategy {message.params.strategy!r}")
        _check_tokens(message.token_ids)
        known = self.sessions.get(message.session_id)
        if known is not None and (known.epoch, known.lane) == (message.epoch, message.lane):
            return
        if known is not None:
            self.proposer.close(message.session_id)
        experience = self.experience.setdefault(message.params.strategy, Experience())
        session = DraftSession(message, experience, fan_out=self.fan_out, max_ahead=self.max_ahead, chain=self.chain)
        self.sessions[message.session_id] = session
        self.proposer.open(message.session_id, message.token_ids, session.params)

    def _release(self, message: Release) -> None:
        session = self.sessions.get(message.session_id)
        if session is not None and session.epoch <= message.epoch:
            self._drop(session)

    def _drop(self, session: DraftSession) -> None:
        del self.sessions[session.session_id]
        self.proposer.close(session.session_id)

    def _verdict(self, message: Verdict) -> None:
        session = self.sessions.get(message.session_id)
        if session is None or session.epoch != message.epoch:
            return
        _check_tokens(message.token_ids)
        if message.finish:
            self._drop(session)
            return
        session.learn(message)
        known = session.length - message.base_len
        if 0 <= known < len(message.token_ids):  # else it is old, or there is a gap that the broker will fill
            fresh = message.token_ids[known:]
            path = session.commit(fresh.tolist())
            self.proposer.commit(session.session_id, fresh, path)
        session.hear(message)

    @property
    def has_work(self) -> bool:
        return any(next(session.frontier(), None) is not None for session in self.sessions.values())

    def step(self) -> list[Draft]:
        """Run one pass: expand the likeliest nodes of all sessions; return what is worth sending."""
        chosen = self._choose()
        if not chosen:
            return []
        counts = [session.chain_below(node) for session, node in chosen]
        depth, width = max(map(len, counts)), max(map(max, counts))
        requests = [self._request(session, node, depth * width) for session, node in chosen]
        try:
            answers = expand_chain(self.proposer, requests, depth)
        except EngineError as error:
            return self._give_up(chosen, str(error))
        for (session, node), request, levels, own in zip(chosen, requests, answers, counts, strict=True):
            _grow(session, node, zip(levels, level_ids(request, depth), own, strict=False))
        self.num_passes += 1
        touched = {session.session_id: session for session, _ in chosen}.values()
        return [draft for session in touched if (draft := session.draft()) is not None]

    def _give_up(self, chosen: Sequence[tuple[DraftSession, DraftNode | None]], reason: str) -> list[Draft]:
        """Forget the sessions of a pass that failed; the broker assigns them again when it misses them."""
        log.warning("pass_failed", reason=reason, num_requests=len(chosen))
        for session in {session.session_id: session for session, _ in chosen}.values():
            self._drop(session)
        return []

    def _choose(self) -> list[tuple[DraftSession, DraftNode | None]]:
        offers = [(reach, session, node) for session in self.sessions.values() for reach, node in session.frontier()]
        width = self.width if self.chain == 1 else min(self.width, CHAIN_WIDTH)
        best = heapq.nlargest(max(width, len(self.sessions)), offers, key=lambda offer: offer[0])
        return [(session, node) for _, session, node in best]

    def _request(self, session: DraftSession, node: DraftNode | None, num_ids: int) -> Expansion:
        first = session.next_id
        session.next_id += num_ids
        return Expansion(session.session_id, -1 if node is None else node.node_id, tuple(range(first, session.next_id)))

    def heartbeat(self) -> Heartbeat:
        """Return the state of this drafter and the position that it knows of each session."""
        sessions = list(self.sessions.values())
        return Heartbeat(
            incarnation=self.incarnation,
            state=self.state,
            load=len(sessions),
            steps=self.num_passes,
            pending=int(self.has_work),
            session_ids=np.array([s.session_id for s in sessions], np.int64),
            epochs=np.array([s.epoch for s in sessions], np.int64),
            lengths=np.array([s.length for s in sessions], np.int32),
        )


def _check_tokens(token_ids: Int32Array) -> None:
    """Raise ProtocolError for what is no token; proposers cope with those that only the target has."""
    if len(token_ids) and token_ids.min() < 0:
        raise ProtocolError("token ids below 0")


def _grow(
    session: DraftSession, node: DraftNode | None, levels: Iterable[tuple[Children, tuple[int, ...], int]]
) -> None:
    """Hang a chain's levels below a node, or below the context: of each its children, their ids, and how many are kept."""
    for children, ids, count in levels:
        session.grow(node, children, ids[:count])
        if not len(children.token_ids):
            return
        siblings = session.roots if node is None else node.children
        node = siblings[int(children.token_ids[0])]
