"""An EAGLE-3 head on a CPU: the arithmetic of `network`, `rows` and `drafter` in NumPy, in the exact shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.drafting.eagle3.arrays import EagleArrays
from specq.drafting.eagle3.levels import Level, depths_of, levels_of
from specq.drafting.eagle3.row_head import EagleRows, RowHead
from specq.drafting.interface import Pending, ranking_params
from specq.drafting.trees.interface import Grown, TreeRequest
from specq.drafting.trees.texts import ALWAYS, LEAST_ROOM, MOST_BYTES, FollowedText
from specq.engines.models import rank_tokens
from specq.engines.native import inverse_frequencies
from specq.protocol import BoolArray, Float32Array, Int32Array, IntpArray
from specq.verification import on_host

# Queries [n, heads, dim], keys and values [n, kv_heads, dim] of the new rows -> [n, heads, dim].
Attend = Callable[[Float32Array, Float32Array, Float32Array], Float32Array]


class HostNetwork:
    """The network of a head; see `specq.drafting.eagle3.network`."""

    def __init__(self, head: EagleArrays) -> None:
        shape, layer = head.shape, "midlayer."
        self.shape, self.embedding = shape, head.embedding
        self._weights = {name.removeprefix(layer).removesuffix(".weight"): one for name, one in head.weights.items()}
        self._biases: Any = np.float32(0)
        if shape.has_biases:
            self._biases = np.concatenate([self._weights.pop(f"self_attn.{name}_proj.bias") for name in "qkv"])
        self._qkv = np.concatenate([self._weights.pop(f"self_attn.{name}_proj") for name in "qkv"])
        self._gate_up = np.concatenate([self._weights.pop(f"mlp.{name}_proj") for name in ("gate", "up")])
        self._frequencies = inverse_frequencies(shape.rope, shape.head_dim, None)

    def project(self, taps: Float32Array) -> Float32Array:
        """Return states [n, hidden] from the target's hidden states [n, layers * target's hidden]."""
        return taps if self.shape.is_mtp else self._times(taps, "fc")

    def __call__(
        self, states: Float32Array, token_ids: IntpArray, positions: IntpArray, attend: Attend
    ) -> Float32Array:
        """Return the next states [n, hidden], given the states before n tokens, the tokens, and their positions."""
        known = np.clip(token_ids, 0, len(self.embedding) - 1)  # the row of an unknown token is useless
        embedded, normed = self.embedding[known], self._norm(states, "hidden_norm")
        if self.shape.masks_first:
            embedded[positions == 0] = 0
        both = np.concatenate([self._norm(embedded, "input_layernorm"), normed], 1)
        x = normed if self.shape.norm_before_residual else states
        if self.shape.is_mtp:
            x = self._times(both, "fc")
            both = self._norm(x, "attention_norm")
        x = x + self._times(self._attended(both, positions, attend), "self_attn.o_proj")
        gate, up = np.split(_product(self._norm(x, "post_attention_layernorm"), self._gate_up), 2, 1)
        with np.errstate(over="ignore"):
            inner = gate / (1 + np.exp(-gate)) * up
        x = x + self._times(inner, "mlp.down_proj")
        return self._norm(x, "norm") if self.shape.is_mtp else x

    def logits(self, states: Float32Array) -> Float32Array:
        """Return the logits [n, draft tokens] of the token after next."""
        return self._times(states if self.shape.is_mtp else self._norm(states, "norm"), "lm_head")

    def _attended(self, both: Float32Array, positions: IntpArray, attend: Attend) -> Float32Array:
        heads, kv_heads = self.shape.num_attention_heads, self.shape.num_key_value_heads
        rows = (_product(both, self._qkv) + self._biases).reshape(len(both), -1, self.shape.head_dim)
        turned, values = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
        if self.shape.has_head_norms:
            queries, keys = turned[:, :heads], turned[:, heads:]
            normed = self._norm(queries, "self_attn.q_norm"), self._norm(keys, "self_attn.k_norm")
            turned = np.concatenate(normed, 1)
        angles = positions[:, None, None].astype(np.float32) * self._frequencies
        turned = _rotate(turned, np.cos(angles), np.sin(angles))
        return attend(turned[:, :heads], turned[:, heads:], values).reshape(len(both), -1)

    def _times(self, x: Float32Array, name: str) -> Float32Array:
        return _product(x, self._weights[name])

    def _norm(self, x: Float32Array, name: str) -> Float32Array:
        mean = np.square(x).mean(-1, keepdims=True, dtype=np.float32)
        found: Float32Array = x / np.sqrt(mean + np.float32(self.shape.rms_norm_eps)) * self._weights[name]
        return found


def _product(x: Float32Array, weights: Float32Array) -> Float32Array:
    """Return x @ weights.T. For few rows OpenBLAS takes two thirds of the time in this order."""
    return np.ascontiguousarray((weights @ x.T).T)


def _rotate(x: Float32Array, cos: Float32Array, sin: Float32Array) -> Float32Array:
    """Rotate x [n, heads, dim] with paired halves, as in Llama."""
    low, high = np.split(x, 2, -1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _attention(queries: Float32Array, keys: Float32Array, values: Float32Array, is_seen: BoolArray) -> Float32Array:
    """Return the attention [rows, heads, dim] of one text; keys and values [kv_heads, n, dim], is_seen [rows, n]."""
    num_rows, num_heads, dim = queries.shape
    folded = queries.reshape(num_rows, len(keys), -1, dim).transpose(1, 2, 0, 3)  # [kv_heads, group, rows, dim]
    scores = folded @ keys[:, None].swapaxes(2, 3) / np.float32(math.sqrt(dim))
    scores = np.where(is_seen, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found = weights @ values[:, None] / weights.sum(-1, keepdims=True)
    return np.asarray(found.transpose(2, 0, 1, 3).reshape(num_rows, num_heads, dim))


class HostCache:
    """Implements `Cache`: keys and values of texts' rows, and the output of each text's last row, by place."""

    def __init__(self, num_kv_heads: int, head_dim: int) -> None:
        self._shape = num_kv_heads, head_dim
        self._rows: dict[int, Float32Array] = {}  # [2, kv_heads, room, dim] each
        self.lasts: dict[int, Float32Array] = {}

    @property
    def most_rows(self) -> int:
        row_bytes = 2 * 4 * math.prod(self._shape)
        return max(MOST_BYTES // (max(len(self._rows), 1) * row_bytes), ALWAYS)

    def open(self) -> int:
        place = next(i for i in range(len(self._rows) + 1) if i not in self._rows)
        self._rows[place] = self._empty(LEAST_ROOM)
        return place

    def close(self, place: int) -> None:
        del self._rows[place]
        self.lasts.pop(place, None)

    def reserve(self, num_rows: int) -> None:
        """Do nothing: each range grows by itself."""

    def write(self, place: int, slots: IntpArray, keys: Float32Array, values: Float32Array) -> None:
        """Store keys and values [n, kv_heads, dim] at these slots [n] of a text's range."""
        own, end = self._rows[place], int(slots.max()) + 1
        if end > own.shape[2]:
            grown = self._rows[place] = self._empty(1 << (end - 1).bit_length())
            grown[:, :, : own.shape[2]] = own
            own = grown
        own[0][:, slots], own[1][:, slots] = keys.swapaxes(0, 1), values.swapaxes(0, 1)

    def read(self, place: int, num_rows: int) -> Float32Array:
        """Return the first keys and values of a text, [2, kv_heads, at most num_rows, dim]."""
        return self._rows[place][:, :, :num_rows]

    def _empty(self, room: int) -> Float32Array:
        num_kv_heads, head_dim = self._shape
        return np.zeros((2, num_kv_heads, room, head_dim), np.float32)


