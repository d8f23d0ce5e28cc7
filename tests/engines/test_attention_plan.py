"""The sum that the work items compute for each row, as an expression; and packed rows made in two ways."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
import torch

from specq.engines.native import rows as packing
from specq.engines.native.compiler import kernels
from specq.engines.native.rows import PackedRows, pack_steps
from specq.engines.torch.cuda.attention_plan import (
    ITEM,
    UNIT,
    BlockLayout,
    _starts,
    lay_out,
    line_places,
    max_list_length,
    piece_size,
)
from specq.engines.torch.forward import FedLines
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, SessionStep, Tree
from specq.testing.checkpoints import random_tokens, random_tree
from specq.testing.growth import lines_of
from specq.verification import StepBatch
from specq.verifier.sources.unread import UnreadLayout

GREEDY = SamplingParams()

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")


def random_step(rng: np.random.Generator, session_id: int, max_context: int) -> SessionStep:
    """A prefill chunk, a plain row or a tree, after a context of any length."""
    start = int(rng.integers(0, max_context))
    kind = rng.integers(3)
    tokens = random_tokens(rng, int(rng.integers(1, 70)) if kind == 0 else 1)
    tree = random_tree(rng, int(rng.integers(1, 40))) if kind == 2 else NO_TREE
    return SessionStep(session_id, start, tokens, GREEDY, tree, judged=bool(kind == 2 or rng.random() < 0.5))


def random_rows(
    rng: np.random.Generator, num_sessions: int, max_context: int = 900
) -> tuple[list[SessionStep], PackedRows]:
    """Steps of some sessions whose slots are all different, packed."""
    steps = [random_step(rng, i, max_context) for i in range(num_sessions)]
    free = rng.permutation(1 << 16).astype(np.int32)
    num_rows = sum(step.num_rows for step in steps)
    slots, taken, first, tables = free[:num_rows], num_rows, 0, []
    for step in steps:
        table = np.concatenate([free[taken : taken + step.start], slots[first : first + len(step.token_ids)]])
        taken += step.start
        first += step.num_rows
        tables.append(table.astype(np.int32))
    return steps, pack_steps(steps, slots, tables)


def seen_slots(rows: PackedRows, row: int) -> list[int]:
    """Return what a row sees, as `PackedRows` says it."""
    session = int(np.searchsorted(rows.row_starts, row, "right")) - 1
    extras = rows.extras[rows.extra_starts[row] : rows.extra_starts[row + 1]]
    return [*rows.tables[session][: rows.ctx_lens[row]].tolist(), *extras.tolist()]


class Piece(NamedTuple):
    """The sum over a piece: for each block of UNIT positions its first one, and the slots that a row sees."""

    blocks: tuple[tuple[int, tuple[int, ...]], ...]


class Fold(NamedTuple):
    """A sum of two partial results."""

    before: Fold | Piece
    after: Fold | Piece


Sum = Fold | Piece | None  # None: of nothing, which changes no other sum


def fold(before: Sum, after: Sum) -> Sum:
    return after if before is None else before if after is None else Fold(before, after)


def slots_of(value: Sum) -> list[int]:
    """Return the slots that a sum reads, in its order."""
    if isinstance(value, Fold):
        return slots_of(value.before) + slots_of(value.after)
    return [] if value is None else [slot for _, block in value.blocks for slot in block]


def expected_sum(slots: Sequence[int]) -> Sum:
    """Return the sum over a row's list as the plan defines it: pieces from the first to the last."""
    found: Sum = None
    start = 0
    while start < len(slots):
        stop = min(start + piece_size(start), len(slots))
        blocks = tuple((first, tuple(slots[first : min(first + UNIT, stop)])) for first in range(start, stop, UNIT))
        found, start = fold(found, Piece(blocks)), stop
    return found


