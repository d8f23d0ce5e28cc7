"""Which KV slot holds which token: session tables, prefix sharing, eviction. Pure bookkeeping, no tensors.

A slot keeps one token's KV in every layer. At any time it is in exactly one of these places:

- free: on the free stack.
- taken: handed out by `take`, neither given back nor appended yet (rows in flight, tree nodes).
- private: in the unfinished last block of one session, or in an earlier block before `fill_blocks` runs.
- in a block: 16 consecutive tokens of some context. The key of a block is (previous block, its tokens), and its users
  are counted. The key of a context's first block is (owner, its tokens). So owners share no blocks.

A session's table is the slots of its whole blocks, then its private slots. Committing a token appends its slot, so that
copies no KV. Later sessions with the same context find whole blocks again, including blocks of generated text. A
context may agree only with the beginning of a block. The KV of that part can be copied to private slots (`copies`).

A block without users stays in the cache until slots run short. The least recently used block is dropped first. A block
is always released after its followers. So it is also dropped after them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specq.engines.native.slot_tables import SlotTables, TableMemory
from specq.protocol import EngineError, Int32Array, IntpArray

BLOCK = 16  # tokens
LEAST_COPIED = 4  # tokens; fewer are computed quickly
NO_COPIES = np.zeros((2, 0), np.int32)

_Previous = int | str  # a block's id, or the owner before the first block of a context
_Key = tuple[_Previous, bytes]  # (what comes before the block, the block's token ids)


@dataclass(slots=True, eq=False)
class _Block:
    id: int
    key: _Key
    slots: Int32Array
    num_users: int = 1


class KvPool:
    """The slots 0 .. num_slots - 1 and the sessions that hold them.

    `may_copy`: the caller copies KV as `copies` returns.
    """

    def __init__(self, num_slots: int, *, may_copy: bool = False) -> None:
        self.num_slots, self._may_copy = num_slots, may_copy
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # a stack; the top is at _num_free - 1
        self._num_free = num_slots
        self._places: dict[int, int] = {}  # session -> its place among the open sessions
        self._tables = TableMemory()
        self._blocks_of: list[list[_Block]] = []  # by place
        self._owners: list[str] = []  # by place
        self._blocks: dict[_Key, _Block] = {}
        self._unused: OrderedDict[int, _Block] = OrderedDict()  # blocks without users, least recently used first
        self._next_block_id = 0
        # The newest block after another block, or an owner's first block. The key is what comes before, and its first
        # token.
        self._beginning: dict[tuple[_Previous, int], _Block] = {}
        self._copies: dict[int, tuple[Int32Array, Int32Array]] = {}  # by session: source slots, target slots
        self._unfilled: list[int] = []  # places of sessions that may have whole blocks among their private slots

    @property
    def free_slots(self) -> int:
        """Slots that `take` can hand out, including unused cached blocks."""
        self.fill_blocks()
        return self._num_free + BLOCK * len(self._unused)

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._places

    def length(self, session_id: int) -> int:
        """Return the number of the session's tokens that have KV. Raises EngineError if it is not open."""
        return int(self._tables.lengths[self._place(session_id)])

    def table(self, session_id: int) -> Int32Array:
        """Return the session's slots in the order of positions, valid up to `length` or the staged end."""
        return self.tables(np.array([self._place(session_id)]))[0]

    def token_ids(self, session_id: int) -> Int32Array:
        """Return the session's tokens that have KV, in the order of positions. Valid until the next change."""
        place = self._place(session_id)
        first = int(self._tables.offsets[place])
        return self._tables.token_ids[first : first + int(self._tables.lengths[place])]

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """Start a session and share the owner's cached context blocks, without the last token.

        Returns the number of tokens with shared KV or with KV that will be copied.
        """
        if session_id in self._places:
            raise EngineError(f"session {session_id} is already open")
        self.fill_blocks()
        place = self._places[session_id] = self._tables.open(len(token_ids))
        if place == len(self._blocks_of):
            self._blocks_of.append([])
            self._owners.append("")
        self._owners[place] = owner
        memory = self._tables
        for start in range(0, len(token_ids) - BLOCK, BLOCK):
            block = self._blocks.get(self._key(place, token_ids[start : start + BLOCK]))
            if block is None:
                break
            self._share(place, block)
            first = memory.offsets[place] + start
            memory.token_ids[first : first + BLOCK] = token_ids[start : start + BLOCK]
            memory.lengths[place] += BLOCK
        if self._may_copy:
            self._copy_beginning(session_id, place, token_ids[memory.lengths[place] : -1])
        return int(memory.lengths[place])

    def _copy_beginning(self, session_id: int, place: int, token_ids: Int32Array) -> None:
        """Plan copies of KV for the next tokens of a session that a cached block begins with."""
        memory = self._tables
        block = self._beginning.get((self._previous(place), int(token_ids[0]))) if len(token_ids) else None
        if block is None:
            return
        own = np.frombuffer(block.key[1], np.int32)[: len(token_ids)]
        is_other = own != token_ids[: len(own)]
        count = int(is_other.argmax()) if is_other.any() else len(own)
        block.num_users += 1
        self._unused.pop(block.id, None)  # it must not be dropped for the copy's slots
        if count >= LEAST_COPIED and (count <= self._num_free or count <= self.free_slots):
            slots = self.take(count)
            first = memory.offsets[place] + memory.lengths[place]
            memory.slots[first : first + count], memory.token_ids[first : first + count] = slots, token_ids[:count]
            memory.lengths[place] += count
            self._copies[session_id] = block.slots[:count], slots  # after its blocks
        self._release([block])

    def copies(self) -> Int32Array:
        """Return which slots' KV must be copied, i32[2, n]: sources and targets.

        The copy must happen before a forward pass begins. All sources must be read before a target is written. Slots
        may have been reassigned.
        """
        if not self._copies:
            return NO_COPIES
        return np.concatenate([np.stack(pair) for pair in self._copies.values()], axis=1)

    def note_copied(self) -> None:
        """Forget the pending copies, because they are done."""
        self._copies.clear()

    def close(self, session_id: int) -> None:
        """Forget a session. Its private slots become free, its blocks stay cached. Unknown sessions are ignored."""
        place = self._places.pop(session_id, None)
        if place is None:
            return
        self._copies.pop(session_id, None)
        self.fill_blocks()
        blocks, memory = self._blocks_of[place], self._tables
        first = memory.offsets[place]
        self.give(memory.slots[first + len(blocks) * BLOCK : first + memory.lengths[place]])
        self._release(blocks)
        blocks.clear()
        memory.close(place)

    def take(self, num_slots: int) -> Int32Array:
        """Hand out free slots, dropping cached blocks if needed. Raises EngineError, with no change, if short."""
        if num_slots > self._num_free and num_slots > self.free_slots:
            raise EngineError(f"{num_slots} KV slots are needed and {self.free_slots} of {self.num_slots} are free")
        while self._num_free < num_slots:
            self._evict()
        self._num_free -= num_slots
        return self._free[self._num_free : self._num_free + num_slots][::-1].copy()

    def give(self, slots: Int32Array) -> None:
        """Take back slots that were handed out."""
        self._free[self._num_free : self._num_free + len(slots)] = slots[::-1]
        self._num_free += len(slots)

    # --- one session ------------------------------------------------------------------------------------------------

    def stage(self, session_id: int, slots: Int32Array) -> Int32Array:
        """Write taken slots into the table after the session's end, for a forward pass. Return the table.

        The length does not change.
        """
        places = np.array([self._place(session_id)])
        self.stage_all(places, np.array([len(slots)]), slots)
        return self.tables(places)[0]

    def append(self, session_id: int, token_ids: Int32Array, slots: Int32Array) -> None:
        """Commit tokens whose KV is in these taken slots, in the order of positions. Full blocks become shared."""
        self.append_all(np.array([self._place(session_id)]), np.array([len(slots)]), token_ids, slots)

    def rewind(self, session_id: int, length: int) -> int:
        """Forget a session's tokens beyond `length`; return how many tokens keep their slots.

        These are fewer than `length` if the cut is inside a block. The block then stays whole in the cache. Tokens that
        lose their slots stay known, if tokens without slots can be known.
        """
        place = self._place(session_id)
        self.fill_blocks()
        blocks, memory = self._blocks_of[place], self._tables
        memory.known[place] = min(int(memory.known[place]), length)
        end, num_private = int(memory.lengths[place]), int(memory.lengths[place]) - len(blocks) * BLOCK
        if length >= end:
            return end
        dropped = blocks[length // BLOCK :]
        kept = length if not dropped else length // BLOCK * BLOCK
        if session_id in self._copies:
            num_copied = max(kept - (end - num_private), 0)
            sources, targets = self._copies[session_id]
            self._copies[session_id] = sources[:num_copied], targets[:num_copied]
        first = int(memory.offsets[place])
        self.give(memory.slots[first + max(kept, end - num_private) : first + end])
        del blocks[length // BLOCK :]
        self._release(dropped)
        memory.lengths[place] = kept
        return kept

    # --- many sessions ----------------------------------------------------------------------------------------------

    def places(self, session_ids: Iterable[int]) -> IntpArray:
        """Return the places of open sessions, i64[sessions], for the functions below.

        Raises EngineError if a session is not open.
        """
        known = self._places
        try:
            return np.array([known[session_id] for session_id in session_ids], np.intp)
        except KeyError as error:
            raise EngineError(f"session {error} is not open") from None

    def lengths(self, places: IntpArray) -> IntpArray:
        """Return the `length` of sessions, i64[sessions], after the steps in flight succeed."""
        return self._tables.ends(places)

    def hold(self, places: IntpArray, counts: IntpArray) -> None:
        """Keep the last staged tokens, `counts` of each session, until `release`. Later tokens come after them."""
        self._tables.ahead[places] += counts
        self._tables.num_ahead += int(counts.sum())

    def release(self, places: IntpArray, counts: IntpArray) -> None:
        """Undo `hold`, for sessions that have not been closed since."""
        self._tables.ahead[places] -= counts
        self._tables.num_ahead -= int(counts.sum())

    def known(self, places: IntpArray) -> IntpArray:
        """Return how many tokens of sessions are known, i64[sessions], including tokens without slots."""
        known: IntpArray = self._tables.known[places]
        return known

    def tell(self, places: IntpArray, counts: IntpArray, token_ids: Int32Array) -> None:
        """Add known tokens without slots, `counts` of each session, after all that are known.

        At a session's first call, the tokens that already have slots are passed again.
        """
        memory = self._tables
        at = memory.at(places, memory.known[places], counts)  # which may move the tables
        memory.token_ids[at] = token_ids
        memory.known[places] += counts

    def told(self, places: IntpArray, starts: IntpArray, counts: IntpArray) -> Int32Array:
        """Return known tokens of sessions, `counts` of each from `starts` on, i32[sum of counts]."""
        at = self._tables.at(places, starts, counts)
        found: Int32Array = self._tables.token_ids[at]
        return found

    def staged_tokens(self, staged: IntpArray) -> Int32Array:
        """Return the known tokens at the positions where `stage_all` has put slots, i32[staged]."""
        found: Int32Array = self._tables.token_ids[staged]
        return found

    def slots(self, places: IntpArray, positions: IntpArray) -> Int32Array:
        """Return the slot of one position of each session, i32[sessions]."""
        found: Int32Array = self._tables.slots[self._tables.offsets[places] + positions]
        return found

    def tables(self, places: IntpArray) -> SlotTables:
        """Return `table` of sessions."""
        memory = self._tables
        return SlotTables(memory.slots, memory.offsets[places], memory.rooms[places])

    def stage_all(self, places: IntpArray, counts: IntpArray, slots: Int32Array) -> IntpArray:
        """Write taken slots after the sessions' ends, `counts` of each; return the argument of `extend_all`.

        See `stage`.
        """
        at = self._tables.behind(places, counts)  # this may move the tables
        self._tables.slots[at] = slots
        return at

    def append_all(self, places: IntpArray, counts: IntpArray, token_ids: Int32Array, slots: Int32Array) -> None:
        """Commit tokens, `counts` of each session, whose KV is in these taken slots; see `append`."""
        self.extend_all(places, counts, self.stage_all(places, counts, slots), token_ids)

    def extend_all(
        self, places: IntpArray, counts: IntpArray, staged: IntpArray, token_ids: Int32Array, *, fills: bool = True
    ) -> None:
        """Commit tokens, `counts` of each session, whose slots were staged last; see `append`.

        Without `fills`, full blocks become shared later: at the next call that fills blocks or needs them.
        """
        memory = self._tables
        memory.token_ids[staged] = token_ids
        ends = memory.lengths[places] + counts
        memory.lengths[places] = ends
        is_full = ends % BLOCK < counts  # sessions that have reached or passed the end of a block
        if np.count_nonzero(is_full):
            self._unfilled += places[is_full].tolist()
        if fills:
            self.fill_blocks()

    def fill_blocks(self) -> None:
        """Turn whole blocks of private tokens into shared ones."""
        unfilled, self._unfilled = self._unfilled, []
        for place in unfilled:
            end = int(self._tables.lengths[place])
            while end - len(self._blocks_of[place]) * BLOCK >= BLOCK:
                self._fill_block(place)

    def _place(self, session_id: int) -> int:
        place = self._places.get(session_id)
        if place is None:
            raise EngineError(f"session {session_id} is not open")
        return place

    def _fill_block(self, place: int) -> None:
        """Turn the first 16 private tokens into a block. If the same block exists, use it and free ours."""
        blocks, memory = self._blocks_of[place], self._tables
        start = int(memory.offsets[place]) + len(blocks) * BLOCK
        key = self._key(place, memory.token_ids[start : start + BLOCK])
        slots = memory.slots[start : start + BLOCK].copy()
        known = self._blocks.get(key)
        if known is not None:
            self._share(place, known)
            self.give(slots)
            return
        block = self._blocks[key] = _Block(self._next_block_id, key, slots)
        self._next_block_id += 1
        if self._may_copy:
            self._beginning[key[0], int(memory.token_ids[start])] = block
        blocks.append(block)

    def _share(self, place: int, block: _Block) -> None:
        """Make a known block the session's next one."""
        blocks, memory = self._blocks_of[place], self._tables
        start = memory.offsets[place] + len(blocks) * BLOCK
        memory.slots[start : start + BLOCK] = block.slots
        blocks.append(block)
        block.num_users += 1
        self._unused.pop(block.id, None)

    def _release(self, blocks: Sequence[_Block]) -> None:
        """Remove one user from consecutive blocks. Blocks without users stay in the cache."""
        for block in reversed(blocks):
            block.num_users -= 1
            if block.num_users == 0:
                self._unused[block.id] = block

    def _evict(self) -> None:
        """Drop the least recently used block without users."""
        _, block = self._unused.popitem(last=False)
        del self._blocks[block.key]
        beginning = block.key[0], int.from_bytes(block.key[1][:4], sys.byteorder)
        if self._beginning.get(beginning) is block:
            del self._beginning[beginning]
        self.give(block.slots)

    def _key(self, place: int, token_ids: Int32Array) -> _Key:
        """Return the key of a session's next block with these tokens."""
        return self._previous(place), token_ids.tobytes()

    def _previous(self, place: int) -> _Previous:
        """Return what comes before the next block of a session."""
        blocks = self._blocks_of[place]
        return blocks[-1].id if blocks else self._owners[place]
