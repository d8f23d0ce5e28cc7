"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) as a source of trees, with its own KV of each text.

Each token of a text has a row, from the target's hidden states before it. Its keys and values are kept (`StateCache`).
Rows of trees are made from the head's own states and end with their tree. So a rejected draft leaves no trace. Accepted
tokens are computed again from the target's states.

Tokens are ranked like a draft model's, by scores that the target's own noise perturbs. Where the verifier draws with
other random numbers, they are ranked by the head's scores.

On a GPU the rows of the texts and whole trees are recorded in a few fixed shapes. The host waits only for the trees
(`specq.drafting.eagle3.recorded`). Elsewhere, and for cutting parameters (top-k, top-p), the same arithmetic runs in
the exact shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specq.drafting.eagle3.levels import Level, depths_of, levels_of, on_device
from specq.drafting.eagle3.loading import EagleHead
from specq.drafting.eagle3.recorded import RecordedTrees
from specq.drafting.eagle3.row_head import EagleRows, RowHead
from specq.drafting.eagle3.rows import Rank, Roots, TextRows, compute_rows, grow
from specq.drafting.head_layers import of_any_shape
from specq.drafting.interface import Pending, ranking_params
from specq.drafting.rank_trees import RankTree
from specq.drafting.trees.cache import StateCache
from specq.drafting.trees.device_trees import PLANES, RecordedPart, growing
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.padding import SizesFor
from specq.drafting.trees.texts import FollowedText
from specq.engines.models import rank_tokens
from specq.engines.torch import Replays, Sampling, fetch
from specq.protocol import Float32Array, Int32Array, IntpArray, SamplingParams

MANY_TREES = 64  # kinds of trees that are remembered


