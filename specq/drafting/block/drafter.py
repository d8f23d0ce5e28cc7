"""A block drafter (DFlash, arXiv 2602.06036) as a source of trees, with its own KV of the features of each text.

The hidden states that the target returns for a text become features, whose keys and values in all layers are kept
(`StateCache`). Only tokens of a text have features. So a rejected draft leaves no trace. Blocks keep nothing: each
begins at the last token of its text, whose features are not known yet.

Tokens are ranked like a draft model's, by scores that the target's own noise perturbs. Where the verifier draws with
other random numbers, they are ranked by the drafter's scores.

On a GPU the passes are recorded in a few fixed shapes (`specq.drafting.block.recorded`). Elsewhere, and for cutting
parameters (top-k, top-p), the same arithmetic runs in the exact shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specq.drafting.block.passes import BlockPasses
from specq.drafting.block.recorded import RecordedBlocks
from specq.drafting.head_layers import of_any_shape
from specq.drafting.interface import Pending, ranking_params
from specq.drafting.trees.cache import StateCache
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.padding import SizesFor
from specq.drafting.trees.ranked import Ranked, RankWait, grow_each, num_choices
from specq.drafting.trees.texts import FollowedText, NewRows, TextHead, taps_of
from specq.engines.models import rank_tokens
from specq.engines.torch import Replays, Sampling
from specq.protocol import Float32Array, Int64Array, IntpArray


class BlockHead(TextHead):
    """Implements `TreeHead`. `replays` records passes of fixed shapes; by default as the drafter's device supports."""

    def __init__(self, drafter: Any, replays: Replays | None = None, passes: Any = None) -> None:
        """Set up a `BlockDrafter`, or a drafter with other passes, which have the same methods as `BlockPasses`."""
        network, shape = drafter.network, drafter.network.shape
        num_heads = shape.num_layers * shape.num_key_value_heads  # of all layers, beside each other
        if passes is None:
            passes = BlockPasses(network, StateCache(num_heads, shape.head_dim, 0, network.fc.weight))
        super().__init__(shape.layers, network.fc.in_features, passes.cache)
        self.drafter = drafter
        self.token_ids, self.limit_vocab, self.num_places = drafter.token_ids, drafter.limit_vocab, shape.num_places
        self._passes, self._device = passes, network.fc.weight.device
        replays = replays or Replays.on(self._device)
        self._recorded = None if replays is None else RecordedBlocks(passes, drafter.token_ids, replays)

    @property
    def runs_beside_host(self) -> bool:
        """See `TreeHead`."""
        return self._recorded is not None

    @property
    def num_recorded(self) -> int:
        """How many passes were recorded so far."""
        return 0 if self._recorded is None else self._recorded.num_recorded

    def warm_up(self, most_sessions: int, sizes_for: SizesFor | None = None) -> None:
        """Record the passes that sessions usually need, so that no session waits for a recording.

        sizes_for: returns the level sizes of their trees for a number of sessions. None: trees have other shapes.
        """
        if self._recorded is not None:
            self._recorded.warm_up(most_sessions, sizes_for)

    def taken(self, values: Any) -> torch.Tensor:
        """See `TextHead`."""
        return torch.as_tensor(values)  # an engine on the host has arrays

    def copied(self, states: Float32Array) -> torch.Tensor:
        """Return a copy of hidden states of the host, where the drafter computes."""
        return torch.from_numpy(np.array(states)).to(self._device)

    @torch.no_grad()
    def _follow(self, texts: list[FollowedText]) -> None:
        rows = NewRows.of(texts)
        if self._recorded is not None:
            self._recorded.follow(rows)
            return
        values, which = taps_of(rows.parts)
        taps = values.index_select(0, torch.from_numpy(which).to(values.device)).to(self._device)
        self._passes.follow(taps, self._index(np.stack([rows.positions, rows.places, rows.slots])))

    def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
        """Compute the waiting rows and a block of each text; see `TreeHead`.

        Trees with given level sizes grow on a device that records. Others grow when they are awaited.
        """
        session_ids = [session_id for one in requests for session_id in one.session_ids]
        sampling = [Sampling.of(ranking_params(own)) for one in requests for own in one.params]
        texts, count = self._behind(session_ids), num_choices(requests)
        is_free = np.array([self._recorded is not None and one.is_free for one in sampling])
        if self._recorded is not None and len(requests) == 1 and requests[0].level_sizes and is_free.all():
            return [self._recorded.grow(texts, sampling, requests[0].level_sizes)]
        parts = list[tuple[IntpArray, RankWait]]()
        for rank, which in ((self._rank_recorded, is_free), (self._rank, ~is_free)):
            if len(own := which.nonzero()[0]):
                parts.append((own, rank(texts[:, own], [sampling[i] for i in own.tolist()], count)))
        return grow_each(requests, lambda: Ranked.joined([(own, wait()) for own, wait in parts]))

    def logits_of(self, session_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits f32[texts, places, columns] of a block behind each text."""
        return self._logits(self._behind(session_ids))

    def _behind(self, session_ids: Sequence[int]) -> Int64Array:
        """Compute the waiting rows; return the texts, i64[4, n] as in `BlockPasses.logits`."""
        self.follow(session_ids)
        texts = [self.texts[session_id] for session_id in session_ids]
        assert all(text.length for text in texts), "a text of no rows"
        return np.array([[t.last_token, t.end - 1, t.length, t.place] for t in texts], np.int64).T

    @torch.no_grad()
    def _logits(self, texts: Int64Array) -> torch.Tensor:
        with of_any_shape():
            found: torch.Tensor = self._passes.logits(self._index(texts), int(texts[2].max()))
        return found.float()

    def _rank_recorded(self, texts: Int64Array, sampling: Sequence[Sampling], count: int) -> RankWait:
        assert self._recorded is not None
        return self._recorded.rank(texts, sampling, count)

    def _rank(self, texts: Int64Array, sampling: Sequence[Sampling], count: int) -> RankWait:
        """Begin to rank the tokens of each place behind texts, where the host may take part."""
        logits = self._logits(texts)
        params = [one.params for one in sampling for _ in range(self.num_places)]
        positions = (texts[1][:, None] + 1 + np.arange(self.num_places)).ravel().tolist()

        def wait() -> Ranked:
            most = min(count, logits.shape[2])
            tokens, scores = rank_tokens(logits.flatten(0, 1), params, positions, most, self.token_ids)
            shape = texts.shape[1], self.num_places, -1
            return Ranked(tokens.reshape(shape), scores.reshape(shape))

        return wait

    def _index(self, values: Int64Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)
