"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) as a source of trees: its own KV of each text, and rows below it.

Each token of a text has a row, made of the target's hidden states before it; its keys and values are kept (`StateCache`). Rows of trees
are made of the head's own states; they live as long as their tree. So nothing of a rejected draft remains, and what is accepted is computed
anew, by what the target says.

Tokens are ranked as a draft model's are: by the scores that the target's own noise perturbs; where the verifier draws otherwise, by what
the head says alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from specq.engines.torch import EagleHead, rank_tokens
from specq.proposers.head_source import Ranked
from specq.proposers.interface import ranking_params
from specq.proposers.state_cache import StateCache
from specq.proposers.tree_head import Followed
from specq.protocol import BoolArray, Int32Array, IntpArray, SamplingParams
from specq.verification import ends_of

MOST_WAITING = 4096  # rows of a text for which no tree was asked; beyond them the earlier ones are forgotten
MOST_ROWS = 512  # of a text in a pass


@dataclass(slots=True)
class EagleText:
    """What is known of a session's text: `length` rows in the cache at `place`, the first of which reads the token at `first`, and rows
    that wait, with the target's hidden states before them."""

    place: int
    first: int
    length: int = 0
    taps: list[torch.Tensor] = field(default_factory=list)  # of [n, width] each
    token_ids: list[int] = field(default_factory=list)  # of the rows that wait
    last: torch.Tensor | None = None  # [hidden]: what the last row in the cache gave

    @property
    def end(self) -> int:
        return self.first + self.length + len(self.token_ids)

    def begin_at(self, first: int) -> None:
        """Forget all; the next row reads the token at `first`."""
        self.first, self.length, self.last = first, 0, None
        self.taps, self.token_ids = [], []

    def keep_last(self, count: int) -> None:
        """Forget all but at most so many rows that wait."""
        taps, token_ids = torch.cat(self.taps)[-count:], self.token_ids[-count:]
        self.begin_at(self.end - len(token_ids))
        self.taps, self.token_ids = [taps], token_ids

    def take(self, most: int) -> tuple[torch.Tensor, list[int]]:
        """Return the first rows that wait, at most so many, which have places in the cache from now on."""
        taps = self.taps[0] if len(self.taps) == 1 else torch.cat(self.taps)
        token_ids, self.token_ids = self.token_ids[:most], self.token_ids[most:]
        self.taps = [taps[most:]] if self.token_ids else []
        self.length += len(token_ids)
        return taps[:most], token_ids


class EagleRows(NamedTuple):
    """Rows of n texts for one pass.

    places     of the texts in the cache
    counts     i64[n]: how many rows each has; the following are those of one text after the other
    states     [rows, hidden]: what stands before each row's token; token_ids, positions i64[rows]
    slots      i64[rows]: where in its text's range of the cache each is kept
    is_seen    bool[n, most rows, slots]: which of the range each row sees, itself included
    """

    places: Sequence[int]
    counts: IntpArray
    states: torch.Tensor
    token_ids: IntpArray
    positions: IntpArray
    slots: IntpArray
    is_seen: BoolArray


