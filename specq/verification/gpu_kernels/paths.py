"""`walk_kernel` and `longest_kernel` walk down drafted trees, one program per session.

They find the accepted nodes, and the numbers that choose the token after them. So the host waits once, for that token.

`specq.verification.cuda_paths` defines the memory layout of the trees. A session has at most BLOCK nodes, siblings, and
tokens of the siblings or their distribution. Each has its own lane.
"""

# Mypy does not know Triton's decorator and types, since the package is missing on a machine without a GPU.
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from specq.verification.gpu_kernels.rows import logit_row_of, probs_of, temperature_of

CONTEXT = tl.constexpr(-1)  # the end of a path without nodes


@triton.jit
def _tree(trees, step, lane):
    """Return the start of a step's nodes, their number, and their parents by lane."""
    first = tl.load(trees + step)
    count = tl.load(trees + step + 1) - first
    parents = tl.load(trees + tl.num_programs(0) + 1 + first + lane, mask=lane < count, other=CONTEXT)
    return first, count, parents


@triton.jit
def _are_numbers(distributions, first_row, count, lane):
    """Return whether all rows of a step have a finite largest logit."""
    top = tl.load(distributions + (first_row + lane) * 4, mask=lane <= count, other=0.0)
    return tl.min((tl.abs(top) < float("inf")).to(tl.int32), 0) > 0


