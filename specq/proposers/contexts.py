"""The committed contexts of a draft model's sessions: which tokens have KV, which wait for it, and the passes between."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specq.engines.torch import KvPool, LoadedModel, RowPacker, chain_drafter, load
from specq.protocol import NO_TOKENS, Int32Array, SamplingParams
from specq.verification.devices import check_alive

MAX_PREFILL_ROWS = 512  # of a pass


@dataclass(slots=True)
class Context:
    """`length` committed tokens, of which the last, `pending`, have no KV yet; `params` are those to draft with."""

    params: SamplingParams
    length: int
    last_token: int
    pending: Int32Array


class Contexts:
    """A loaded model, its KV pool, and sessions. Arguments as in `specq.engines.torch.loading.load`."""

    def __init__(
        self, model: str | LoadedModel, *, device: str = "auto", dtype: str = "auto", kv_slots: int = 0, name: str = ""
    ) -> None:
        loaded = model
        if isinstance(loaded, str):
            loaded = load(loaded, device=device, dtype=dtype, kv_slots=kv_slots, name=name)
        self.info, self.token_ids = loaded.info, loaded.token_ids
        self.pool = KvPool(self.info.kv_slots)
        self.sessions: dict[int, Context] = {}
        self._forward = loaded.forward
        self._device = loaded.forward.kv.keys.device
        self._chains: Any = None

    @property
    def chains(self) -> Any:
        """A `specq.engines.torch.chain.ChainDrafter`, made when first asked for, or None where there can be none:
        it takes a token's id for its column in the logits."""
        if self.token_ids is None:
            self._chains = self._chains or chain_drafter(self._forward)
        return self._chains

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams) -> None:
        """Start a session; KV of earlier ones with the same beginning is shared."""
        token_ids = self._embeddable(token_ids)
        num_cached = self.pool.open(session_id, token_ids)
        self.sessions[session_id] = Context(params, len(token_ids), int(token_ids[-1]), token_ids[num_cached:])

    def close(self, session_id: int) -> None:
        """Forget a session; unknown ones are ignored."""
        if self.sessions.pop(session_id, None) is not None:
            self.pool.close(session_id)

    def append(self, session_id: int, token_ids: Int32Array, slots: Int32Array) -> None:
        """Commit tokens, at least one; the first of them have their KV in these slots, which is so only if nothing was
        pending before."""
        context = self.sessions[session_id]
        token_ids = self._embeddable(token_ids)
        rest = token_ids[len(slots) :]
        if len(slots):
            self.pool.append(session_id, token_ids[: len(slots)], slots)
        context.pending = np.concatenate([context.pending, rest]) if len(context.pending) else rest
        context.length += len(token_ids)
        context.last_token = int(token_ids[-1])

    def prefill(self, session_ids: Collection[int]) -> None:
        """Compute contexts, many in a pass, until what is left of all fits the batched pass that follows."""
        left = max(1, MAX_PREFILL_ROWS // max(len(session_ids), 1))
        while chunks := self._chunks(session_ids, left):
            with self.taken(sum(map(len, chunks.values()))) as slots:
                shares = dict(zip(chunks, np.split(slots, np.cumsum([*map(len, chunks.values())])[:-1]), strict=True))
                packer = RowPacker()
                for session_id, chunk in chunks.items():
                    self._pack_tokens(packer, session_id, chunk, shares[session_id], judged=False)
                self.run(packer)
            for session_id, chunk in chunks.items():
                self.pool.append(session_id, chunk, shares[session_id])
                context = self.sessions[session_id]
                context.pending = context.pending[len(chunk) :]

    def _chunks(self, session_ids: Collection[int], left: int) -> dict[int, Int32Array]:
        """Return the pending tokens of the next pass of a prefill, after which so many a session may be left."""
        room, chunks = MAX_PREFILL_ROWS, {}
        for session_id in session_ids:
            pending = self.sessions[session_id].pending
            size = min(len(pending) - left, room)
            if size > 0:
                chunks[session_id] = pending[:size]
                room -= size
        return chunks

    def pack(self, packer: RowPacker, session_id: int, slots: Int32Array, *, judged: bool) -> None:
        """Begin a session's rows with its pending tokens, in these slots; if it has none and logits are wanted, with the
        last token again."""
        context = self.sessions[session_id]
        self._pack_tokens(packer, session_id, context.pending, slots, judged)
        if judged and not len(context.pending):
            slot = int(self.pool.table(session_id)[context.length - 1])
            packer.add_chain([context.last_token], [slot], context.length - 1, judged)

    def _pack_tokens(
        self, packer: RowPacker, session_id: int, token_ids: Int32Array, slots: Int32Array, judged: bool
    ) -> None:
        start = self.pool.length(session_id)
        packer.add_session(self.pool.stage(session_id, slots))
        if len(token_ids):
            packer.add_chain(token_ids.tolist(), slots.tolist(), start, judged)

    @contextmanager
    def taken(self, num_slots: int) -> Iterator[Int32Array]:
        """Take slots for a forward pass; if what is inside fails, they are given back, and it may be repeated."""
        slots = self.pool.take(num_slots)
        try:
            yield slots
        except BaseException:
            self.pool.give(slots)
            raise

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Raise EngineLostError if what is inside failed because the device is in error, whatever it said."""
        try:
            yield
        except Exception:
            check_alive(self._device)
            raise

    def run(self, packer: RowPacker) -> torch.Tensor:
        """Run the forward pass and return its logits."""
        return self._forward(packer.pack()).logits

    def settle(self, session_id: int, slots: Int32Array) -> None:
        """After the pass: what was pending has its KV in these slots."""
        context = self.sessions[session_id]
        if len(context.pending):
            self.pool.append(session_id, context.pending, slots)
            context.pending = NO_TOKENS

    def _embeddable(self, token_ids: Int32Array) -> Int32Array:
        """A target's padded vocabulary may be larger: what this model cannot embed only makes its guesses worse."""
        return np.minimum(token_ids, np.int32(self.info.vocab_size - 1))