class Eagle:
    """Fulfils `TreeHead`."""

    def __init__(self, head: EagleHead) -> None:
        self.layers = head.layers
        self.head, self.network, shape = head, head.network, head.network.shape
        self.cache = StateCache(shape.num_key_value_heads, shape.head_dim, head.network.fc.weight)
        self.texts: dict[int, EagleText] = {}

    def observe(self, values: torch.Tensor, followed: Sequence[Followed]) -> None:
        """Take in what texts go on with; see `TreeHead`."""
        news = [new for one in followed if (new := self._new(one)) is not None]
        if not news:
            return
        rows = torch.tensor([row for one in news for row in one.rows])
        taps = values.index_select(0, rows.to(values.device, non_blocking=True))
        for one, own in zip(news, torch.split(taps, [len(one.rows) for one in news]), strict=True):
            text = self.texts[one.session_id]
            text.taps.append(own)
            text.token_ids += one.token_ids
            if len(text.token_ids) > MOST_WAITING:
                text.keep_last(MOST_WAITING // 2)

    def _new(self, one: Followed) -> Followed | None:
        """Return what is not known yet of a text, which begins anew behind a gap."""
        text = self.texts.get(one.session_id)
        if text is None:
            text = self.texts[one.session_id] = EagleText(self.cache.open(), one.first)
        if one.first > text.end:
            text.begin_at(one.first)
        known = text.end - one.first
        if known >= len(one.rows):
            return None
        return one._replace(first=text.end, token_ids=one.token_ids[known:], rows=one.rows[known:])

    def known(self, session_id: int) -> int:
        """Return up to where a text is known; see `TreeHead`."""
        text = self.texts.get(session_id)
        return text.end if text is not None else 0

    def close(self, session_id: int) -> None:
        """Forget a session; see `TreeHead`."""
        text = self.texts.pop(session_id, None)
        if text is not None:
            self.cache.close(text.place)

    @torch.inference_mode()
    def start(self, session_ids: Sequence[int], params: Sequence[SamplingParams]) -> EagleContexts:
        """Compute the rows that wait; see `TreeHead`."""
        texts = [self.texts[session_id] for session_id in session_ids]
        for text in texts:
            if text.token_ids and text.length + len(text.token_ids) > self.cache.most_rows:
                text.keep_last(self.cache.most_rows // 2)
            self.cache.reserve(text.length + len(text.token_ids))
        while waiting := [text for text in texts if text.token_ids]:
            self._compute(waiting)
        return EagleContexts(self.head, self.cache, texts, [ranking_params(one) for one in params])

    def _compute(self, texts: list[EagleText]) -> None:
        """Compute some rows of each text that has some, in one pass."""
        befores = np.array([text.length for text in texts])
        taken = [text.take(MOST_ROWS) for text in texts]
        counts = np.array([len(token_ids) for _, token_ids in taken])
        slots = (befores - (ends_of(counts) - counts)).repeat(counts) + np.arange(counts.sum())
        # A row stands where the state before its token does.
        positions = slots + np.array([text.first for text in texts]).repeat(counts) - 1
        is_seen = np.arange((befores + counts).max()) <= befores[:, None, None] + np.arange(counts.max())[:, None]
        states = self.network.project(torch.cat([taps for taps, _ in taken]))
        token_ids = np.concatenate([token_ids for _, token_ids in taken])
        found = self.run(
            EagleRows([text.place for text in texts], counts, states, token_ids, positions, slots, is_seen)
        )
        for text, of_text in zip(texts, found, strict=True):
            text.last = of_text[-1]

    @torch.inference_mode()
    def run(self, rows: EagleRows) -> list[torch.Tensor]:
        """Compute rows of some texts in one pass, and keep their keys and values; return what each text's gave, [rows, hidden]."""
        counts, device = rows.counts, self.network.fc.weight.device
        place_of, at = (np.arange(counts.max()) < counts[:, None]).nonzero()  # of each row, in a grid [texts, most]
        grid = tuple(torch.from_numpy(index).to(device) for index in (place_of, at))
        most = int(counts.max())
        states = rows.states.new_zeros(len(counts), most, rows.states.shape[1])
        states[grid] = rows.states
        token_ids, positions = np.zeros((2, len(counts), most), np.int64)
        token_ids[place_of, at] = np.clip(
            rows.token_ids, 0, self.network.num_tokens - 1
        )  # of no use where there is none
        positions[place_of, at] = rows.positions
        places = np.array(rows.places)

        def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            self.cache.write(places[place_of], rows.slots, keys[grid], values[grid])
            return _attend(
                queries, *self.cache.read(places, rows.is_seen.shape[2]), torch.from_numpy(rows.is_seen).to(device)
            )

        inputs = (torch.from_numpy(array).to(device) for array in (token_ids, positions))
        found = self.network(states, *inputs, attend)
        return [found[i, :count] for i, count in enumerate(counts.tolist())]


class EagleContexts:
    """Fulfils `Contexts`: texts that are computed."""

    def __init__(
        self, head: EagleHead, cache: StateCache, texts: list[EagleText], params: Sequence[SamplingParams]
    ) -> None:
        self._head, self._cache, self._texts, self._params = head, cache, texts, params

    @torch.inference_mode()
    def grow(self, which: IntpArray) -> EagleGrowth:
        """Begin trees; see `Contexts`."""
        texts = [self._texts[i] for i in which.tolist()]
        lengths = np.array([text.length for text in texts])
        keys, values = self._cache.read(np.array([text.place for text in texts]), int(lengths.max()))
        is_seen = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None]).to(keys.device)
        lasts = [text.last for text in texts if text.last is not None]
        assert len(lasts) == len(texts), "a text of no rows"
        ends = np.array([text.end for text in texts])
        return EagleGrowth(
            self._head, torch.stack(lasts)[:, None], keys, values, is_seen, ends, [self._params[i] for i in which]
        )


