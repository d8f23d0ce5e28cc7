"""Which KV slot holds whose token: session tables, prefix sharing, eviction. Pure bookkeeping, no tensors.

A slot keeps one token's KV in every layer. At any time it is in exactly one place:

    free        on the free stack
    taken       handed out by `take` and not yet given back or appended (rows in flight, tree nodes)
    private     in the unfinished last block of one session
    in a block  16 consecutive tokens of some context, known by (previous block, its tokens) and counted by sessions

A session's table is the slots of its whole blocks, then its private ones; committing a token appends its slot, so no KV
is ever copied. Whole blocks are found again by later sessions with the same context, generated text included. A block
that no session uses stays in the cache until slots run short, least recently used first; a block is always released
after the blocks that follow it, so that order never drops a block before its followers.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from specq.protocol import EngineError, Int32Array

BLOCK = 16  # tokens
NO_BLOCK = -1  # the id before the first block of any context

_Key = tuple[int, bytes]  # (previous block's id, the block's token ids)


@dataclass(slots=True, eq=False)
class _Block:
    id: int
    key: _Key
    slots: Int32Array
    num_users: int = 1


@dataclass(slots=True, eq=False)
class _Session:
    token_ids: Int32Array = field(default_factory=lambda: np.zeros(4 * BLOCK, np.int32))
    table: Int32Array = field(default_factory=lambda: np.zeros(4 * BLOCK, np.int32))
    length: int = 0
    blocks: list[_Block] = field(default_factory=list)

    def reserve(self, length: int) -> None:
        """Make room for so many tokens; growth doubles."""
        if length > len(self.table):
            room = np.zeros(max(length - len(self.table), len(self.table)), np.int32)
            self.table = np.concatenate([self.table, room])
            self.token_ids = np.concatenate([self.token_ids, room])


class KvPool:
    """The slots 0 .. num_slots - 1 and the sessions that hold them."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # a stack; the top is at _num_free - 1
        self._num_free = num_slots
        self._sessions: dict[int, _Session] = {}
        self._blocks: dict[_Key, _Block] = {}
        self._unused: OrderedDict[int, _Block] = OrderedDict()  # blocks without users, least recently used first
        self._next_block_id = 0

    @property
    def free_slots(self) -> int:
        """Slots that `take` can hand out, unused cached blocks included."""
        return self._num_free + BLOCK * len(self._unused)

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._sessions

    def length(self, session_id: int) -> int:
        """Number of the session's tokens that have KV; EngineError if it is not open."""
        return self._session(session_id).length

    def table(self, session_id: int) -> Int32Array:
        """The session's slots in the order of positions; valid up to `length`, or as far as staged."""
        return self._session(session_id).table

    def open(self, session_id: int, token_ids: Int32Array) -> int:
        """Start a session and share the cached blocks of its context, but for the last token; return their tokens."""
        if session_id in self._sessions:
            raise EngineError(f"session {session_id} is open already")
        session = self._sessions[session_id] = _Session()
        session.reserve(len(token_ids))
        for start in range(0, len(token_ids) - BLOCK, BLOCK):
            block = self._blocks.get(_key(session.blocks, token_ids[start : start + BLOCK]))
            if block is None:
                break
            self._share(session, block)
            session.token_ids[start : start + BLOCK] = token_ids[start : start + BLOCK]
            session.length += BLOCK
        return session.length

    def close(self, session_id: int) -> None:
        """Forget a session: its private slots are free, its blocks cached; unknown sessions are ignored."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return
        self.give(session.table[len(session.blocks) * BLOCK : session.length])
        for block in reversed(session.blocks):
            block.num_users -= 1
            if block.num_users == 0:
                self._unused[block.id] = block

    def take(self, num_slots: int) -> Int32Array:
        """Hand out free slots, dropping cached blocks if need be; EngineError, with nothing changed, if short."""
        if num_slots > self.free_slots:
            raise EngineError(f"{num_slots} KV slots are needed and {self.free_slots} of {self.num_slots} are free")
        while self._num_free < num_slots:
            self._evict()
        self._num_free -= num_slots
        return self._free[self._num_free : self._num_free + num_slots][::-1].copy()

    def give(self, slots: Int32Array) -> None:
        """Take back slots that were handed out."""
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)

    def stage(self, session_id: int, slots: Int32Array) -> Int32Array:
        """Write taken slots into the table behind the session's end, for a forward pass; the length stays. Return the
        table."""
        session = self._session(session_id)
        end = session.length + len(slots)
        if end > len(session.table):
            session.reserve(end)
        session.table[session.length : end] = slots
        return session.table

    def append(self, session_id: int, token_ids: Int32Array, slots: Int32Array) -> None:
        """Commit tokens whose KV is in these taken slots, in the order of positions; blocks that fill become shared."""
        self.stage(session_id, slots)
        self.extend(session_id, token_ids)

    def extend(self, session_id: int, token_ids: Int32Array) -> None:
        """Commit tokens whose KV is in the slots that were staged last, the first of them; see `append`."""
        session = self._session(session_id)
        end = session.length + len(token_ids)
        session.token_ids[session.length : end] = token_ids
        session.length = end
        while end - len(session.blocks) * BLOCK >= BLOCK:
            self._fill_block(session)

    def _session(self, session_id: int) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise EngineError(f"session {session_id} is not open")
        return session

    def _fill_block(self, session: _Session) -> None:
        """Turn the first 16 private tokens into a block, or, if the same block is known, use that and free ours."""
        start = len(session.blocks) * BLOCK
        key = _key(session.blocks, session.token_ids[start : start + BLOCK])
        slots = session.table[start : start + BLOCK].copy()
        known = self._blocks.get(key)
        if known is not None:
            self._share(session, known)
            self.give(slots)
            return
        block = self._blocks[key] = _Block(self._next_block_id, key, slots)
        self._next_block_id += 1
        session.blocks.append(block)

    def _share(self, session: _Session, block: _Block) -> None:
        """Let the session use a known block as its next one."""
        start = len(session.blocks) * BLOCK
        session.table[start : start + BLOCK] = block.slots
        session.blocks.append(block)
        block.num_users += 1
        self._unused.pop(block.id, None)

    def _evict(self) -> None:
        """Drop the least recently used block that has no users."""
        _, block = self._unused.popitem(last=False)
        del self._blocks[block.key]
        self.give(block.slots)


def _key(previous: list[_Block], token_ids: Int32Array) -> _Key:
    return (previous[-1].id if previous else NO_BLOCK, token_ids.tobytes())
