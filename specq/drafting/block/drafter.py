"""A block drafter (DFlash, arXiv 2602.06036) as a source of trees, with its own KV of the features of each text.

The hidden states that the target returns for a text become features, whose keys and values in all layers are kept
(`StateCache`). Only tokens of a text have features. So a rejected draft leaves no trace. Blocks keep nothing: each
begins at the last token of its text, whose features are not known yet.

Tokens are ranked like a draft model's, by scores that the target's own noise perturbs. Where the verifier draws with
other random numbers, they are ranked by the drafter's scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from specq.drafting.block.network import BlockDrafter
from specq.drafting.head_layers import Attend, attend_to, of_any_shape
from specq.drafting.interface import Pending, ranking_params
from specq.drafting.trees.cache import StateCache
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.ranked import Ranked, grow_each, num_choices
from specq.drafting.trees.texts import FollowedText, NewRows, TextHead, taps_of
from specq.engines.models import rank_tokens
from specq.protocol import IntpArray, SamplingParams


class BlockHead(TextHead):
    """Implements `TreeHead`."""

    runs_beside_host = False

    def __init__(self, drafter: BlockDrafter) -> None:
        network, shape = drafter.network, drafter.network.shape
        num_heads = shape.num_layers * shape.num_key_value_heads  # of all layers, beside each other
        cache: StateCache = StateCache(num_heads, shape.head_dim, 0, network.fc.weight)
        super().__init__(shape.layers, network.fc.in_features, cache)
        self.network, self.token_ids, self.limit_vocab = network, drafter.token_ids, drafter.limit_vocab
        self.num_places, self._states = shape.num_places, cache
        self._device = network.fc.weight.device
        self._places = torch.arange(shape.block_size, device=self._device)

    def taken(self, values: Any) -> torch.Tensor:
        """See `TextHead`."""
        return torch.as_tensor(values)  # an engine on the host has arrays

    @torch.no_grad()
    def _follow(self, texts: list[FollowedText]) -> None:
        rows = NewRows.of(texts)
        values, which = taps_of(rows.parts)
        taps = values.index_select(0, torch.from_numpy(which).to(values.device)).to(self._device)
        features = self.network.features(taps)[None]
        rotations = self.network.rotations(self._index(rows.positions)[None], features.dtype)
        keys, values = self.network.feature_rows(features, rotations)
        places = np.array([text.place for text in texts]).repeat(rows.counts)
        self._states.write(self._index(places), self._index(rows.slots), keys[0], values[0])

    def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
        """Compute the waiting rows and a block of each text; see `TreeHead`. Trees grow when they are awaited."""
        session_ids = [session_id for one in requests for session_id in one.session_ids]
        params = [ranking_params(own) for one in requests for own in one.params]
        ends, logits = [self.known(session_id) for session_id in session_ids], self.logits_of(session_ids)
        return grow_each(requests, partial(self._ranked, logits, params, ends, num_choices(requests)))

    @torch.no_grad()
    def logits_of(self, session_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits f32[texts, places, columns] of a block behind each text, after its waiting rows."""
        self.follow(session_ids)
        texts = [self.texts[session_id] for session_id in session_ids]
        assert all(text.length for text in texts), "a text of no rows"
        network, size, lengths = self.network, len(self._places), [text.length for text in texts]
        ints = self._index([[t.last_token, t.end - 1, t.length, t.place] for t in texts])
        num_vocab = len(network.get_buffer("embedding"))
        x = network.blocks(ints[:, 0].clamp(0, num_vocab - 1))  # a block behind an unknown token is useless
        rotations = network.rotations(ints[:, 1:2] + self._places, x.dtype)
        most = max(lengths)
        keys, values = self._states.read(ints[:, 3], most, size)
        is_seen = torch.arange(most + size, device=self._device)[None] < ints[:, 2:3]
        is_seen[:, most:] = True
        is_seen = is_seen[:, None].expand(-1, size, -1)
        heads = network.shape.num_key_value_heads

        def attend(layer: int) -> Attend:
            own = slice(layer * heads, (layer + 1) * heads)

            def attention(queries: torch.Tensor, new_keys: torch.Tensor, new_values: torch.Tensor) -> torch.Tensor:
                keys[:, own, most:], values[:, own, most:] = new_keys.transpose(1, 2), new_values.transpose(1, 2)
                return attend_to(queries, keys[:, own], values[:, own], is_seen)

            return attention

        with of_any_shape():
            states = network(x, rotations, attend)
        return network.logits(states[:, 1:]).float()

    def _ranked(self, logits: torch.Tensor, params: list[SamplingParams], ends: list[int], count: int) -> Ranked:
        """Rank the tokens of each place behind texts that end at these positions."""
        of_rows = [one for one in params for _ in range(self.num_places)]
        positions = (np.array(ends)[:, None] + np.arange(self.num_places)).ravel().tolist()
        most = min(count, logits.shape[2])
        tokens, scores = rank_tokens(logits.flatten(0, 1), of_rows, positions, most, self.token_ids)
        shape = len(ends), self.num_places, -1
        return Ranked(tokens.reshape(shape), scores.reshape(shape))

    def _index(self, values: Sequence[Any] | IntpArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device)
