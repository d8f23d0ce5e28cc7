"""A draft model that drafts one chain a round for each of many sessions, in arrays: for a colocated drafter.

`DraftModel` keeps a tree for each session. It grows the tree ahead of the verdicts and moves its root. This module
never drafts ahead. A chain starts at the committed context. A verdict follows part of it. The next chain starts from
scratch. KV of the followed part is kept. `start` only launches the work on the device. So the host is free until the
chains are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specq.drafting.draft_model.children import ChildMaker, ChildRequest
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.draft_model.masked_chains import MOST_FORCED, MaskedChain, MaskedChains
from specq.drafting.interface import ChainDrafter, Chains, Children, Pending, draws_children
from specq.engines.native import ChainStarts, LoadedModel, PackedRows, RowPacker, pack_nodes, threads_of
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
    computed   i64[places]: how many of its first tokens have KV.
    token_ids  i32[places, most]: its tokens.
    slots      i32[places, most]: the KV slots of all its tokens but the last.
    """

    def __init__(self) -> None:
        self.counts, self.computed = np.zeros(0, np.intp), np.zeros(0, np.intp)
        self.token_ids, self.slots = (np.zeros((0, 0), np.int32) for _ in range(2))

    def keep(self, places: IntpArray, token_ids: Int32Array, slots: Int32Array, computed: IntpArray) -> None:
        """Store chains of depth tokens, i32[sessions, depth], their slots, i32[sessions, depth - 1], and `computed`."""
        depth = token_ids.shape[1]
        self._make_room(int(places.max()) + 1, depth)
        self.counts[places], self.computed[places] = depth, computed
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
        num_computed = np.minimum(followed, np.where(counts > 0, self.computed[places], 0))
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
        counts, computed, shape = np.zeros(rows, np.intp), np.zeros(rows, np.intp), (rows, columns)
        token_ids, slots = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        known = tuple(slice(size) for size in self.token_ids.shape)
        counts[: len(self.counts)], computed[: len(self.counts)] = self.counts, self.computed
        token_ids[known], slots[known] = self.token_ids, self.slots
        self.counts, self.computed, self.token_ids, self.slots = counts, computed, token_ids, slots


@dataclass(slots=True)
class _Part:
    """Some of the sessions of a round, by index.

    wait     returns tokens and scores [depth, sessions, width], and the draft distributions.
    tokens   the tokens on the device, if they are there before the host reads them.
    masked   the chains, if their sessions have a grammar.
    """

    indices: IntpArray
    wait: Callable[[], tuple[Int32Array, Float32Array, list[Sequence[DraftDistribution]]]]
    tokens: Any = None
    masked: MaskedChains | None = None


@dataclass(slots=True)
class _Round:
    """A round that begins: for each session its id, its place, its parameters, and slots for its chain.

    slots    i32[sessions, most tokens of a chain - 1].
    depth, width   as of `ChainDrafter.start`.
    masked   by index, the chains of sessions with a grammar that are drafted by it.
    """

    session_ids: Sequence[int]
    places: IntpArray
    params: list[SamplingParams]
    slots: Int32Array
    depth: int
    width: int
    masked: dict[int, MaskedChain]