@triton.jit(
    do_not_specialize=["splits", "num_nodes", "width"],
    do_not_specialize_on_alignment=[
        "words", "distributions", "numbers", "trees", "draws", "edit_ids", "edit_values", "lengths", "nodes",
    ],
)  # fmt: skip
def walk_kernel(
    logits, stride, vocab, splits, words, distributions, numbers, trees, num_nodes, width, draws, edit_ids,
    edit_values, lengths, nodes,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (steps). Judge by the rule of `probabilistic`, as in `specq.verification.strategies.probabilistic`.

    Writes:
    - lengths i32[steps]: of the accepted paths. -1 if a row has no finite numbers.
    - nodes i32[n]: each path, from the start of the step's nodes on.
    - draws [steps] of DRAW, edit_ids i64 and edit_values f64[steps, BLOCK]: for the draw of the next token.

    Reads:
    - numbers f64: a uniform number for each node's acceptance, then one for each row's draw.
    - trees i32: the start of each step's nodes and the end of the last. Then parents [n], is_sampled [n], named [n,
      width + 1] and weights [n, width], as in `Drafted`.
    """
    step, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, count, parents = _tree(trees, step, lane)
    first_row, is_node = first + step, lane < count
    of_nodes = trees + tl.num_programs(0) + 1 + num_nodes
    is_sampled = tl.load(of_nodes + first + lane, mask=is_node, other=0) > 0
    named = of_nodes + num_nodes
    weights = named + num_nodes * (width + 1)
    own_ids = tl.load(named + (first + lane) * (width + 1) + width, mask=is_node, other=-1)
    own_probs = probs_of(logits, stride, vocab, words, distributions, first_row + parents + 1, own_ids)
    uniforms = tl.load(numbers + first + lane, mask=is_node, other=0.0)
    order = lane + tl.where(is_sampled, 0, BLOCK)  # sampled siblings in draw order, then point masses
    end = tl.full([], CONTEXT, tl.int32)
    length = tl.zeros([], tl.int32)
    num_edits = tl.zeros([], tl.int32)
    token_ids, residual = tl.full([BLOCK], -1, tl.int32), tl.zeros([BLOCK], tl.float64)
    is_going = count >= 0
    while is_going:
        is_child = is_node & (parents == end)
        leader = tl.min(tl.where(is_child & is_sampled, lane, BLOCK), 0)  # siblings share their distribution
        num_edits = tl.where(leader < BLOCK, width, 0)
        place = first + tl.where(leader < BLOCK, leader, 0)
        token_ids = tl.load(named + place * (width + 1) + lane, mask=lane < num_edits, other=-1)
        left = tl.load(weights + place * width + lane, mask=token_ids >= 0, other=0).to(tl.float64)
        residual = probs_of(logits, stride, vocab, words, distributions, first_row + end + 1, token_ids)
        total, mass = tl.sum(left, 0), tl.full([], 1.0, tl.float64)
        accepted = tl.full([], -1, tl.int32)
        judged = tl.min(tl.where(is_child, order, 2 * BLOCK), 0)
        while (judged < 2 * BLOCK) & (accepted < 0):
            child = judged % BLOCK
            is_it = lane == child
            token_id = tl.sum(tl.where(is_it, own_ids, 0), 0)
            column = tl.min(tl.where(token_ids == token_id, lane, BLOCK), 0)
            is_new = column == BLOCK
            is_own = lane == tl.where(is_new, num_edits, column)
            own_prob = tl.sum(tl.where(is_it, own_probs, 0.0), 0)
            residual = tl.where(is_new & is_own, own_prob, residual)
            token_ids = tl.where(is_new & is_own, token_id, token_ids)
            num_edits += is_new.to(tl.int32)
            is_drawn = judged < BLOCK
            scale = tl.where(is_drawn, mass / tl.maximum(total, 1.0), mass)
            shares = tl.where(is_drawn, left, is_own.to(tl.float64))
            share, own_left = tl.sum(tl.where(is_own, shares, 0.0), 0), tl.sum(tl.where(is_own, residual, 0.0), 0)
            is_accepted = tl.sum(tl.where(is_it, uniforms, 0.0), 0) * share * scale < own_left
            accepted = tl.where(is_accepted, child, accepted)
            taken = tl.where(is_accepted, 0.0, tl.minimum(residual, shares * scale))
            residual -= taken
            mass -= tl.sum(taken, 0)
            total -= tl.sum(tl.where(is_own, left, 0.0), 0)  # later siblings were drawn without it
            left = tl.where(is_own, 0.0, left)
            judged = tl.min(tl.where(is_child & (order > judged), order, 2 * BLOCK), 0)
        is_going = accepted >= 0
        tl.store(nodes + first + length, accepted, mask=is_going)
        length += is_going.to(tl.int32)
        end = tl.where(is_going, accepted, end)
    tl.store(lengths + step, tl.where(_are_numbers(distributions, first_row, count, lane), length, -1))
    row = first_row + end + 1
    edit = step * BLOCK + lane
    tl.store(edit_ids + edit, token_ids.to(tl.int64))
    tl.store(edit_values + edit, residual * tl.load(distributions + row * 4 + 2))
    draw, numbers_of = draws + step * 7, draws.to(tl.pointer_type(tl.float64)) + step * 7
    tl.store(draw, logit_row_of(words, row))
    tl.store(draw + 1, step * BLOCK)
    tl.store(draw + 2, step * BLOCK + num_edits)
    tl.store(numbers_of + 3, temperature_of(words, row).to(tl.float64))
    tl.store(numbers_of + 4, tl.load(distributions + row * 4))
    tl.store(numbers_of + 5, tl.load(distributions + row * 4 + 1))
    tl.store(numbers_of + 6, tl.load(numbers + num_nodes + row))


@triton.jit(
    do_not_specialize=["splits", "num_nodes"],
    do_not_specialize_on_alignment=["words", "distributions", "numbers", "trees", "last_rows", "lengths", "nodes"],
)
def longest_kernel(
    logits, stride, vocab, splits, words, distributions, numbers, trees, num_nodes, last_rows, lengths, nodes,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (steps). Find the longest accepted path, as `specq.verification.longest` does.

    Writes lengths and nodes as in `walk_kernel`, and last_rows i32[steps], the row that follows each path.
    Reads numbers f64: limits, then deltas, of all rows, as in `Bars`. trees are as in `walk_kernel` up to named, which
    is i32[n], the nodes' tokens. It lacks weights.
    """
    step, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    first, count, parents = _tree(trees, step, lane)
    first_row, is_node = first + step, lane < count
    token_ids = tl.load(trees + tl.num_programs(0) + 1 + num_nodes + first + lane, mask=is_node, other=-1)
    rows = first_row + parents + 1
    probs = probs_of(logits, stride, vocab, words, distributions, rows, token_ids)
    mass, moment = tl.load(distributions + rows * 4 + 2), tl.load(distributions + rows * 4 + 3)
    limit, delta = tl.load(numbers + rows), tl.load(numbers + num_nodes + tl.num_programs(0) + rows)
    bars = tl.minimum(limit, delta * tl.exp(moment / mass - tl.log(mass)))
    is_above = is_node & (probs > bars)
    logs = tl.where(is_above, tl.log(tl.where(is_above, probs, 1.0)), 0.0)
    depths = tl.full([BLOCK], -1, tl.int32)
    merits = tl.zeros([BLOCK], tl.float64)  # log-likelihoods of the paths that end at nodes
    best, length = tl.full([], CONTEXT, tl.int32), tl.zeros([], tl.int32)
    merit = tl.zeros([], tl.float64)
    node = tl.min(tl.where(is_above, lane, BLOCK), 0)
    while node < BLOCK:
        is_it = lane == node
        parent = tl.sum(tl.where(is_it, parents, 0), 0)
        above = tl.where(parent < 0, 0, tl.max(tl.where(lane == parent, depths, -1), 0))
        depth = tl.where(above >= 0, above + 1, -1)
        own = tl.sum(tl.where(lane == parent, merits, 0.0), 0) + tl.sum(tl.where(is_it, logs, 0.0), 0)
        depths, merits = tl.where(is_it, depth, depths), tl.where(is_it, own, merits)
        is_better = (depth > length) | ((depth == length) & (own > merit))
        best, length, merit = (
            tl.where(is_better, node, best),
            tl.where(is_better, depth, length),
            tl.where(is_better, own, merit),
        )
        node = tl.min(tl.where(is_above & (lane > node), lane, BLOCK), 0)
    tl.store(lengths + step, tl.where(_are_numbers(distributions, first_row, count, lane), length, -1))
    tl.store(last_rows + step, (first_row + best + 1).to(tl.int32))
    while best >= 0:
        length -= 1
        tl.store(nodes + first + length, best)
        best = tl.sum(tl.where(lane == best, parents, 0), 0)
