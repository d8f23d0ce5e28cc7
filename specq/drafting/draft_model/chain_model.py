"""A draft model that drafts one chain a round for each of many sessions, in arrays: for a colocated drafter.

`DraftModel` keeps a tree for each session. It grows the tree ahead of the verdicts and moves its root. This module
never drafts ahead. A chain starts at the committed context. A verdict follows part of it. The next chain starts from
scratch. KV of the followed part is kept. `start` only launches the work on the device. So the host is free until the
chains are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specq.drafting.draft_model.children import ChildMaker, ChildRequest
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.interface import ChainDrafter, Chains, Children, MaskBehind, Pending, draws_children
from specq.engines.native import ChainStarts, LoadedModel, PackedRows, pack_nodes, threads_of
from specq.protocol import DraftDistribution, Float32Array, Int32Array, IntpArray, SamplingParams
from specq.verification import NO_TOKEN, Logits, starts_of

NOTHING: IntpArray = np.zeros(0, np.intp)


class _Followed(NamedTuple):
    """How far verdicts followed chains.

    num_tokens, num_computed   i64[sessions]: each chain's predicted tokens, and how many have KV.
    slots, free_slots          i32[any]: the slots of the tokens with KV, and the slots of the rest.
    """

    num_tokens: IntpArray
    num_computed: IntpArray
    slots: Int32Array
    free_slots: Int32Array


class _LastChains:
    """The last chain of each session, by its place in the pool.

    counts     i64[places]: its number of tokens. 0: no chain.
    token_ids  i32[places, most]: its tokens.
    slots      i32[places, most]: the KV slots of all its tokens but the last.
    """

    def __init__(self) -> None:
        self.counts: IntpArray = np.zeros(0, np.intp)
        self.token_ids, self.slots = (np.zeros((0, 0), np.int32) for _ in range(2))

    def keep(self, places: IntpArray, token_ids: Int32Array, slots: Int32Array) -> None:
        """Store chains of depth tokens, i32[sessions, depth], and their slots, i32[sessions, depth - 1]."""
        depth = token_ids.shape[1]
        self._make_room(int(places.max()) + 1, depth)
        self.counts[places] = depth
        self.token_ids[places, :depth], self.slots[places, : depth - 1] = token_ids, slots

    def follow(self, places: IntpArray, num_tokens: IntpArray, token_ids: Int32Array) -> _Followed:
        """Remove chains that verdicts follow; `num_tokens` is the number of committed tokens of each session.

        A verdict follows a chain up to the first token outside it.
        """
        counts = self._counts(places)
        most = min(int(num_tokens.max()), self.token_ids.shape[1])
        levels = np.arange(most)
        at = starts_of(num_tokens)[:, None] + levels
        is_same = token_ids[np.minimum(at, len(token_ids) - 1)] == self.token_ids[places, :most]
        is_same &= levels < np.minimum(num_tokens, counts)[:, None]
        followed = np.logical_and.accumulate(is_same, 1).sum(1)
        num_computed = np.minimum(followed, np.maximum(counts - 1, 0))
        slots, levels = self.slots[places], np.arange(self.slots.shape[1])
        is_kept = levels < num_computed[:, None]
        self.counts[places] = 0
        return _Followed(followed, num_computed, slots[is_kept], slots[~is_kept & (levels < counts[:, None] - 1)])

    def drop(self, places: IntpArray) -> Int32Array:
        """Remove chains that no verdict has followed; return their slots."""
        counts = self._counts(places)
        self.counts[places] = 0
        return self.slots[places][np.arange(self.slots.shape[1]) < counts[:, None] - 1]

    def _counts(self, places: IntpArray) -> IntpArray:
        """Return how many tokens the chain of each session has, i64[sessions]."""
        if int(places.max()) >= len(self.counts):
            self._make_room(int(places.max()) + 1, 0)
        return self.counts[places]

    def _make_room(self, num_places: int, depth: int) -> None:
        rows, columns = self.token_ids.shape
        if num_places <= rows and depth <= columns:
            return
        rows, columns = max(num_places, 2 * rows if num_places > rows else rows), max(depth, columns)
        counts, shape = np.zeros(rows, np.intp), (rows, columns)
        token_ids, slots = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        known = tuple(slice(size) for size in self.token_ids.shape)
        counts[: len(self.counts)], token_ids[known], slots[known] = self.counts, self.token_ids, self.slots
        self.counts, self.token_ids, self.slots = counts, token_ids, slots


@dataclass(slots=True)
class _Part:
    """Some of the sessions of a round, by index.

    wait     returns tokens and scores [depth, sessions, width], and the draft distributions.
    tokens   the tokens on the device, if they are there before the host reads them.
    """

    indices: IntpArray
    wait: Callable[[], tuple[Int32Array, Float32Array, list[Sequence[DraftDistribution]]]]
    tokens: Any = None


@dataclass(slots=True)
class _Begun:
    """A round: the sessions' places, the slots i32[sessions, depth - 1] of their chains, and the parts that draft."""

    places: IntpArray
    slots: Int32Array
    parts: list[_Part]