class EagleGrowth:
    """Fulfils `Growth`.

    states        [b, rows, hidden]: what the last level gave; at first the contexts' last rows
    keys, values  [b, context + nodes, kv_heads, dim]
    is_seen       bool[b, context]; ends i64[b]: the place of the token behind each context
    """

    def __init__(
        self,
        head: EagleHead,
        states: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        is_seen: torch.Tensor,
        ends: IntpArray,
        params: Sequence[SamplingParams],
    ) -> None:
        self._head, self._states, self._keys, self._values = head, states, keys, values
        self._is_seen = is_seen[:, None]  # [b, rows, context + nodes]: by the rows of the last level
        self._ends, self._params, self._depth = ends, params, 0

    @torch.inference_mode()
    def ranked(self, count: int) -> Ranked:
        """Return the likeliest tokens; see `Growth`."""
        logits = self._head.network.logits(self._states).float()  # [b, rows, columns]
        num_contexts, num_rows, columns = logits.shape
        params = [one for of_context in self._params for one in (of_context,) * num_rows]
        positions = (self._ends + self._depth).repeat(num_rows).tolist()
        flat = logits.flatten(0, 1)
        token_ids, scores = rank_tokens(flat, params, positions, min(count, columns), self._head.token_ids)
        shape = num_contexts, num_rows, -1
        return Ranked(token_ids.reshape(shape), scores.reshape(shape))

    @torch.inference_mode()
    def expand(self, parents: IntpArray, token_ids: Int32Array) -> None:
        """Go one level down; see `Growth`."""
        device, num_rows = self._states.device, parents.shape[1]
        behind = torch.tensor(parents, device=device)[:, :, None]
        states = self._states.gather(1, behind.expand(-1, -1, self._states.shape[2]))
        seen = self._is_seen.gather(1, behind.expand(-1, -1, self._is_seen.shape[2]))
        own = torch.eye(num_rows, dtype=torch.bool, device=device).expand(len(parents), -1, -1)
        self._is_seen = torch.cat([seen, own], 2)
        positions = np.broadcast_to((self._ends + self._depth - 1)[:, None], parents.shape).copy()
        # Of no use where there is none.
        known = np.clip(token_ids, 0, self._head.network.num_tokens - 1).astype(np.int64)
        inputs = (torch.from_numpy(array).to(device) for array in (known, positions))
        self._states = self._head.network(states, *inputs, self._attend)
        self._depth += 1

    def _attend(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self._keys, self._values = torch.cat([self._keys, keys], 1), torch.cat([self._values, values], 1)
        return _attend(queries, self._keys, self._values, self._is_seen)


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_seen: torch.Tensor) -> torch.Tensor:
    """Return [b, rows, heads, dim] of queries of this shape; keys, values [b, n, kv_heads, dim], is_seen bool[b, rows, n]."""
    queries, keys, values = queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
    found = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=is_seen[:, None], enable_gqa=True)
    return found.transpose(1, 2)
