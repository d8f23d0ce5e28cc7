"""The slot pool against a simple model: no leak, no double use, and every table says what its session holds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specq.engines.native.kv_pool import BLOCK, LEAST_COPIED, KvPool
from specq.protocol.arrays import Int32Array
from specq.protocol.errors import EngineError


def tokens(*values: int) -> Int32Array:
    return np.array(values, np.int32)


def span(first: int, end: int) -> Int32Array:
    return np.arange(first, end, dtype=np.int32)


def fill(pool: KvPool, session_id: int, token_ids: Int32Array) -> Int32Array:
    """Open a session and append what is not cached, as a prefill does; return the slots taken."""
    num_cached = pool.open(session_id, token_ids)
    slots = pool.take(len(token_ids) - num_cached)
    pool.append(session_id, token_ids[num_cached:], slots)
    return slots


def table(pool: KvPool, session_id: int) -> list[int]:
    return pool.table(session_id)[: pool.length(session_id)].tolist()


def test_appended_slots_make_the_table_and_come_back_at_close():
    pool = KvPool(64)
    slots = fill(pool, 1, tokens(5, 6, 7))
    assert slots.tolist() == table(pool, 1)
    assert pool.free_slots == 61
    pool.close(1)
    assert pool.free_slots == 64


def test_first_slots_are_consecutive():
    """Neighbouring tokens in neighbouring slots are what caches like."""
    assert list(range(20)) == KvPool(64).take(20).tolist()


def test_a_prefix_is_shared_in_whole_blocks_and_leaves_the_last_token():
    pool = KvPool(256)
    text = span(0, 40)
    fill(pool, 1, text)
    assert pool.open(2, text) == 2 * BLOCK
    assert table(pool, 2) == table(pool, 1)[: 2 * BLOCK]
    assert pool.open(3, text[: 2 * BLOCK]) == BLOCK  # all 32 are cached, but the last must be computed for its logits
    assert pool.open(4, text[: 2 * BLOCK + 1]) == 2 * BLOCK
    assert pool.free_slots == 256 - 40


def test_the_beginning_of_a_block_is_copied_as_far_as_a_context_goes_on_so():
    pool = KvPool(256, may_copy=True)
    text = span(0, 3 * BLOCK + 5)
    fill(pool, 1, text)
    other = np.concatenate([text[: BLOCK + 9], tokens(99, 98, 97)])
    assert pool.open(2, other) == BLOCK + 9
    sources, targets = pool.copies().tolist()
    assert sources == table(pool, 1)[BLOCK : BLOCK + 9]
    assert table(pool, 2) == table(pool, 1)[:BLOCK] + targets
    assert pool.copies().tolist() == [sources, targets]  # until they were made
    pool.note_copied()
    assert not pool.copies().size
    assert pool.open(3, text[: 2 * BLOCK]) == 2 * BLOCK - 1  # the last token is computed for its logits
    assert pool.open(4, text) == 3 * BLOCK  # what is in no whole block is not found
    pool.close(3)
    assert not pool.copies().size  # no owner
    few = LEAST_COPIED - 1
    assert pool.open(5, np.concatenate([text[: BLOCK + few], tokens(99, 98)])) == BLOCK  # they are computed
    pool.close(5)
    free = pool.free_slots
    pool.close(2)
    assert pool.free_slots == free + 9


def test_the_block_that_is_copied_is_not_dropped_for_the_copy():
    pool = KvPool(3 * BLOCK, may_copy=True)
    fill(pool, 1, span(0, BLOCK))
    fill(pool, 2, span(100, 100 + BLOCK))
    pool.close(1)
    pool.close(2)
    slots = pool.take(BLOCK)  # nothing is free now; the first block was used least recently
    assert pool.open(3, tokens(0, 1, 2, 3, 50)) == 4
    sources, targets = pool.copies().tolist()
    pool.give(slots)
    assert not set(sources) & set(targets)
    assert pool.open(4, tokens(*range(BLOCK), 7)) == BLOCK
    assert pool.open(5, tokens(*range(100, 100 + BLOCK), 7)) == 0


def test_equal_blocks_after_different_beginnings_are_different():
    pool = KvPool(256)
    fill(pool, 1, np.concatenate([np.full(BLOCK, 1, np.int32), np.full(BLOCK, 9, np.int32)]))
    assert pool.open(2, np.concatenate([np.full(BLOCK, 2, np.int32), np.full(BLOCK + 1, 9, np.int32)])) == 0


def test_what_was_generated_is_found_after_close():
    pool = KvPool(256)
    fill(pool, 1, span(0, 10))
    pool.append(1, span(10, 40), pool.take(30))
    before = table(pool, 1)
    pool.close(1)
    assert pool.free_slots == 256
    assert pool.open(2, span(0, 41)) == 2 * BLOCK
    assert table(pool, 2) == before[: 2 * BLOCK]


def test_the_same_block_made_twice_is_kept_once():
    pool = KvPool(256)
    text = span(0, 20)
    assert pool.open(1, text) == pool.open(2, text) == 0
    for session_id in (1, 2):
        pool.append(session_id, text, pool.take(20))
    assert table(pool, 1)[:BLOCK] == table(pool, 2)[:BLOCK]
    assert pool.free_slots == 256 - BLOCK - 2 * 4


def test_the_least_recently_used_prefix_is_evicted_and_its_end_first():
    pool = KvPool(6 * BLOCK)
    old, new = span(0, 2 * BLOCK + 1), span(100, 100 + 2 * BLOCK + 1)
    for session_id, text in ((1, old), (2, new), (3, old)):  # the old prefix is used once more
        fill(pool, session_id, text)
        pool.close(session_id)
    pool.give(pool.take(3 * BLOCK))  # 2 blocks were free: one cached block goes
    assert pool.open(4, new) == BLOCK
    assert pool.open(5, old) == 2 * BLOCK


def test_shared_blocks_in_use_are_never_evicted():
    pool = KvPool(3 * BLOCK)
    text = span(0, 2 * BLOCK + 1)
    fill(pool, 1, text)
    pool.open(2, text)
    pool.close(1)
    assert pool.free_slots == BLOCK
    with pytest.raises(EngineError, match="17 KV slots are needed and 16 of 48 are free"):
        pool.take(BLOCK + 1)
    assert pool.free_slots == BLOCK


def test_an_open_session_cannot_be_opened_and_a_closed_one_has_no_table():
    pool = KvPool(32)
    pool.open(1, tokens(1, 2))
    with pytest.raises(EngineError, match="session 1 is already open"):
        pool.open(1, tokens(1, 2))
    pool.close(1)
    pool.close(1)
    with pytest.raises(EngineError, match="session 1 is not open"):
        pool.length(1)


NUM_SLOTS = 12 * BLOCK


class PoolMachine(RuleBasedStateMachine):
    """Random schedules. The model: what each session holds, what is in flight, and whose KV each slot contains.

    `contents` says for whom, and for which context (all tokens up to its own), a slot's KV was computed. Sharing is
    right if and only if every slot of every table contains its owner's, and the session's own context.
    """

    COPIES = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvPool(NUM_SLOTS, may_copy=self.COPIES)
        self.texts: dict[int, list[int]] = {}  # committed tokens of each open session that have KV
        self.flight: dict[int, list[tuple[int, int]]] = {}  # session -> (token, slot) of drafted nodes, a chain
        self.owners: dict[int, str] = {}  # of all sessions
        self.contents: dict[int, tuple[str | int, ...]] = {}
        self.next_id = 0

    @rule(prefix=st.integers(0, 2), length=st.integers(1, 4 * BLOCK), owner=st.sampled_from(["", "ann"]))
    def open(self, prefix: int, length: int, owner: str) -> None:
        """Few different texts, so that prefixes coincide."""
        text = [prefix * 1000 + i // (BLOCK * 2) for i in range(length)]
        session_id, self.next_id = self.next_id, self.next_id + 1
        self.owners[session_id] = owner
        num_cached = self.pool.open(session_id, np.array(text, np.int32), owner)
        assert num_cached <= length - 1
        self.texts[session_id] = text[:num_cached]
        self._append(session_id, text[num_cached:])

    def _append(self, session_id: int, new: list[int]) -> None:
        if len(new) > self.pool.free_slots:
            with pytest.raises(EngineError):
                self.pool.take(len(new))
            return
        slots = self.pool.take(len(new))
        self._compute(session_id, new, slots.tolist())
        self.pool.append(session_id, np.array(new, np.int32), slots)
        self.texts[session_id] += new

    def _compute(self, session_id: int, new: list[int], slots: list[int]) -> None:
        self.contents = self._copied(self.pool.copies())
        self.pool.note_copied()
        context = [self.owners[session_id], *self.texts[session_id]]
        for token, slot in zip(new, slots, strict=True):
            context.append(token)
            self.contents[slot] = tuple(context)

    def _copied(self, copies: Int32Array) -> dict[int, tuple[str | int, ...]]:
        """Return what slots contain when KV was copied."""
        sources, targets = copies.tolist()
        assert len(set(targets)) == len(targets)
        return self.contents | {to: self.contents[source] for source, to in zip(sources, targets, strict=True)}

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), drafts=st.lists(st.integers(0, 1), max_size=2 * BLOCK))
    def draft(self, data: st.DataObject, drafts: list[int]) -> None:
        session_id = data.draw(st.sampled_from(sorted(self.texts)))
        if session_id in self.flight or len(drafts) > self.pool.free_slots:
            return
        slots = self.pool.take(len(drafts)).tolist()
        self._compute(session_id, drafts, slots)
        self.flight[session_id] = list(zip(drafts, slots, strict=True))

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        session_id = data.draw(st.sampled_from(sorted(self.flight)))
        nodes = self.flight.pop(session_id)
        num_accepted = data.draw(st.integers(0, len(nodes)))
        accepted, rejected = nodes[:num_accepted], nodes[num_accepted:]
        new, slots = [token for token, _ in accepted], [slot for _, slot in accepted]
        self._extend(session_id, new, slots, fills=data.draw(st.booleans()))
        self.texts[session_id] += new
        self.pool.give(np.array([slot for _, slot in rejected], np.int32))

    def _extend(self, session_id: int, new: list[int], slots: list[int], *, fills: bool) -> None:
        """Append, and let blocks become shared at once or later."""
        places, counts = self.pool.places([session_id]), np.array([len(new)])
        staged = self.pool.stage_all(places, counts, np.array(slots, np.int32))
        self.pool.extend_all(places, counts, staged, np.array(new, np.int32), fills=fills)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """Forget the end of a context; of a block that is cut, all of it."""
        session_id = data.draw(st.sampled_from(sorted(self.texts)))
        self.pool.give(np.array([slot for _, slot in self.flight.pop(session_id, [])], np.int32))
        length = data.draw(st.integers(0, len(self.texts[session_id])))
        kept = self.pool.rewind(session_id, length)
        assert length - BLOCK < kept <= length
        del self.texts[session_id][kept:]
        assert self.pool.token_ids(session_id).tolist() == self.texts[session_id]

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        session_id = data.draw(st.sampled_from(sorted(self.texts)))
        self.pool.give(np.array([slot for _, slot in self.flight.pop(session_id, [])], np.int32))
        self.pool.close(session_id)
        del self.texts[session_id]

    @invariant()
    def tables_hold_their_own_contexts(self) -> None:
        contents = self._copied(self.pool.copies())
        for session_id, text in self.texts.items():
            assert self.pool.length(session_id) == len(text)
            for i, slot in enumerate(table(self.pool, session_id)):
                assert contents[slot] == (self.owners[session_id], *text[: i + 1])

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        free = self.pool._free[: self.pool._num_free].tolist()
        in_blocks = [slot for block in self.pool._blocks.values() for slot in block.slots.tolist()]
        in_flight = [slot for nodes in self.flight.values() for _, slot in nodes]
        private = [slot for i in self.texts for slot in table(self.pool, i)[self._num_in_blocks(i) :]]
        counts = Counter(free + in_blocks + in_flight + private)
        assert counts == Counter(range(NUM_SLOTS))

    def _num_in_blocks(self, session_id: int) -> int:
        [place] = self.pool.places([session_id]).tolist()
        return BLOCK * len(self.pool._blocks_of[place])

    @rule()
    def free_slots_counts_what_no_session_holds(self) -> None:
        free = self.pool.free_slots  # which looks for blocks first
        used = {slot for i in self.texts for slot in table(self.pool, i)}
        used |= {slot for nodes in self.flight.values() for _, slot in nodes}
        assert free == NUM_SLOTS - len(used)


class CopyingMachine(PoolMachine):
    """The same where beginnings of blocks are copied."""

    COPIES = True


TestPoolMachine, TestCopyingMachine = PoolMachine.TestCase, CopyingMachine.TestCase
TestPoolMachine.settings = TestCopyingMachine.settings = settings(max_examples=60, stateful_step_count=40)