class Block:
    """A laid-out block, computed as the kernels do."""

    def __init__(self, block: np.ndarray, layout: BlockLayout) -> None:
        starts = layout.starts()
        names, ends = list(starts), [*list(starts.values())[1:], len(block)]
        self.parts = {name: block[starts[name] : end].tolist() for name, end in zip(names, ends, strict=True)}
        flat = self.parts["items"][: ITEM * self.parts["num_items"][0]]
        self.items = [flat[i : i + ITEM] for i in range(0, len(flat), ITEM)]
        self.spans = np.reshape(self.parts["spans"], (-1, 2)).tolist()

    @staticmethod
    def of(rows: PackedRows, layout: BlockLayout) -> Block:
        block = np.full(layout.starts()["lists"] + max_list_length(rows), -7, np.int32)
        assert lay_out(rows, layout, block) <= len(block)
        return Block(block, layout)

    def seen(self, item: Sequence[int], row: int, start: int, stop: int) -> tuple[int, ...]:
        """Return the slots at positions of an item, as far as a row sees them."""
        _, _, _, end, table, split, extras, _ = item
        stop, lists = min(stop, end, self.parts["lengths"][row]), self.parts["lists"]
        of_branch = lists[extras + max(start - split, 0) : extras + max(stop - split, 0)]
        return (*lists[table + start : table + min(stop, split)], *of_branch)

    def attend(self, item: Sequence[int], row: int) -> Sum:
        """Return the result that an item writes for a row."""
        _, _, start, end, *_ = item
        whole: Sum = None
        blocks: list[tuple[int, tuple[int, ...]]] = []
        for first in range(start, end, UNIT):
            blocks += [(first, seen)] if (seen := self.seen(item, row, first, first + UNIT)) else []
            if (stop := first + UNIT) % piece_size(stop - 1) == 0 or stop >= end:
                whole = fold(whole, Piece(tuple(blocks)) if blocks else None)
                blocks = []
        return whole

    def sums(self, num_rows: int) -> list[Sum]:
        """Return what each row gets. Each place of a partial is written once, and each result."""
        partials: dict[int, Sum] = {}
        results: dict[int, Sum] = {}
        for item in self.items:
            for row in range(item[0], item[0] + item[1]):
                place, where = (row, results) if item[-1] < 0 else (self.spans[row][0] + item[-1], partials)
                assert place not in where
                where[place] = self.attend(item, row)
        for row, (first, count) in enumerate(self.spans[:num_rows]):
            assert (row in results) == (count == 0)
            if count:
                results[row] = reduce(fold, (partials.pop(first + k) for k in range(count)))
        assert not partials
        return [results[row] for row in range(num_rows)]


LAYOUTS = [(1, 4), (2, 32), (9, 32), (64, 16), (9, 2), (9, 999), (64, 1)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("per_block", "num_chunks"), LAYOUTS)
def test_a_rows_sum_depends_on_its_list_alone(seed, per_block, num_chunks):
    """Items show each row what it sees exactly once, and add it up as the definition does."""
    rng = np.random.default_rng(seed)
    _, rows = random_rows(rng, int(rng.integers(1, 9)), max_context=(400, 900, 2500)[seed % 3])
    layout = BlockLayout(rows.num_rows + int(rng.integers(0, 9)), per_block, num_chunks)
    found = Block.of(rows, layout)
    num_padding = layout.num_rows - rows.num_rows
    assert found.parts["logit_rows"] == [*rows.logit_rows.tolist(), *[0] * (layout.num_rows - len(rows.logit_rows))]
    assert found.parts["slots"] == [*rows.slots.tolist(), *[-1] * num_padding]
    assert found.spans[rows.num_rows :] == [[0, 0]] * num_padding
    assert len(found.items) <= layout.max_items
    assert sum(count for _, count in found.spans) <= layout.max_partials
    assert all(1 <= count <= per_block and start % piece_size(start) == 0 for _, count, start, *_ in found.items)
    for row, own in enumerate(found.sums(rows.num_rows)):
        seen = seen_slots(rows, row)
        assert slots_of(own) == seen
        assert own == expected_sum(seen)


