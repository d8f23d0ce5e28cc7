"""What each row sees, read back from the work items; and packed rows made in two ways."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from specq.engines.native import rows as packing
from specq.engines.native.compiler import kernels
from specq.engines.native.rows import PackedRows, pack_steps
from specq.engines.torch.cuda.attention_plan import ITEM, BlockLayout, lay_out, line_places, max_list_length
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


def seen_in(block: np.ndarray, layout: BlockLayout, num_rows: int) -> list[list[int]]:
    """Return what each row sees, as the items of a block say it."""
    starts = layout.starts()
    items = block[starts["items"] :][: ITEM * block[starts["num_items"]]].reshape(-1, ITEM).tolist()
    context, nodes = block[starts["visible"] : starts["spans"]].reshape(2, -1).tolist()
    lists = block[starts["lists"] :].tolist()
    seen: list[list[int]] = [[] for _ in range(num_rows)]
    for first_row, count, start, length, position, _, split, _ in items:
        for row in range(first_row, first_row + count):
            for index in range(length):
                if index + position < context[row] if index < split else index - split < nodes[row]:
                    seen[row].append(lists[start + index])
    return seen


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("per_block", "num_chunks", "joins"), [(1, 4, True), (9, 32, True), (64, 16, False), (9, 2, True)]
)
def test_items_show_each_row_what_it_sees_exactly_once(seed, per_block, num_chunks, joins):
    rng = np.random.default_rng(seed)
    _, rows = random_rows(rng, int(rng.integers(1, 12)))
    layout = BlockLayout(rows.num_rows + int(rng.integers(0, 9)), per_block, num_chunks, joins)
    starts = layout.starts()
    block = np.full(starts["lists"] + max_list_length(rows), -7, np.int32)
    assert lay_out(rows, layout, block) <= len(block)
    picked = block[starts["logit_rows"] : starts["num_items"]]
    assert picked.tolist() == [*rows.logit_rows.tolist(), *[0] * (layout.num_rows - len(rows.logit_rows))]
    num_items = block[starts["num_items"]]
    items = block[starts["items"] :][: ITEM * num_items].reshape(-1, ITEM).tolist()
    spans = block[starts["spans"] : starts["logit_rows"]].reshape(-1, 3).tolist()
    seen = seen_in(block, layout, rows.num_rows)
    partials: dict[int, int] = {}
    at_once: list[int] = []
    for first_row, count, _, _, _, partial, _, _ in items:
        assert 1 <= count <= per_block
        for row in range(first_row, first_row + count):
            if partial < 0:
                at_once.append(row)
            else:
                assert partial + row - first_row not in partials
                partials[partial + row - first_row] = row
    for row in range(rows.num_rows):
        assert seen[row] == seen_slots(rows, row)
        first, step, count = spans[row]
        own = sorted(p for p, owner in partials.items() if owner == row)
        assert own == [first + step * k for k in range(count)]
        assert (at_once.count(row) == 1) == (count == 0)
    assert max(partials, default=0) < layout.max_partials
    assert spans[rows.num_rows :] == [[0, 0, 0]] * (layout.num_rows - rows.num_rows)
    assert set(block[starts["slots"] :][rows.num_rows : layout.num_rows].tolist()) <= {-1}


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
    found = seen_in(on_device.numpy(), layout, rows.num_rows)
    assert found == [seen_slots(expected, row) for row in range(rows.num_rows)]


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
    block = np.zeros(3000, np.int32)
    layout = BlockLayout(16, 9, 32)
    lay_out(rows, layout, block)
    assert block[layout.starts()["num_items"]] == 1
    assert block[layout.starts()["items"] :][:8].tolist() == [0, 9, 0, 49, 0, -1, 41, 0]


def test_a_long_context_is_cut_into_about_as_many_chunks_as_asked_for():
    rng = np.random.default_rng(0)
    table = rng.permutation(5000).astype(np.int32)
    rows = pack_steps([SessionStep(1, 4999, table[:1], GREEDY)], table[-1:], [table])
    layout = BlockLayout(1, 2, 32)
    block = np.zeros(layout.starts()["lists"] + 5000, np.int32)
    lay_out(rows, layout, block)
    assert 24 <= block[layout.starts()["num_items"]] <= 32


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