class ChainModel(ChainDrafter):
    """Drafts chains with a draft model, or with the contexts of a drafter of trees for other sessions.

    Arguments as in `specq.engines.models.load_model`. `threads` and `helper_cores` are those of the engine.
    `distribution_size` and `rng` are as in `specq.drafting.draft_model.children.ChildMaker`.
    """

    def __init__(
        self,
        model: str | LoadedModel | Contexts,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        threads: int = 1,
        helper_cores: tuple[int, ...] = (),
        distribution_size: int = 32,
        rng: np.random.Generator | None = None,
    ) -> None:
        if not isinstance(model, Contexts):
            own = threads_of(threads, helper_cores)
            model = Contexts(model, device=device, dtype=dtype, kv_slots=kv_slots, name=name, threads=own)
        self.contexts = model
        self.info = self.contexts.info
        self.limit_vocab = min(self.info.vocab_size, self.info.num_tokens)
        self._maker = ChildMaker(distribution_size, rng or np.random.default_rng(), self.contexts.token_ids)
        self._params: dict[int, SamplingParams] = {}  # by session
        self._last = _LastChains()
        self._begun: _Begun | None = None

    @property
    def free_slots(self) -> int:
        return self.contexts.pool.free_slots

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """Start a session; see `ChainDrafter`."""
        self.contexts.open(session_id, token_ids, owner)
        self._params[session_id] = params

    def close(self, session_id: int) -> None:
        """Forget a session; see `ChainDrafter`."""
        if self._params.pop(session_id, None) is not None:
            self._drop(self.contexts.pool.places([session_id]))
            self.contexts.close(session_id)

    def commit(self, session_ids: Sequence[int], num_tokens: IntpArray, token_ids: Int32Array) -> IntpArray:
        """Append committed tokens; see `ChainDrafter`."""
        places = self.contexts.pool.places(session_ids)
        followed = self._last.follow(places, num_tokens, token_ids)
        self.contexts.append(places, num_tokens, token_ids)
        if len(followed.slots):
            self.contexts.settle(places, followed.num_computed, followed.slots, fills=False)  # the next pass fills
        self.contexts.pool.give(followed.free_slots)
        return followed.num_tokens

    def _drop(self, places: IntpArray) -> None:
        """Remove chains that no verdict has followed."""
        slots = self._last.drop(places)
        if len(slots):
            self.contexts.pool.give(slots)

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        """Begin to draft chains; see `ChainDrafter`."""
        assert self._begun is None
        places = self.contexts.pool.places(session_ids)
        self._drop(places)
        with self.contexts.alive():
            self.contexts.prefill(places)
            with self.contexts.taken(len(places) * (depth - 1)) as taken:
                slots = taken.reshape(len(places), depth - 1)
                logits = self.contexts.compute(places)
                params = [self._params[session_id] for session_id in session_ids]
                masks = self._masks_of(session_ids, params, logits)
                self._begun = _Begun(places, slots, self._begin(places, params, slots, logits, depth, width, masks))
        return Pending(self._collect, self._on_device)

    def _masks_of(
        self, session_ids: Sequence[int], params: Sequence[SamplingParams], logits: Logits
    ) -> dict[int, MaskBehind]:
        """Return the masks to draft with, by index: of sessions whose children are ranked, on the host."""
        if not self.masks or not isinstance(logits, np.ndarray):
            return {}
        each = enumerate(zip(session_ids, params, strict=True))
        return {i: self.masks[own] for i, (own, of) in each if own in self.masks and not draws_children(of)}

    def _on_device(self) -> Any:
        """Return the device's tokens of the started chains; see `ChainDrafter.start`."""
        parts = self._begun.parts if self._begun is not None else []
        return parts[0].tokens if len(parts) == 1 else None

    def _collect(self) -> Chains:
        """Wait for the chains that were started."""
        assert self._begun is not None
        begun, self._begun = self._begun, None
        try:
            with self.contexts.alive():
                found = [part.wait() for part in begun.parts]
        except BaseException:
            self.contexts.pool.give(begun.slots.reshape(-1))
            raise
        count, (depth, _, width) = len(begun.places), found[0][0].shape
        token_ids = np.empty((count, depth, width), np.int32)
        scores = np.empty((count, depth, width), np.float32)
        distributions: list[Sequence[DraftDistribution]] = [()] * count
        for part, (its_tokens, its_scores, its_distributions) in zip(begun.parts, found, strict=True):
            token_ids[part.indices], scores[part.indices] = its_tokens.swapaxes(0, 1), its_scores.swapaxes(0, 1)
            for index, of_session in zip(part.indices, its_distributions, strict=False):
                distributions[index] = of_session
        self._last.keep(begun.places, token_ids[:, :, 0], begun.slots)
        return Chains(token_ids, scores, distributions)

    def _begin(
        self,
        places: IntpArray,
        params: Sequence[SamplingParams],
        slots: Int32Array,
        logits: Logits,
        depth: int,
        width: int,
        masks: Mapping[int, MaskBehind],
    ) -> list[_Part]:
        """Start all chains that the device can draft at once; the host helps with others."""
        drafter, lengths = self.contexts.chains, self.contexts.pool.known(places)
        every, by_device = np.arange(len(places)), NOTHING
        if drafter is not None:
            fits = lengths + depth <= self.info.max_length
            can_draft = np.fromiter(map(drafter.can_draft, params), np.bool_, len(params))
            can_draft[np.array([*masks], np.intp)] = False
            by_device = every[fits & can_draft]
        parts = []
        if len(by_device) and drafter.takes([params[i] for i in by_device], lengths[by_device], depth, width):
            own = logits if len(by_device) == len(places) else logits[by_device]
            starts = self._starts(places, params, slots, by_device)
            wait = drafter.start(own, starts, depth, width, self.limit_vocab)
            parts.append(_Part(by_device, lambda: (*wait(), []), getattr(wait, "tokens", None)))
        else:
            by_device = NOTHING
        if len(by_device) < len(every):
            rest = np.delete(every, by_device)
            found = self._by_passes(places, params, slots, rest, logits[rest], width, masks)
            parts.append(_Part(rest, lambda: found))
        return parts

    def _starts(
        self, places: IntpArray, params: Sequence[SamplingParams], slots: Int32Array, which: IntpArray
    ) -> ChainStarts:
        """Return where the chains of some of the sessions begin."""
        own = places[which]
        lengths = self.contexts.pool.known(own).astype(np.int32)
        row_starts = np.arange(len(own) + 1, dtype=np.int32)
        of_params = [params[i] for i in which.tolist()]
        return ChainStarts(self.contexts.pool.tables(own), row_starts, lengths, (), lengths, slots[which], of_params)

    def _by_passes(
        self,
        places: IntpArray,
        params: Sequence[SamplingParams],
        slots: Int32Array,
        which: IntpArray,
        logits: Logits,
        width: int,
        masks: Mapping[int, MaskBehind],
    ) -> tuple[Int32Array, Float32Array, list[Sequence[DraftDistribution]]]:
        """Draft the chains of some sessions, one pass a level. A chain ends early where a token has no children."""
        count, depth, most = len(which), slots.shape[1] + 1, self.info.max_length
        token_ids = np.full((depth, count, width), NO_TOKEN, np.int32)
        scores = np.zeros((depth, count, width), np.float32)
        distributions: list[list[DraftDistribution]] = [[] for _ in range(count)]
        starts = self.contexts.pool.known(places[which])
        alive = (starts < most).nonzero()[0]
        logits = logits[alive]
        for level in range(depth):
            if masks and isinstance(logits, np.ndarray):
                paths = [(masks.get(int(which[i])), token_ids[:level, i, 0]) for i in alive]
                is_open = np.array([self._mask(*path, row) for path, row in zip(paths, logits, strict=True)], np.bool_)
                alive, logits = alive[is_open], logits[is_open]
            wanted = [ChildRequest(params[which[i]], int(starts[i]) + level, width) for i in alive]
            made = self._maker.make(wanted, logits, self.limit_vocab) if wanted else []
            for i, children in zip(alive, made, strict=True):
                _note(children, token_ids[level, i], scores[level, i], distributions[i])
            alive = alive[(token_ids[level, alive, 0] != NO_TOKEN) & (starts[alive] < most - level - 1)]
            if not len(alive) or level + 1 == depth:
                break
            own = self._starts(places, params, slots, which[alive])
            logits = self.contexts.run(_level(own, token_ids[level, alive, 0], level))
        return token_ids, scores, [tuple(of_chain) for of_chain in distributions]

    def _mask(self, masks: MaskBehind | None, path: Int32Array, logits: Float32Array) -> bool:
        """Set the logits of tokens that may not come behind a chain to -inf; return whether any may."""
        if masks is None:
            return True
        words = masks(path.tolist())
        if words is None or not words.any():
            return False
        is_allowed, ids = np.unpackbits(words.view(np.uint8), bitorder="little").view(np.bool_), self._maker.token_ids
        allowed = is_allowed[: len(logits)] if ids is None else is_allowed[ids[ids < len(is_allowed)]]
        logits[: len(allowed)][~allowed] = -np.inf
        logits[len(allowed) :] = -np.inf
        return bool(allowed.any())


def _level(starts: ChainStarts, token_ids: Int32Array, level: int) -> PackedRows:
    """Return the tokens of one level of chains as rows."""
    return pack_nodes(starts, token_ids, starts.slots[:, level], starts.positions + level, starts.slots[:, : level + 1])


def _note(
    children: Children, token_ids: Int32Array, scores: Float32Array, distributions: list[DraftDistribution]
) -> None:
    """Write one level of a chain into its row of the arrays."""
    count = min(len(token_ids), len(children.token_ids))
    token_ids[:count], scores[:count] = children.token_ids[:count], children.scores[:count]
    if children.distribution is not None:
        distributions.append(children.distribution)
