"""`block`: a block drafter in a draft worker, away from the target whose hidden states it reads.

The verifier sends the states of the text (`Activations`). One block behind the last token whose states before it are
known predicts all positions ahead. So all nodes at a position have the same children. When more
states arrive, the next block is computed. Children that were drafted before stay, because they are only hints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specq.drafting.block.drafter import BlockHead
from specq.drafting.interface import Expansion
from specq.drafting.trees.remote import FedDrafter, FedSession
from specq.protocol import ModelInfo, SamplingParams
from specq.verification import Logits


@dataclass(slots=True)
class _Session(FedSession):
    """A text and the tree below it.

    end     the position of the first place of its last block.
    logits  of this block, f32[places, columns].
    """

    end: int = -1
    logits: Any = None


class BlockTrees(FedDrafter[_Session]):
    """Drafts trees from hidden states that a verifier sends. See the module."""

    def __init__(self, head: BlockHead, info: ModelInfo, **options: Any) -> None:
        """Set up sessions for a drafter; options as for `FedDrafter`."""
        super().__init__(head, info, **options)
        self.head, self.most_unknown = head, head.num_places - 1

    def _session(self, params: SamplingParams, token_ids: list[int]) -> _Session:
        return _Session(params, len(token_ids), token_ids=token_ids)

    def _end(self, session_id: int) -> int:
        return self.head.known(session_id) + self.head.num_places if self.knows(session_id) else 0

    def _logits_behind(self, requests: Sequence[Expansion]) -> Logits:
        ids = dict.fromkeys(one.session_id for one in requests)
        stale = [session_id for session_id in ids if self._sessions[session_id].end != self.head.known(session_id)]
        if stale:
            for session_id, logits in zip(stale, self.head.logits_of(stale).cpu().numpy(), strict=True):
                session = self._sessions[session_id]
                session.end, session.logits = self.head.known(session_id), logits
        return np.stack([self._row(one) for one in requests])

    def _row(self, request: Expansion) -> Any:
        session = self._of(request)
        return session.logits[session.child_position(request.node_id) - session.end]