class HostEagle(RowHead):
    """Implements `TreeHead`. Trees are grown at once, all rows of a level in one pass."""

    runs_beside_host = False
    cache: HostCache

    def __init__(self, head: EagleArrays) -> None:
        cache = HostCache(head.shape.num_key_value_heads, head.shape.head_dim)
        super().__init__(head.layers, head.shape.width, head.token_ids, head.limit_vocab, cache)
        self.network = HostNetwork(head)

    def taken(self, values: Any) -> Any:
        """See `RowHead`."""
        return np.asarray(on_host(values), np.float32)

    def copied(self, states: Float32Array) -> Float32Array:
        """See `RowHead`."""
        return np.array(states, np.float32)

    def _project(self, values: Float32Array, rows: Int32Array) -> Float32Array:
        return self.network.project(values[rows])

    def _compute(self, rows: EagleRows) -> None:
        for place, found in zip(rows.places, self.run(rows), strict=True):
            self.cache.lasts[place] = found[-1].copy()

    def run(self, rows: EagleRows) -> list[Float32Array]:
        """See `RowHead`."""
        ends = np.cumsum(rows.counts)[:-1]
        slots = np.split(rows.slots, ends)

        def attend(*new: Float32Array) -> Float32Array:
            found = []
            for i, (queries, keys, values) in enumerate(zip(*(np.split(one, ends) for one in new), strict=True)):
                self.cache.write(rows.places[i], slots[i], keys, values)
                kept = self.cache.read(rows.places[i], rows.is_seen.shape[2])
                seen = rows.is_seen[i, : len(queries), : kept.shape[2]]
                found.append(_attention(queries, kept[0], kept[1], seen))
            return np.concatenate(found)

        return np.split(self.network(np.asarray(rows.states), rows.token_ids, rows.positions, attend), ends)

    def last(self, text: FollowedText) -> Float32Array:
        """See `RowHead`."""
        return self.cache.lasts[text.place]

    def logits(self, states: Sequence[Float32Array]) -> Float32Array:
        """See `RowHead`."""
        return self.network.logits(np.stack(list(states)))

    def start(self, requests: Sequence[TreeRequest]) -> list[Pending[Grown]]:
        """Grow trees; see `TreeHead`."""
        self.follow([session_id for one in requests for session_id in one.session_ids])
        return [Pending(partial(_same, self._grow(one))) for one in requests]

    def _grow(self, request: TreeRequest) -> Grown:
        texts = [self.texts[session_id] for session_id in request.session_ids]
        assert all(text.length for text in texts), "a text of no rows"
        levels = levels_of(request.depth, request.ranks, request.level_sizes, self.network.shape.draft_vocab_size)
        trees, found = _Trees(self, texts, sum(level.num_rows for level in levels[1:])), list[_Nodes]()
        params = [ranking_params(own) for own in request.params]
        for depth, level in enumerate(levels):
            num_rows = trees.states.shape[1]
            own = [one for one in params for _ in range(num_rows)]
            positions = np.repeat([text.end + depth for text in texts], num_rows).tolist()
            token_ids, scores = rank_tokens(trees.logits(), own, positions, level.num_ranked, self.token_ids)
            found.append(trees.add(level, token_ids.reshape(len(texts), -1), scores.reshape(len(texts), -1)))
            if depth + 1 == len(levels):
                break
            chosen = found[-1].choose(level, levels[depth + 1].num_rows)
            likely = np.take_along_axis(found[-1].reach, chosen, 1).max()
            if request.ranks is None and not request.level_sizes and likely < request.floor:
                break
            trees.expand(found[-1], chosen)
        names = ("token_ids", "scores", "reach", "parents")
        nodes = {name: np.concatenate([getattr(one, name) for one in found], 1) for name in names}
        return Grown(**nodes, depths=depths_of(levels)[: nodes["reach"].shape[1]])