@pytest.mark.parametrize("length", [1, 64, 65, 1024, 1025, 4000, 4097, 20_000, 70_000])
def test_a_row_alone_is_added_up_as_defined(length):
    slots = np.arange(length, dtype=np.int32)[::-1].copy()
    rows = pack_steps([SessionStep(1, length - 1, NODE[:1], GREEDY)], slots[-1:], [slots])
    for num_chunks in (1, 3, 7, 32, 999):
        (found,) = Block.of(rows, BlockLayout(16, 2, num_chunks)).sums(1)
        assert found == expected_sum(slots.tolist())


@pytest.mark.parametrize(("name", "least"), [("max_partials", 3), ("max_items", 2)])
def test_with_less_room_items_are_longer(monkeypatch, name, least):
    """The room, per row at least as much as the plan asks for, is kept to, and the sums do not change."""
    _, rows = random_rows(np.random.default_rng(5), 9, max_context=2000)
    expected = [expected_sum(seen_slots(rows, row)) for row in range(rows.num_rows)]
    layout, used = BlockLayout(rows.num_rows, 9, 999), []
    for room in range(least * rows.num_rows, least * rows.num_rows + 800, 100):
        monkeypatch.setattr(BlockLayout, name, room)
        _starts.cache_clear()
        found = Block.of(rows, layout)
        used.append(len(found.items) if name == "max_items" else sum(count for _, count in found.spans))
        assert used[-1] <= room
        assert found.sums(rows.num_rows) == expected
    _starts.cache_clear()
    assert used == sorted(used)
    assert used[0] < used[-1]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("per_block", "num_chunks"), [(4, 4), (9, 32), (64, 2)])
def test_lines_that_the_device_alone_knows_are_put_in_place(seed, per_block, num_chunks):
    """Trees are laid out with another parent for each node; then what each row sees is what it sees in the trees
    themselves. Of some sessions the host has read the nodes."""
    rng = np.random.default_rng(seed)
    level_sizes = tuple(rng.integers(1, 4, int(rng.integers(1, 6))).tolist())
    shape, num_sessions = UnreadLayout.of(level_sizes), int(rng.integers(1, 5))
    size, free = len(shape.levels), rng.permutation(1 << 12).astype(np.int32)
    parents = [np.array([rng.choice(above) for above in above_of(level_sizes)], np.int32) for _ in range(num_sessions)]
    counts = [int(np.searchsorted(shape.levels, rng.integers(0, len(level_sizes) + 1))) for _ in range(num_sessions)]
    if not any(counts):
        counts[-1] = size
    is_read = [bool(i % 2) for i in range(num_sessions)]
    if not any(count for count, known in zip(counts, is_read, strict=True) if not known):
        is_read = [False] * num_sessions
    starts, slots, tables = rng.integers(0, 300, num_sessions).tolist(), np.zeros(0, np.int32), []
    for start, count in zip(starts, counts, strict=True):
        own, free = free[: start + 1 + count], free[start + 1 + count :]
        tables.append(own[: start + 1])
        slots = np.concatenate([slots, own[start:]])

    def packed(drawn: Sequence[np.ndarray]) -> PackedRows:
        steps = []
        for i, (own, count, start) in enumerate(zip(drawn, counts, starts, strict=True)):
            tree = Tree(NODE[:count], own[:count], np.zeros(count, np.float32))
            steps.append(SessionStep(i, start, NODE[:1], GREEDY, tree))
        return pack_steps(steps, slots, tables)

    stand_in = shape.parents.astype(np.int32)
    rows = packed([own if known else stand_in for own, known in zip(parents, is_read, strict=True)])
    expected = packed(parents)
    layout = BlockLayout(rows.num_rows + 3, per_block, num_chunks)
    block = np.full(layout.starts()["lists"] + max_list_length(rows), -7, np.int32)
    lay_out(rows, layout, block)
    firsts = np.cumsum([1, *(1 + count for count in counts[:-1])])
    unread = [0 if known else count for count, known in zip(counts, is_read, strict=True)]
    of_nodes = np.concatenate([first + np.arange(count) for first, count in zip(firsts, unread, strict=True)])
    places = np.concatenate([i * size + np.arange(count) for i, count in enumerate(unread)])
    lines = lines_of(np.stack(parents), shape.levels, beyond=99).reshape(len(level_sizes), -1)
    fed = FedLines(torch.from_numpy(lines), places, of_nodes, firsts.repeat(unread))
    on_device = torch.from_numpy(block.copy())
    fed.put(on_device, on_device[layout.starts()["slots"] :][: rows.num_rows], line_places(block, layout))
    found = Block(on_device.numpy(), layout).sums(rows.num_rows)
    assert found == [expected_sum(seen_slots(expected, row)) for row in range(rows.num_rows)]