@dataclass(slots=True)
class _Begun:
    """A round: the places, the slots of the chains as in `_Round`, and the parts that draft."""

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
        self.takes_forced = self.contexts.is_on_cpu
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
        params = [self._params[session_id] for session_id in session_ids]
        own = self._masked_among(session_ids, params)
        longest = depth + MOST_FORCED if self.forced and own else depth
        with self.contexts.alive():
            self.contexts.prefill(places)
            with self.contexts.taken(len(places) * (longest - 1)) as taken:
                slots = taken.reshape(len(places), longest - 1)
                round_ = _Round(session_ids, places, params, slots, depth, width, {})
                round_.masked = {i: self._masked_chain(round_, i) for i in own}
                self._begun = _Begun(places, slots, self._begin(round_, self._compute(round_)))
        return Pending(self._collect, self._on_device)

    def _masked_among(self, session_ids: Sequence[int], params: Sequence[SamplingParams]) -> list[int]:
        """Return the sessions to draft with masks, by index: those whose children are ranked, on the host."""
        if not self.masks or not self.contexts.is_on_cpu:
            return []
        each = enumerate(zip(session_ids, params, strict=True))
        return [i for i, (own, of) in each if own in self.masks and not draws_children(of)]

    def _masked_chain(self, of: _Round, i: int) -> MaskedChain:
        """Return a session's chain, with the tokens that its grammar forces first."""
        session_id, length = of.session_ids[i], int(self.contexts.pool.known(of.places[i : i + 1])[0])
        room = max(min(of.slots.shape[1] + 1, self.info.max_length - length), 0)
        masks = self.masks[session_id], self.forced.get(session_id)
        chain = MaskedChain(of.params[i], length, room, of.slots[i], *masks)
        chain.add_forced()
        return chain

    def _compute(self, of: _Round) -> Logits:
        """Compute the contexts, and first tokens of chains that are forced; return logits [sessions, columns].

        Those of a chain that is already complete have no meaning.
        """
        contexts = self.contexts
        if not any(chain.token_ids for chain in of.masked.values()):
            return contexts.compute(of.places)
        counts = contexts.num_pending(of.places)
        with contexts.taken(int(counts.sum())) as taken:
            packer, ends = RowPacker(), np.cumsum(counts).tolist()
            for i, (session_id, end, count) in enumerate(zip(of.session_ids, ends, counts.tolist(), strict=True)):
                chain = of.masked.get(i)
                has_lead = chain is not None and bool(chain.token_ids) and len(chain.token_ids) < chain.room
                contexts.pack(packer, session_id, taken[end - count : end], judged=not has_lead)
                if chain is not None and has_lead:
                    chain.pack(packer, self.info.vocab_size)
            logits = contexts.run(packer.pack())
        contexts.settle(of.places, counts, taken)
        return logits

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
        count, width = len(begun.places), found[0][0].shape[2]
        depth = max(len(its_tokens) for its_tokens, *_ in found)
        token_ids = np.full((count, depth, width), NO_TOKEN, np.int32)
        scores = np.zeros((count, depth, width), np.float32)
        computed = np.full(count, depth - 1)
        distributions: list[Sequence[DraftDistribution]] = [()] * count
        for part, (its_tokens, its_scores, its_distributions) in zip(begun.parts, found, strict=True):
            own = part.indices, slice(len(its_tokens))
            token_ids[own], scores[own] = its_tokens.swapaxes(0, 1), its_scores.swapaxes(0, 1)
            computed[part.indices] = len(its_tokens) - 1 if part.masked is None else part.masked.num_computed
            for index, of_session in zip(part.indices, its_distributions, strict=False):
                distributions[index] = of_session
        self.contexts.pool.give(begun.slots[:, depth - 1 :].reshape(-1))
        self._last.keep(begun.places, token_ids[:, :, 0], begun.slots[:, : depth - 1], computed)
        return Chains(token_ids, scores, distributions)

    def _begin(self, of: _Round, logits: Logits) -> list[_Part]:
        """Start all chains that the device can draft at once; the host helps with others."""
        drafter, lengths = self.contexts.chains, self.contexts.pool.known(of.places)
        every, by_device = np.arange(len(of.places)), NOTHING
        masked = np.array([*of.masked], np.intp)
        if drafter is not None:
            fits = lengths + of.depth <= self.info.max_length
            can_draft = np.fromiter(map(drafter.can_draft, of.params), np.bool_, len(of.params))
            can_draft[masked] = False
            by_device = every[fits & can_draft]
        parts = []
        own = [of.params[i] for i in by_device]
        if len(by_device) and drafter.takes(own, lengths[by_device], of.depth, of.width):
            rows = logits if len(by_device) == len(every) else logits[by_device]
            wait = drafter.start(rows, self._starts(of, by_device), of.depth, of.width, self.limit_vocab)
            parts.append(_Part(by_device, lambda: (*wait(), []), getattr(wait, "tokens", None)))
        else:
            by_device = NOTHING
        if len(masked):
            parts.append(self._by_grammar(of, masked, logits[masked]))
        rest = np.delete(every, np.concatenate([by_device, masked]))
        if len(rest):
            found = self._by_passes(of, rest, logits[rest])
            parts.append(_Part(rest, lambda: found))
        return parts

    def _by_grammar(self, of: _Round, which: IntpArray, logits: Logits) -> _Part:
        """Draft the chains of sessions with a grammar."""
        chains = MaskedChains([*of.masked.values()], of.width, self.contexts, self._maker)
        chains.draft(self.contexts.pool.tables(of.places[which]), logits, of.depth, self.limit_vocab)
        return _Part(which, lambda: (chains.token_ids, chains.scores, []), masked=chains)

    def _starts(self, of: _Round, which: IntpArray) -> ChainStarts:
        """Return where the chains of some of the sessions begin."""
        own, slots = of.places[which], of.slots[which, : of.depth - 1]
        lengths = self.contexts.pool.known(own).astype(np.int32)
        row_starts = np.arange(len(own) + 1, dtype=np.int32)
        of_params = [of.params[i] for i in which.tolist()]
        return ChainStarts(self.contexts.pool.tables(own), row_starts, lengths, (), lengths, slots, of_params)

    def _by_passes(
        self, of: _Round, which: IntpArray, logits: Logits
    ) -> tuple[Int32Array, Float32Array, list[Sequence[DraftDistribution]]]:
        """Draft the chains of some sessions, one pass a level. A chain ends early where a token has no children."""
        count, depth, width, most = len(which), of.depth, of.width, self.info.max_length
        token_ids = np.full((depth, count, width), NO_TOKEN, np.int32)
        scores = np.zeros((depth, count, width), np.float32)
        distributions: list[list[DraftDistribution]] = [[] for _ in range(count)]
        starts = self.contexts.pool.known(of.places[which])
        alive = (starts < most).nonzero()[0]
        logits = logits[alive]
        for level in range(depth):
            wanted = [ChildRequest(of.params[which[i]], int(starts[i]) + level, width) for i in alive]
            made = self._maker.make(wanted, logits, self.limit_vocab) if wanted else []
            for i, children in zip(alive, made, strict=True):
                _note(children, token_ids[level, i], scores[level, i], distributions[i])
            alive = alive[(token_ids[level, alive, 0] != NO_TOKEN) & (starts[alive] < most - level - 1)]
            if not len(alive) or level + 1 == depth:
                break
            own = self._starts(of, which[alive])
            logits = self.contexts.run(_level(own, token_ids[level, alive, 0], level))
        return token_ids, scores, [tuple(of_chain) for of_chain in distributions]


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
