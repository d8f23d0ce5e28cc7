"""Chains of sessions with a grammar, drafted on the host: only what the grammar allows.

Tokens that the grammar forces need no pass to be found. They are a part of the chain, and go into the next pass as
rows. So each pass finds a token where the model has a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specq.drafting.draft_model.children import ChildMaker, ChildRequest, mask_row
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.interface import FORCED_SCORE, ForcedBehind, MaskBehind
from specq.engines.native import RowPacker
from specq.protocol import Float32Array, Int32Array, IntpArray, SamplingParams
from specq.verification import NO_TOKEN, Logits

MOST_FORCED = 16  # forced tokens of a chain


@dataclass(slots=True)
class MaskedChain:
    """The chain of one session.

    length   of its committed context.
    room     the most tokens of the chain.
    slots    i32[>= room - 1]: for the KV of its tokens.
    forced   None: it is not asked.
    num_computed   how many of its first `token_ids` have KV, or get it in the next pass.
    """

    params: SamplingParams
    length: int
    room: int
    slots: Int32Array
    mask: MaskBehind
    forced: ForcedBehind | None = None
    token_ids: list[int] = field(default_factory=list)
    num_forced: int = 0
    num_computed: int = 0

    def add_forced(self) -> None:
        """Add the tokens that the grammar forces behind the chain."""
        room = min(self.room - len(self.token_ids), MOST_FORCED - self.num_forced)
        found = self.forced(self.token_ids)[: max(room, 0)] if self.forced is not None else []
        self.token_ids += found
        self.num_forced += len(found)

    def pack(self, packer: RowPacker, vocab_size: int) -> None:
        """Add its tokens without KV as rows. The last one gives logits."""
        first, last = self.num_computed, len(self.token_ids) - 1
        for i in range(first, last + 1):
            token = min(self.token_ids[i], vocab_size - 1)  # as in a context
            lineage = self.slots[: i + 1].tolist()
            packer.add_node(token, lineage[-1], self.length + i, self.length, lineage, judged=i == last)
        self.num_computed = last + 1


class MaskedChains:
    """The chains of n sessions, as arrays [most tokens of a chain, n, width]."""

    def __init__(self, chains: Sequence[MaskedChain], width: int, contexts: Contexts, maker: ChildMaker) -> None:
        shape = max((len(chain.slots) + 1 for chain in chains), default=1), len(chains), width
        self.token_ids, self.scores = np.full(shape, NO_TOKEN, np.int32), np.zeros(shape, np.float32)
        self._chains, self._width, self._contexts, self._maker = chains, width, contexts, maker
        for i, chain in enumerate(chains):
            self._note_forced(i, 0, chain)

    @property
    def num_computed(self) -> IntpArray:
        return np.array([chain.num_computed for chain in self._chains], np.intp)

    def draft(self, tables: Sequence[Int32Array], logits: Logits, depth: int, limit_vocab: int) -> None:
        """Draft `depth` levels, given the tables of the contexts and logits [n, columns] behind the chains."""
        alive = [i for i, chain in enumerate(self._chains) if len(chain.token_ids) < chain.room]
        logits = logits[alive]
        for level in range(depth):
            assert isinstance(logits, np.ndarray)  # on a CPU
            alive = self._add_level(alive, logits, limit_vocab)
            if not alive or level + 1 == depth:
                return
            packer = RowPacker()
            for i in alive:
                packer.add_session(tables[i])
                self._chains[i].pack(packer, self._contexts.info.vocab_size)
            logits = self._contexts.run(packer.pack())

    def _add_level(self, alive: Sequence[int], logits: Float32Array, limit_vocab: int) -> list[int]:
        """Add a choice to each chain, given its logits, and forced tokens. Return the chains that may go on."""
        chains, token_ids = self._chains, self._maker.token_ids
        rows = [
            row for row, i in enumerate(alive) if mask_row(logits[row], chains[i].mask(chains[i].token_ids), token_ids)
        ]
        wanted = [
            ChildRequest(chains[i].params, chains[i].length + len(chains[i].token_ids), self._width)
            for i in (alive[row] for row in rows)
        ]
        going = []
        for row, children in zip(
            rows, self._maker.make(wanted, logits[rows], limit_vocab) if rows else (), strict=True
        ):
            i, chain = alive[row], chains[alive[row]]
            at, count = len(chain.token_ids), min(len(children.token_ids), self._width)
            if count:
                self.token_ids[at, i, :count], self.scores[at, i, :count] = (
                    children.token_ids[:count],
                    children.scores[:count],
                )
                chain.token_ids.append(int(children.token_ids[0]))
                chain.add_forced()
                self._note_forced(i, at + 1, chain)
                if len(chain.token_ids) < chain.room:
                    going.append(i)
        return going

    def _note_forced(self, i: int, at: int, chain: MaskedChain) -> None:
        span = slice(at, len(chain.token_ids))
        self.token_ids[span, i, 0], self.scores[span, i, 0] = chain.token_ids[span], FORCED_SCORE