def _same(grown: Grown) -> Grown:
    return grown


class _Nodes:
    """Nodes of a level: tokens, scores, reach, parents, and the rows before them, [b, n]."""

    def __init__(self, *arrays: npt.NDArray[Any]) -> None:
        self.token_ids, self.scores, self.reach, self.parents, self.behind = arrays

    def likeliest(self, count: int) -> _Nodes:
        """Return the `count` likeliest nodes, likeliest first."""
        which = _top(self.reach, count)
        own = (self.token_ids, self.scores, self.reach, self.parents, self.behind)
        return _Nodes(*(np.take_along_axis(one, which, 1) for one in own))

    def choose(self, level: Level, num_rows: int) -> IntpArray:
        """Return which nodes are expanded, i64[b, rows]: the likeliest, or those of the shape."""
        if level.num_kept is None and level.expanded is None:
            return _top(self.reach, num_rows)
        chosen = np.arange(num_rows) if level.expanded is None else level.expanded
        return np.broadcast_to(chosen, (len(self.reach), len(chosen)))


def _top(reach: Float32Array, count: int) -> IntpArray:
    return np.argsort(-reach, 1, kind="stable")[:, :count]


class _Trees:
    """Trees that grow below texts, with the rows of their last level; see `specq.drafting.eagle3.rows`.

    states: the output of the rows, [b, rows, hidden].
    """

    def __init__(self, head: HostEagle, texts: Sequence[FollowedText], num_more: int) -> None:
        """Begin at the texts' ends. `num_more`: how many rows will be expanded in all."""
        self._network, self._lengths = head.network, [text.length for text in texts]
        self._ends = np.array([text.end for text in texts])
        self._kept = [
            np.pad(head.cache.read(text.place, text.length), ((0, 0), (0, 0), (0, num_more), (0, 0))) for text in texts
        ]
        self._is_seen = np.zeros((len(texts), 1, num_more), np.bool_)  # of the trees' own rows
        self.states = np.stack([head.last(text) for text in texts])[:, None]
        self._reach = np.zeros((len(texts), 1), np.float32)
        self._nodes = np.full((len(texts), 1), -1, np.int32)
        self._first, self._num_rows, self._depth = 0, 0, 0  # nodes, rows and levels so far

    def logits(self) -> Float32Array:
        """Return the logits behind the rows, [b * rows, columns]."""
        return self._network.logits(self.states.reshape(-1, self.states.shape[2]))

    def add(self, level: Level, token_ids: Int32Array, scores: Float32Array) -> _Nodes:
        """Return the level's nodes, given all tokens ranked behind the rows, [b, rows * num_ranked]."""
        if level.columns is not None:
            token_ids, scores = token_ids[:, level.columns], scores[:, level.columns]
        behind = np.broadcast_to(level.behind, token_ids.shape)
        reach = self._reach[:, level.behind] + scores
        nodes = _Nodes(token_ids, scores, reach, self._nodes[:, level.behind], behind)
        return nodes if level.num_kept is None else nodes.likeliest(level.num_kept)

    def expand(self, nodes: _Nodes, chosen: IntpArray) -> None:
        """Go one level down, below these nodes of the level, i64[b, rows]."""
        behind = np.take_along_axis(nodes.behind, chosen, 1)
        self._reach, self._nodes = np.take_along_axis(nodes.reach, chosen, 1), (self._first + chosen).astype(np.int32)
        self._first += nodes.token_ids.shape[1]
        num_trees, num_rows = chosen.shape
        start, self._num_rows = self._num_rows, self._num_rows + num_rows
        self._is_seen = np.take_along_axis(self._is_seen, behind[:, :, None], 1)
        self._is_seen[:, np.arange(num_rows), start + np.arange(num_rows)] = True
        token_ids = np.take_along_axis(nodes.token_ids, chosen, 1)
        positions = (self._ends + (self._depth - 1)).repeat(num_rows)
        self._depth += 1

        def attend(*new: Float32Array) -> Float32Array:
            of_trees = (one.reshape(num_trees, num_rows, *one.shape[1:]) for one in new)
            return np.concatenate([self._attend(i, start, *own) for i, own in enumerate(zip(*of_trees, strict=True))])

        states = np.take_along_axis(self.states, behind[:, :, None], 1)
        flat = states.reshape(num_trees * num_rows, -1)
        self.states = self._network(flat, token_ids.reshape(-1), positions, attend).reshape(states.shape)

    def _attend(
        self, tree: int, start: int, queries: Float32Array, keys: Float32Array, values: Float32Array
    ) -> Float32Array:
        """Store the keys and values of a tree's new rows, and return their attention."""
        length, end = self._lengths[tree], self._lengths[tree] + start + len(queries)
        own = self._kept[tree]
        own[:, :, length + start : end] = np.stack([keys, values]).swapaxes(1, 2)
        is_seen = np.pad(self._is_seen[tree][:, : end - length], ((0, 0), (length, 0)), constant_values=True)
        return _attention(queries, own[0][:, :end], own[1][:, :end], is_seen)
