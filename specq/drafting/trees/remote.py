"""Drafters of draft workers, away from the target whose hidden states they read: what all kinds of heads share.

The verifier sends the states of the text (`Activations`). They wait until the tokens behind them are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from specq.drafting.draft_model.children import ChildMaker, ChildRequest
from specq.drafting.draft_model.kv_trees import TreeSession
from specq.drafting.interface import NO_CHILDREN, Children, Drafter, Expansion
from specq.protocol import ActivationRequest, Float32Array, Int32Array, ModelInfo, SamplingParams
from specq.verification import Logits
from specq.verifier.sources import Followed

MOST_WAITING = 4096  # rows of states whose tokens are not known yet


@dataclass(slots=True)
class FedSession(TreeSession):
    """A text and the tree below it.

    waiting  states [n, width] that stand before the tokens from `first` on, ascending.
    """

    token_ids: list[int] = field(default_factory=list)
    waiting: list[tuple[int, Any]] = field(default_factory=list)

    def advance(self, token_ids: list[int], path: Sequence[int]) -> None:
        """Append committed tokens and move the root of the nodes; see `Drafter.commit`."""
        self.cut(path[-1] if len(path) and len(path) == len(token_ids) else None)
        self.token_ids += token_ids
        self.length = len(self.token_ids)


class FedHead(Protocol):
    """A head that follows texts; see `specq.drafting.trees.texts.TextHead`."""

    layers: tuple[int, ...]
    width: int
    token_ids: Int32Array | None

    def observe(self, values: Any, followed: Sequence[Followed]) -> None: ...
    def known(self, session_id: int) -> int: ...
    def close(self, session_id: int) -> None: ...

    def copied(self, states: Float32Array) -> Any:
        """Return a copy of hidden states of the host, where the head computes."""
        ...


S = TypeVar("S", bound=FedSession)


class FedDrafter(Drafter, Generic[S]):
    """Drafts from hidden states that a verifier sends. To implement it, define the methods that raise.

    most_unknown: committed tokens without true states, beyond which it does not draft.
    """

    most_unknown: int

    def __init__(
        self,
        head: FedHead,
        info: ModelInfo,
        *,
        form: str,
        window: int,
        distribution_size: int = 32,
        rng: np.random.Generator | None = None,
    ) -> None:
        """Set up sessions for a head.

        info           of the head, with the tokenizer and the sizes of its target.
        form, window   as in `ActivationRequest`.
        """
        self.info, self.activations = info, ActivationRequest(head.layers, form, window)
        self.width, self._fed = head.width, head
        self._maker = ChildMaker(distribution_size, rng or np.random.default_rng(), head.token_ids)
        self._sessions: dict[int, S] = {}

    # --- texts --------------------------------------------------------------------------------------------------------

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; see `Drafter.open`."""
        self._sessions[session_id] = self._session(params, token_ids.tolist())

    def close(self, session_id: int) -> None:
        """Forget a session; see `Drafter.close`."""
        self._sessions.pop(session_id, None)
        self._fed.close(session_id)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        """Append committed tokens and move the root of the nodes; see `Drafter.commit`."""
        session = self._sessions[session_id]
        session.advance(token_ids.tolist(), path)
        self._feed(session_id, session)

    def observe(self, session_id: int, first: int, states: Float32Array) -> None:
        """Store the target's hidden states; see `Drafter.observe`."""
        session = self._sessions[session_id]
        session.waiting.append((first, self._fed.copied(states)))
        self._feed(session_id, session)
        while sum(len(rows) for _, rows in session.waiting) > MOST_WAITING:
            session.waiting.pop(0)

    def knows(self, session_id: int) -> bool:
        """Return whether there are states to draft from; see `Drafter.knows`."""
        known = self._fed.known(session_id)
        return known > 0 and self._sessions[session_id].length - known <= self.most_unknown

    def _feed(self, session_id: int, session: S) -> None:
        """Give the head the states whose tokens are known by now."""
        waiting, session.waiting = session.waiting, []
        for first, rows in waiting:
            count = min(max(session.length - first, 0), len(rows))
            if count:
                token_ids = session.token_ids[first : first + count]
                self._fed.observe(rows, [Followed(session_id, first, token_ids, range(count))])
            if count < len(rows):
                session.waiting.append((first + count, rows[count:]))

    # --- drafts -------------------------------------------------------------------------------------------------------

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        """Draft the children of all requested nodes; none at the maximum length or without states.

        See `Drafter.expand`.
        """
        positions = [self._sessions[one.session_id].child_position(one.node_id) for one in requests]
        asked = [
            i
            for i, (one, position) in enumerate(zip(requests, positions, strict=True))
            if one.child_ids and position < min(self.info.max_length, self._end(one.session_id))
        ]
        found = [NO_CHILDREN] * len(requests)
        if not asked:
            return found
        logits = self._logits_behind([requests[i] for i in asked])
        wanted = [
            ChildRequest(self._of(one).params, positions[i], len(one.child_ids), one.session_id)
            for i, one in ((i, requests[i]) for i in asked)
        ]
        for i, children in zip(asked, self._maker.make(wanted, logits, self.info.num_tokens), strict=True):
            found[i] = children.first(len(requests[i].child_ids))
            self._of(requests[i]).add(requests[i], positions[i], found[i])
        return found

    def _of(self, request: Expansion) -> S:
        return self._sessions[request.session_id]

    def _end(self, session_id: int) -> int:
        """Return the position from which on it cannot draft."""
        return self.info.max_length if self.knows(session_id) else 0

    # --- what an implementation defines -------------------------------------------------------------------------------

    def _session(self, params: SamplingParams, token_ids: list[int]) -> S:
        """Return a new session."""
        raise NotImplementedError

    def _logits_behind(self, requests: Sequence[Expansion]) -> Logits:
        """Return the logits f32[n, columns] behind the requested nodes, which are below `_end`."""
        raise NotImplementedError
