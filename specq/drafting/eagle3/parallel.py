"""A P-EAGLE head: rows of texts as an EAGLE-3 head has them, and blocks of masks behind them as of a block drafter.

The last row of a text predicts the next token. The masks behind it predict the tokens after that, in one pass. Rows of
texts are kept in the cache. Masks leave nothing there.
"""

from __future__ import annotations

import numpy as np
import torch

from specq.drafting.block.drafter import BlockHead
from specq.drafting.block.passes import ALIGNED, BlockAttention
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.eagle3.passes import Passes
from specq.drafting.eagle3.recorded import RecordedTrees
from specq.drafting.head_layers import of_any_shape
from specq.drafting.trees.cache import StateCache
from specq.drafting.trees.padding import SizesFor
from specq.drafting.trees.texts import FollowedText, NewRows, taps_of
from specq.engines.torch import Replays
from specq.verification import starts_of


class PEaglePasses:
    """The passes of one head over one cache that compute blocks; see `BlockPasses`."""

    has_kernels = False

    def __init__(self, head: EagleHead, cache: StateCache) -> None:
        self.network, self.cache = head.network, cache
        self.num_columns = head.network.lm_head.out_features
        with torch.no_grad():
            self._mask = self.network.project(self.network.mask_hidden)  # the state of a masked row

    def logits(self, texts: torch.Tensor, room: int) -> torch.Tensor:
        """Return the logits [texts, places, columns] of a block behind each text; see `BlockPasses.logits`."""
        network, shape = self.network, self.network.shape
        _, positions, lengths, places = texts.long()
        lasts, num_masks = self.cache.lasts(places)[:, None], shape.num_places - 1
        if not num_masks:
            return network.logits(lasts)
        at = torch.arange(room + -(-num_masks // ALIGNED) * ALIGNED, device=texts.device)
        own = (at >= room) & (at - room <= at[:num_masks, None])
        is_seen = (at < lengths[:, None])[:, None] | own  # [texts, masks, keys]
        states = self._mask.expand(len(places), num_masks, -1)
        tokens = torch.full_like(states[..., 0], shape.mask_token_id or 0, dtype=torch.long)
        rotations = network.rotations(positions[:, None] + at[:num_masks], states.dtype)
        attention = BlockAttention(self.cache, places, room, [is_seen] * shape.num_layers)
        return network.logits(torch.cat([lasts, network(states, tokens, rotations, attention.attend)], 1))


class PEagleHead(BlockHead):
    """Implements `TreeHead`. `replays` records passes of fixed shapes; by default as the head's device supports."""

    def __init__(self, head: EagleHead, replays: Replays | None = None) -> None:
        network, shape = head.network, head.network.shape
        num_heads, like = shape.num_layers * shape.num_key_value_heads, network.fc.weight
        cache: StateCache = StateCache(num_heads, shape.head_dim, shape.hidden_size, like)
        replays = replays or Replays.on(like.device)
        super().__init__(head, replays, PEaglePasses(head, cache))
        self._rows = Passes(head, cache)
        self._recorded_rows = None if replays is None else RecordedTrees(head, cache, replays)

    def warm_up(self, most_sessions: int, sizes_for: SizesFor | None = None) -> None:
        """Record the passes that sessions usually need; see `BlockHead`."""
        rows = self._recorded_rows
        if rows is not None and self._recorded is not None:
            self._recorded.warm_up(most_sessions, sizes_for, lambda: rows.warm_up(most_sessions, lambda _: ()))

    @torch.no_grad()
    def _follow(self, texts: list[FollowedText]) -> None:
        if self._recorded_rows is not None:
            self._recorded_rows.follow(texts)
            return
        rows = NewRows.of(texts)
        values, which = taps_of(rows.parts)
        taps = values.index_select(0, torch.from_numpy(which).to(values.device)).to(self._device)
        counts, lengths = rows.counts, np.array([text.length for text in texts])
        given = np.zeros((2, len(texts) * int(counts.max())), np.int64)
        given[0, : len(which)] = np.arange(len(which))
        given[1, : len(which)] = [token for part in rows.parts for token in part.token_ids]
        places, firsts = ([getattr(text, name) for text in texts] for name in ("place", "first"))
        of_texts = np.stack([places, firsts, lengths - counts, counts, starts_of(counts)])
        with of_any_shape():
            self._rows.follow(int(lengths.max()), taps, self._index(given), self._index(of_texts))
