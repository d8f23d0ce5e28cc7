"""The committed contexts of a draft model's sessions, and the passes that compute them.

A context's first tokens have KV. Its last tokens may still wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from specq.engines.models import chain_drafter, load_model
from specq.engines.native import (
    ALONE,
    ForwardOutput,
    KvPool,
    LoadedModel,
    PackedRows,
    PassWork,
    RowPacker,
    Threads,
    pack_tokens,
)
from specq.protocol import Int32Array, IntpArray
from specq.verification import Logits
from specq.verification.devices import check_alive

# Rows of a pass: the largest that a GPU records. For 2,048 rows the launch would take longer than the computation.
MAX_PREFILL_ROWS = 768
VERDICT_ROWS = 2  # maximum rows of a session after a verdict: a chain's last node, and the target's own token
WARM_UP = -1  # the id of the first session of a warm-up; other sessions have ids >= 0


class Contexts:
    """A loaded model, its KV pool, and sessions. Arguments as in `specq.engines.models.load_model`.

    The tokens of a context are in the pool. Its last tokens, which have no KV yet, are *pending*. Sessions are named by
    their ids, or by their places in the pool where an operation handles many at once.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        threads: Threads = ALONE,
    ) -> None:
        loaded = model
        if isinstance(loaded, str):
            loaded = load_model(loaded, device=device, dtype=dtype, kv_slots=kv_slots, name=name, threads=threads)
        self.info, self.token_ids, self.num_masks = loaded.info, loaded.token_ids, loaded.num_masks
        self.pool = KvPool(self.info.kv_slots)
        self._forward = loaded.forward
        self._device = loaded.forward.kv.device
        self._chains: Any = None

    @property
    def chains(self) -> Any:
        """The drafter of chains without the host between their levels, created on first use.

        See `specq.engines.models.chain_drafter`. None if the device has none.
        """
        self._chains = self._chains or chain_drafter(self._forward, self.token_ids)
        return self._chains

    @property
    def is_on_cpu(self) -> bool:
        return self._device is None or self._device.type == "cpu"

    @property
    def work(self) -> PassWork:
        """What a pass of the model does."""
        return self._forward.work

    @property
    def recorded_sizes(self) -> tuple[int, ...]:
        """The padded numbers of rows of passes that a GPU records on their first run; empty elsewhere."""
        return self._forward.jumps if getattr(self._forward, "uses_graphs", False) else ()

    def warm_up(self, most_sessions: int) -> None:
        """Run a pass of each size that is recorded. The reason: the first run of a size takes about ten milliseconds.

        Some passes have many rows of one session, as prompts do. Others have few rows of each of up to `most_sessions`
        sessions, as verdicts do.
        """
        random = np.random.default_rng(1)
        for num_sessions, num_tokens in _passes(self.recorded_sizes, most_sessions):
            if num_sessions * num_tokens <= self.pool.free_slots and num_tokens <= self.info.max_length:
                self._run_once(random.integers(0, self.info.num_tokens, (num_sessions, num_tokens), np.int32))

    def _run_once(self, token_ids: Int32Array) -> None:
        """Compute sessions, token_ids i32[sessions, n], and forget them."""
        ids = [WARM_UP - i for i in range(len(token_ids))]
        try:
            for session_id, own in zip(ids, token_ids, strict=True):
                self.open(session_id, own)
            with self.alive():
                self.compute(self.pool.places(ids))
        finally:
            for session_id in ids:
                self.close(session_id)

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> None:
        """Start a session; KV of the owner's earlier sessions with the same beginning is shared."""
        token_ids = self._embeddable(token_ids)
        self.pool.open(session_id, token_ids, owner)
        self.pool.tell(self.pool.places([session_id]), np.array([len(token_ids)]), token_ids)

    def close(self, session_id: int) -> None:
        """Forget a session; unknown ones are ignored."""
        self.pool.close(session_id)

    def append(self, places: IntpArray, counts: IntpArray, token_ids: Int32Array) -> None:
        """Commit tokens, `counts` for each session; they become pending."""
        self.pool.tell(places, counts, self._embeddable(token_ids))

    def settle(self, places: IntpArray, counts: IntpArray, slots: Int32Array, *, fills: bool = True) -> None:
        """Note that the first `counts` pending tokens of each session now have KV in these slots.

        `fills` as in `KvPool.extend_all`.
        """
        self.pool.extend_all(places, counts, *self._stage(places, counts, slots), fills=fills)

    def rewind(self, session_id: int, length: int) -> None:
        """Forget committed tokens beyond `length`. Whole blocks of KV before it are kept."""
        self.pool.rewind(session_id, length)

    def num_pending(self, places: IntpArray) -> IntpArray:
        """Return how many tokens of each session are pending, i64[sessions]."""
        return self.pool.known(places) - self.pool.lengths(places)

    def prefill(self, places: IntpArray) -> None:
        """Compute contexts, many in a pass, until the rest fits the batched pass that follows."""
        left = max(1, MAX_PREFILL_ROWS // max(len(places), 1))
        while (pending := self.num_pending(places)).sum() > max(MAX_PREFILL_ROWS, len(places)):
            beyond = np.maximum(pending - left, 0)
            before = beyond.cumsum() - beyond
            counts = np.clip(MAX_PREFILL_ROWS - before, 0, beyond)
            own, counts = places[counts > 0], counts[counts > 0]
            with self.taken(int(counts.sum())) as slots:
                staged, tokens = self._stage(own, counts, slots)
                rows = self.pool.tables(own), self.pool.lengths(own), counts, tokens, slots
                self._forward(pack_tokens(*rows, judged=False))
            self.pool.extend_all(own, counts, staged, tokens)

    def compute(self, places: IntpArray) -> Logits:
        """Compute each session's pending tokens, or its last token again; return logits [sessions, vocab]."""
        counts = self.num_pending(places)
        with self.taken(int(counts.sum())) as slots:
            staged, token_ids = self._stage(places, counts, slots)
            if np.count_nonzero(counts) == len(counts):
                rows = pack_tokens(self.pool.tables(places), self.pool.lengths(places), counts, token_ids, slots)
            else:
                rows = self._with_last(places, counts, slots)
            logits = self._forward(rows).logits
        self.pool.extend_all(places, counts, staged, token_ids)
        return logits

    def _stage(self, places: IntpArray, counts: IntpArray, slots: Int32Array) -> tuple[IntpArray, Int32Array]:
        """Assign these slots to the first `counts` pending tokens of each session, for a pass.

        Returns the arguments for `KvPool.extend_all` after a successful pass.
        """
        staged = self.pool.stage_all(places, counts, slots)
        return staged, self.pool.staged_tokens(staged)

    def _with_last(self, places: IntpArray, counts: IntpArray, slots: Int32Array) -> PackedRows:
        """Return all pending tokens of each session as rows, and the last token of a session without pending tokens.

        That token keeps its slot.
        """
        is_known, sizes = counts == 0, np.maximum(counts, 1)
        starts = self.pool.lengths(places) - is_known
        own_slots = np.empty(sizes.sum(), np.int32)
        has_slot = is_known.repeat(sizes)
        own_slots[has_slot] = self.pool.slots(places[is_known], starts[is_known])
        own_slots[~has_slot] = slots
        return pack_tokens(self.pool.tables(places), starts, sizes, self.pool.told(places, starts, sizes), own_slots)

    def pack(self, packer: RowPacker, session_id: int, slots: Int32Array, *, judged: bool) -> None:
        """Begin a session's rows with its pending tokens, in these slots.

        If it has none and logits are wanted, the rows begin with the last token.
        """
        places = self.pool.places([session_id])
        starts, counts = self.pool.lengths(places), np.array([len(slots)])
        packer.add_session(self.pool.stage(session_id, slots))
        if judged and not len(slots):
            starts, counts, slots = starts - 1, counts + 1, self.pool.slots(places, starts - 1)
        if len(slots):
            tokens = self.pool.told(places, starts, counts)
            packer.add_chain(tokens.tolist(), slots.tolist(), int(starts[0]), judged)

    @contextmanager
    def taken(self, num_slots: int) -> Iterator[Int32Array]:
        """Take slots for a forward pass. If the body fails, they are given back, and it may be repeated."""
        slots = self.pool.take(num_slots)
        try:
            yield slots
        except BaseException:
            self.pool.give(slots)
            raise

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Raise EngineLostError if the body failed with a device error; else keep the exception."""
        try:
            yield
        except Exception:
            check_alive(self._device)
            raise

    def run(self, rows: PackedRows) -> Logits:
        """Run the forward pass and return its logits."""
        return self.run_with_states(rows).logits

    def run_with_states(self, rows: PackedRows) -> ForwardOutput:
        """Run the forward pass and return its logits and final hidden states."""
        return self._forward(rows)

    def _embeddable(self, token_ids: Int32Array) -> Int32Array:
        """Clip token ids to the vocabulary.

        A target's padded vocabulary may be larger. Tokens that this model cannot embed only make its guesses worse.
        """
        return np.minimum(token_ids, np.int32(self.info.vocab_size - 1))


def _passes(sizes: Sequence[int], most_sessions: int) -> Iterator[tuple[int, int]]:
    """Yield (sessions, tokens of each) of passes padded to each of these sizes; see `Contexts.warm_up`."""
    for smaller, size in pairwise((0, *sizes)):
        yield 1, size
        few = min(size, VERDICT_ROWS * most_sessions)
        each = 1 if few <= most_sessions else VERDICT_ROWS
        if few > smaller:
            yield few // each, each
