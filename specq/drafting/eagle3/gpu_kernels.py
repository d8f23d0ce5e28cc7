"""Triton kernels for rows of one layer below contexts, which continue their texts or are a level of trees.

They compute the input of the rows and their integers, which `specq.drafting.trees.gpu_kernels` describes. For texts the
integers come from the host, for trees from the tokens ranked behind the rows above.

Rows of texts also have their position. Rows of trees also have their number among the tree's nodes. They also have the
bits of their cumulative log-probability.

Rows of texts have slots in their context. They see each other as a part of the context. Rows of trees have separate
slots. They see those in `paths` i32[rows, PATH], where their own comes last.

Values that differ from tree to tree are not constants. So a new shape rarely needs a compilation. Sizes are padded to
powers of two, and usual sizes to the same one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specq.drafting.trees.gpu_kernels import likeliest


@triton.jit(do_not_specialize=["own_rows", "above_rows"])
def enter_kernel(
    rows_ptr, embedding_ptr, states_ptr, embedding_norm_ptr, state_norm_ptr, both_ptr, x_ptr, eps, own_rows, above_rows,
    HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr, IS_NORMED_KEPT: tl.constexpr,
):  # fmt: skip
    """Compute the input of each row.

    Program (row, 0) writes the normed embedding of the row's token to the first half of both [rows, 2 * HIDDEN].
    Program (row, 1) writes the normed state of the row above, from states [contexts * above_rows, HIDDEN], to the
    second half. It also sets x f32[rows, HIDDEN] to that state, with IS_NORMED_KEPT to the normed one.

    own_rows: rows of a context.
    """
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    n = tl.arange(0, HIDDEN_PAD)
    inside = n < HIDDEN
    to = both_ptr + row.to(tl.int64) * (2 * HIDDEN) + n
    if tl.program_id(1) == 0:
        token = tl.load(rows_ptr + row).to(tl.int64)
        x = tl.load(embedding_ptr + token * HIDDEN + n, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(embedding_norm_ptr + n, mask=inside, other=0.0).to(tl.float32)
        x *= 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)
        tl.store(to, (x * norm).to(both_ptr.dtype.element_ty), mask=inside)
    else:
        above = (row // own_rows * above_rows + tl.load(rows_ptr + num_rows + row)).to(tl.int64)
        x = tl.load(states_ptr + above * HIDDEN + n, mask=inside, other=0.0).to(tl.float32)
        norm = tl.load(state_norm_ptr + n, mask=inside, other=0.0).to(tl.float32)
        normed = x * (1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + eps)) * norm
        tl.store(to + HIDDEN, normed.to(both_ptr.dtype.element_ty), mask=inside)
        tl.store(x_ptr + row.to(tl.int64) * HIDDEN + n, normed if IS_NORMED_KEPT else x, mask=inside)


@triton.jit
def text_rows_kernel(
    given_ptr, texts_ptr, rows_ptr, spans_ptr, contexts_ptr, lasts_ptr, num_tokens, place_slots, chunk, num_parts,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Program text: the integers of its ROWS rows. Some rows may not exist. ROWS is a power of two.

    given        i32[2, rows]: for the existing rows, one text after the other, the rows above and the tokens.
    num_tokens   tokens that can be read.
    texts        i32[5, texts]: places, first positions, lengths so far, numbers of rows, and their starts in `given`.
    rows         i32[6, rows].
    spans        i32[rows, 2]: as in `attention.combine_kernel`, for parts of `chunk`, at most num_parts.
    contexts     i32[2, texts]: places, and lengths with the new rows.
    lasts        i32[texts]: the last row of each text.
    place_slots  slots of a place, all heads together.
    """
    text, texts = tl.program_id(0), tl.num_programs(0)
    place, first = tl.load(texts_ptr + text), tl.load(texts_ptr + texts + text)
    length, count = tl.load(texts_ptr + 2 * texts + text), tl.load(texts_ptr + 3 * texts + text)
    at = tl.arange(0, ROWS)
    is_there = at < count
    which = tl.where(is_there, tl.load(texts_ptr + 4 * texts + text) + at, 0)
    within = tl.where(is_there, length + at, 0)
    row, num_rows = text * ROWS + at, texts * ROWS
    to = rows_ptr + row
    token = tl.load(given_ptr + num_rows + which)
    tl.store(to, tl.minimum(tl.maximum(token, 0), num_tokens - 1))  # unknown tokens are clipped
    tl.store(to + num_rows, tl.load(given_ptr + which))
    tl.store(to + 2 * num_rows, tl.where(is_there, place * place_slots + within, -1))
    tl.store(to + 3 * num_rows, row)
    tl.store(to + 4 * num_rows, within + 1)
    tl.store(to + 5 * num_rows, tl.maximum(within + first - 1, 0))  # position of the state before its token
    tl.store(spans_ptr + row * 2, row * num_parts)
    tl.store(spans_ptr + row * 2 + 1, within // chunk + 1)
    tl.store(contexts_ptr + text, place)
    tl.store(contexts_ptr + texts + text, tl.maximum(length + count, 1))
    tl.store(lasts_ptr + text, text * ROWS + tl.maximum(count - 1, 0))


@triton.jit
def _nodes(
    ranked_ptr, names_ptr, columns_ptr, behind_ptr, above_ptr, index, inside, tree, trees, num_names,
    num_above, count, NAMED: tl.constexpr, PICKED: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return nodes `index` of a tree: the row before each, tokens, scores, cumulative scores, and parents' numbers.

    Scores are log-probabilities.
    """
    behind = tl.load(behind_ptr + index, mask=inside, other=0).to(tl.int32)
    column = tl.load(columns_ptr + index, mask=inside, other=0).to(tl.int32) if PICKED else index
    at = ranked_ptr + (tree * (num_above * count) + column) * 2
    token = tl.load(at, mask=inside, other=0)
    score = tl.load(at + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
    if NAMED:  # without a token the value is meaningless
        token = tl.load(names_ptr + tl.minimum(tl.maximum(token, 0), num_names - 1), mask=inside, other=0)
    if IS_FIRST:
        return behind, token, score, score, behind - 1  # all are behind row 0
    else:
        at = above_ptr + (5 * trees + tree) * num_above + behind
        number = tl.load(at, mask=inside, other=0)
        reach = tl.load(at + trees * num_above, mask=inside, other=0).to(tl.float32, bitcast=True)
        return behind, token, score, reach + score, number


@triton.jit
def _store_nodes(nodes_ptr, index, inside, tree, trees, num_nodes, first_node, token, parent, score, reach):
    to = nodes_ptr + tree * num_nodes + first_node + index
    tl.store(to, token, mask=inside)
    tl.store(to + trees * num_nodes, parent, mask=inside)
    tl.store(to + 2 * trees * num_nodes, score.to(tl.int32, bitcast=True), mask=inside)
    tl.store(to + 3 * trees * num_nodes, reach.to(tl.int32, bitcast=True), mask=inside)


@triton.jit(
    do_not_specialize=[
        *("num_nodes", "num_slots", "first_node", "first_slot", "depth", "chunk"),
        *("num_above", "count", "num_ranked_nodes", "num_kept", "num_next", "num_levels", "most_parts"),
    ]
)
def descend_kernel(
    ranked_ptr, names_ptr, columns_ptr, behind_ptr, expanded_ptr, contexts_ptr, above_ptr, above_paths_ptr,
    nodes_ptr, rows_ptr, paths_ptr, spans_ptr, num_names, num_tokens, num_nodes, num_slots, first_node, first_slot,
    depth, chunk, num_above, count, num_ranked_nodes, num_kept, num_next, num_levels,
    most_parts, NODES_PAD: tl.constexpr, KEPT_PAD: tl.constexpr, NEXT_PAD: tl.constexpr, PATH: tl.constexpr,
    NAMED: tl.constexpr, PICKED: tl.constexpr, SHAPED: tl.constexpr, IS_FIRST: tl.constexpr,
):  # fmt: skip
    """Program tree: from the tokens ranked behind its num_above rows to the nodes of a level and the rows below.

    The level has num_ranked_nodes nodes. It has num_next rows below them, or none if NEXT_PAD is 0. With KEPT_PAD > 0
    the num_kept likeliest nodes are kept, likeliest first, and get lines.

    ranked       i32[trees * num_above, count, 2]: columns and bits of log-probabilities.
    names        with NAMED: i32[num_names], the columns' tokens.
    columns, behind, expanded   i64: as in `Level`. `columns` exists with PICKED, `expanded` with SHAPED. Without PICKED
                 all ranked tokens are nodes. Without SHAPED the likeliest nodes have rows.
    above, above_paths   of the rows. With IS_FIRST there are none above, and row 0 is the context.
    nodes        i32[4 or 4 + num_levels, trees, num_nodes], from `first_node` on: tokens, parents, bits of
                 log-probabilities and of cumulative ones. Lines follow.
    rows, paths  i32[7, trees * num_next] and i32[trees * num_next, PATH]: of the next rows. A tree has num_slots slots,
                 and these rows use those from first_slot on. `depth` is the number of path entries above them.
    spans        i32[trees * num_next, 2]: as in `attention.combine_kernel`, for parts of `chunk`, at most most_parts.
    num_tokens   tokens that can be read.
    """
    tree, trees = tl.program_id(0), tl.num_programs(0)
    index = tl.arange(0, NODES_PAD)
    inside = index < num_ranked_nodes
    behind, token, score, reach, parent = _nodes(
        ranked_ptr, names_ptr, columns_ptr, behind_ptr, above_ptr, index, inside, tree, trees, num_names,
        num_above, count, NAMED, PICKED, IS_FIRST,
    )  # fmt: skip
    if KEPT_PAD > 0:
        wanted = likeliest(reach, inside, KEPT_PAD, NODES_PAD)
        place = tl.arange(0, KEPT_PAD)
        is_kept = place < num_kept
        behind, token, score, kept_reach, parent = _nodes(
            ranked_ptr, names_ptr, columns_ptr, behind_ptr, above_ptr, wanted, is_kept, tree, trees, num_names,
            num_above, count, NAMED, PICKED, IS_FIRST,
        )  # fmt: skip
        _store_nodes(nodes_ptr, place, is_kept, tree, trees, num_nodes, first_node, token, parent, score, kept_reach)
        level = tl.arange(0, PATH)[:, None]
        line = nodes_ptr + ((4 + level) * trees + tree) * num_nodes
        is_above = (level < depth) & is_kept[None, :]
        above = tl.load(line + parent[None, :], mask=is_above, other=0)  # written by the previous level
        own = (first_node + place)[None, :]
        tl.store(line + own, tl.where(is_above, above, own), mask=(level < num_levels) & is_kept[None, :])
    else:
        _store_nodes(nodes_ptr, index, inside, tree, trees, num_nodes, first_node, token, parent, score, reach)
    if NEXT_PAD > 0:
        place = tl.arange(0, NEXT_PAD)
        real = place < num_next
        if SHAPED:
            chosen = tl.load(expanded_ptr + place, mask=real, other=0).to(tl.int32)
        else:
            chosen = likeliest(reach, inside, NEXT_PAD, NODES_PAD)
        behind, token, score, reach, parent = _nodes(
            ranked_ptr, names_ptr, columns_ptr, behind_ptr, above_ptr, chosen, real, tree, trees, num_names,
            num_above, count, NAMED, PICKED, IS_FIRST,
        )  # fmt: skip
        row, num_rows = tree * num_next + place, trees * num_next
        slot = tree * num_slots + first_slot + place
        tl.store(rows_ptr + row, tl.minimum(tl.maximum(token, 0), num_tokens - 1), mask=real)
        tl.store(rows_ptr + num_rows + row, behind, mask=real)
        tl.store(rows_ptr + 2 * num_rows + row, slot, mask=real)
        tl.store(rows_ptr + 3 * num_rows + row, place * 0 + tree, mask=real)
        length = tl.load(contexts_ptr + trees + tree)
        tl.store(rows_ptr + 4 * num_rows + row, place * 0 + length, mask=real)
        number = first_node + (place if KEPT_PAD > 0 else chosen)
        tl.store(rows_ptr + 5 * num_rows + row, number, mask=real)
        tl.store(rows_ptr + 6 * num_rows + row, reach.to(tl.int32, bitcast=True), mask=real)
        level = tl.arange(0, PATH)[None, :]
        above = above_paths_ptr + (tree * num_above + behind)[:, None] * PATH + level
        path = tl.load(above, mask=real[:, None] & (level < depth), other=0)
        path = tl.where(level == depth, slot[:, None], path)
        tl.store(paths_ptr + row[:, None] * PATH + level, path, mask=real[:, None])
        num_parts = 1 + (length + chunk - 1) // chunk
        tl.store(spans_ptr + row * 2, row * most_parts, mask=real)
        tl.store(spans_ptr + row * 2 + 1, place * 0 + num_parts, mask=real)