class Eagle(RowHead):
    """Implements `TreeHead`. `replays` records passes of fixed shapes; by default as the head's device supports."""

    def __init__(self, head: EagleHead, replays: Replays | None = None) -> None:
        names, network, shape = head.token_ids, head.network, head.network.shape
        like = network.fc.weight
        self.cache: StateCache = StateCache(shape.num_key_value_heads, shape.head_dim, shape.hidden_size, like)
        super().__init__(head.layers, shape.width, names, head.limit_vocab, self.cache)
        self.head, self.network = head, network
        self._device = like.device
        self._sampling: dict[int, tuple[SamplingParams, Sampling]] = {}
        self._levels: dict[RankTree | int | tuple[int, ...], list[Level]] = {}
        self._depths: list[int] = []  # of trees that are recorded best first
        replays = replays or Replays.on(like.device)
        self._recorded = None if replays is None else RecordedTrees(head, self.cache, replays)

    def taken(self, values: Any) -> Any:
        """See `RowHead`."""
        return torch.as_tensor(values)  # an engine on the host has arrays

    def copied(self, states: Float32Array) -> torch.Tensor:
        """See `RowHead`."""
        return torch.from_numpy(np.array(states)).to(self._device)

    def close(self, session_id: int) -> None:
        """Forget a session; see `TreeHead`."""
        super().close(session_id)
        self._sampling.pop(session_id, None)

    @property
    def runs_beside_host(self) -> bool:
        """See `TreeHead`."""
        return self._recorded is not None

    @property
    def num_recorded(self) -> int:
        """How many passes were recorded so far."""
        return 0 if self._recorded is None else self._recorded.num_recorded

    def warm_up(
        self,
        most_sessions: int,
        trees: Sequence[RankTree] = (),
        sizes_for: SizesFor | None = None,
    ) -> None:
        """Record the passes that sessions usually need, so that no session waits for a recording.

        They have these shapes, and the level sizes that `sizes_for` returns for a number of sessions.
        """
        if self._recorded is None:
            return
        shaped = [self._levels_of(0, tree) for tree in trees]

        def kinds(num_sessions: int) -> list[list[Level]]:
            level_sizes = sizes_for(num_sessions) if sizes_for is not None else ()
            return shaped + [self._levels_of(len(sizes), None, sizes) for sizes in level_sizes]

        self._recorded.warm_up(most_sessions, kinds)

    # --- rows of texts ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def follow(self, session_ids: Sequence[int]) -> None:
        """Compute the waiting rows of known sessions."""
        super().follow(session_ids)

    def _follow(self, texts: list[FollowedText]) -> None:
        if self._recorded is None:
            super()._follow(texts)
        else:
            self._recorded.follow(texts)

    def _project(self, values: torch.Tensor, rows: Int32Array) -> torch.Tensor:
        which = torch.from_numpy(rows).to(values.device)
        return self.network.project(values.index_select(0, which).to(self._device))

    def _compute(self, rows: EagleRows) -> None:
        found, counts = self._run(rows), rows.counts
        lasts = found[torch.arange(len(counts)), torch.from_numpy(counts - 1)]
        self.cache.keep_lasts(self._index(rows.places), lasts)

    @torch.no_grad()
    def run(self, rows: EagleRows) -> list[torch.Tensor]:
        """See `RowHead`."""
        found = self._run(rows._replace(states=torch.stack(list(rows.states))))
        return [found[i, :count] for i, count in enumerate(rows.counts.tolist())]

    def last(self, text: FollowedText) -> torch.Tensor:
        """See `RowHead`."""
        return self.cache.lasts(self._index([text.place]))[0]

    @torch.inference_mode()
    def logits(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `RowHead`."""
        return self.network.logits(torch.stack(list(states))).float()

    def _run(self, rows: EagleRows) -> torch.Tensor:
        counts, most = rows.counts, int(rows.counts.max())
        self.cache.reserve(rows.is_seen.shape[2])
        text_of, at = (np.arange(most) < counts[:, None]).nonzero()  # of each row, in a grid [texts, most]
        ints = np.zeros((4, len(counts), most), np.int64)  # rows that do not exist stay zero
        known = np.clip(rows.token_ids, 0, self.network.num_tokens - 1)  # the row of an unknown token is useless
        ints[:, text_of, at] = known, rows.positions, np.array(rows.places)[text_of], rows.slots
        states = rows.states
        if most * len(counts) > len(states):
            states = states.new_zeros(len(counts) * most, states.shape[1])
            states[self._index(text_of * most + at)] = rows.states
        grid = states.view(len(counts), most, -1)
        is_seen = torch.from_numpy(rows.is_seen).to(self._device)
        token_ids, positions, places, slots = torch.from_numpy(ints).to(self._device)
        text_rows = TextRows(self._index(rows.places), grid, token_ids, positions, places, slots, is_seen)
        with of_any_shape():
            return compute_rows(self.network, self.cache, text_rows)

    def _index(self, values: Sequence[int] | IntpArray) -> torch.Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(self._device)

    # --- trees --------------------------------------------------------------------------------------------------------

    def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
        """Compute the waiting rows, and begin trees; see `TreeHead`.

        Work that needs the host is done when the result is awaited.
        """
        self.follow([session_id for one in requests for session_id in one.session_ids])
        return [self._begin(one) for one in requests]

    def _begin(self, request: TreeRequest) -> Pending[Grown]:
        texts = [self.texts[session_id] for session_id in request.session_ids]
        assert all(text.length for text in texts), "a text of no rows"
        sampling = [self._sampling_of(*one) for one in zip(request.session_ids, request.params, strict=True)]
        levels = self._levels_of(request.depth, request.ranks, request.level_sizes)
        lengths, ends, places = (
            np.array(each) for each in zip(*((t.length, t.end, t.place) for t in texts), strict=True)
        )
        roots = places, lengths, ends
        if self._recorded is None:
            every = np.arange(len(texts))
            parts = [RecordedPart(every, lambda: self._grow(roots, sampling, levels, request.floor))]
            return growing(parts, depths_of(levels))
        is_free = np.array([one.is_free for one in sampling])
        free, rest = is_free.nonzero()[0], (~is_free).nonzero()[0]
        parts = list[RecordedPart]()
        if len(free):
            parts += self._recorded.grow(free, *roots, sampling, levels)
        if len(rest):
            own = places[rest], lengths[rest], ends[rest]
            parts.append(
                RecordedPart(rest, lambda: self._grow(own, [sampling[i] for i in rest.tolist()], levels, None))
            )
        return growing(parts, depths_of(levels))

    def _levels_of(self, depth: int, ranks: RankTree | None, level_sizes: tuple[int, ...] = ()) -> list[Level]:
        """Return the levels of a tree, the same object at every call for few kinds.

        A recorded best-first tree uses a number of levels that was recorded before, if one is large enough. Near the
        end of a text some of these levels are useless.
        """
        if self._recorded is not None and ranks is None and not level_sizes:
            enough = [known for known in self._depths if known >= depth]
            self._depths += [] if enough else [depth]
            depth = min(enough, default=depth)
        key = level_sizes or (depth if ranks is None else ranks)
        if key not in self._levels:
            if len(self._levels) >= MANY_TREES:
                self._levels.clear()
                if self._recorded is not None:
                    self._recorded.forget_trees()
            levels = levels_of(depth, ranks, level_sizes, self.network.lm_head.out_features)
            self._levels[key] = on_device(levels, self._device)
        return self._levels[key]

    def _sampling_of(self, session_id: int, params: SamplingParams) -> Sampling:
        known = self._sampling.get(session_id)
        if known is None or known[0] is not params:
            known = self._sampling[session_id] = params, Sampling.of(ranking_params(params))
        return known[1]

    @torch.no_grad()
    def _grow(
        self,
        roots: tuple[IntpArray, IntpArray, IntpArray],
        sampling: list[Sampling],
        levels: list[Level],
        floor: float | None,
    ) -> Int32Array:
        """Grow trees below texts at these places, with these lengths and ends, where the host may rank tokens.

        See `specq.drafting.eagle3.rows.grow`.
        """
        places, lengths, ends = (self._index(each) for each in roots)
        contexts = Roots(places, lengths, ends, int(roots[1].max()))
        with of_any_shape():
            found = grow(self.head, self.cache, contexts, levels, self._rank(sampling, roots[2]), floor)
        ints: Int32Array = fetch(found[:PLANES])()
        return ints

    def _rank(self, sampling: list[Sampling], ends: IntpArray) -> Rank:
        def rank(logits: torch.Tensor, depth: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
            num_rows = logits.shape[1]
            params = [one.params for one in sampling for _ in range(num_rows)]
            positions = (ends + depth).repeat(num_rows).tolist()
            flat = logits.flatten(0, 1).float()
            found = rank_tokens(flat, params, positions, count, self.head.token_ids)
            tokens, scores = (torch.from_numpy(each).to(self._device) for each in found)
            return tokens.view(-1, num_rows, count), scores.view(-1, num_rows, count)

        return rank