NODE = np.ones(20, np.int32)


def above_of(level_sizes: Sequence[int]) -> list[list[int]]:
    """Return the nodes of the level above each node's, -1 for the context."""
    firsts = np.cumsum([0, *level_sizes]).tolist()
    levels = [[-1], *(list(range(first, end)) for first, end in pairwise(firsts))]
    return [levels[level] for level, size in enumerate(level_sizes) for _ in range(size)]


def test_a_chain_after_a_short_context_is_one_item():
    rng = np.random.default_rng(1)
    table = rng.permutation(99).astype(np.int32)
    chain = Tree(random_tokens(rng, 8), np.arange(8, dtype=np.int32) - 1, np.zeros(8, np.float32))
    rows = pack_steps([SessionStep(1, 40, table[:1], GREEDY, chain)], table[40:49], [table])
    assert Block.of(rows, BlockLayout(16, 9, 32)).items == [[0, 9, 0, 49, 0, 41, 41, -1]]


def test_branches_share_a_prefix_that_ends_where_a_piece_begins():
    table = np.arange(300, dtype=np.int32)
    tree = Tree(NODE[:3], np.array([-1, 0, -1], np.int32), np.zeros(3, np.float32))
    rows = pack_steps([SessionStep(1, 210, NODE[:1], GREEDY, tree)], table[210:214], [table])
    prefix, *tails = Block.of(rows, BlockLayout(16, 9, 1)).items
    assert prefix == [0, 4, 0, 192, 0, 211, 0, 0]
    assert tails == [[0, 3, 192, 213, 0, 211, 211, 1], [3, 1, 192, 212, 0, 211, 213, 1]]


def test_a_long_context_is_cut_into_about_as_many_items_as_asked_for():
    table = np.random.default_rng(0).permutation(5000).astype(np.int32)
    rows = pack_steps([SessionStep(1, 4999, table[:1], GREEDY)], table[-1:], [table])
    assert 24 <= len(Block.of(rows, BlockLayout(1, 2, 32)).items) <= 45


@pytest.mark.parametrize("seed", range(20))
def test_both_ways_pack_the_same_rows(seed):
    rng = np.random.default_rng(seed)
    steps, rows = random_rows(rng, int(rng.integers(1, 9)), max_context=50)
    library = kernels()
    assert library is not None
    slots = rows.slots.copy()
    by_lists = packing._pack_lists(steps, slots, rows.tables)
    in_c = packing._pack_native(library, StepBatch.of(steps), slots, rows.tables)
    assert by_lists.block.tolist() == in_c.block.tolist()
    for name in ("token_ids", "positions", "slots", "ctx_lens", "extra_starts", "extras", "row_starts", "logit_rows"):
        assert getattr(by_lists, name).tolist() == getattr(in_c, name).tolist()
        assert getattr(in_c, name).dtype == np.int32
