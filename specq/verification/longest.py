"""The shared part of the lossy strategies: accept nodes above a bar, and take the longest accepted path.

Of several longest paths it takes the likeliest under the target, as in Medusa's `evaluate_posterior`. Choosing the
longest path is itself biased. The chance that *some* candidate survives favours tokens that were drafted often. So the
seed project's "longest of N candidates" is a lossy strategy, and not in `probabilistic`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import numpy as np

from specq.protocol import BoolArray, Float64Array, Int32Array, Int64Array
from specq.verification import host_kernels
from specq.verification.host_kernels import Rows
from specq.verification.judgements import Judgements, NodePaths
from specq.verification.packing import JudgedStep, Packed, Placed
from specq.verification.target_rows import Bars, TargetRows, Trees

ALL = slice(None)


def judge_longest(
    steps: Sequence[JudgedStep], packed: Packed, target: TargetRows, warm: Rows, bars: Bars
) -> Judgements:
    """Judge packed steps: accept a node iff its probability exceeds its bar, in rows with the temperatures of `warm`.

    The correction is the target's own token, as in `deterministic`.
    """
    batch = Placed.of(steps).batch
    drafted = batch.node_tokens.astype(np.int64)
    judged = target.longest(packed.rows, warm, Trees(packed.first_nodes, batch.parents, drafted), bars)
    if judged is not None:
        paths, last = judged()
        return Judgements.of_paths(batch.session_ids, paths, drafted, last)
    if target.prefers_levels(len(packed.rows)):
        chances, accepted = _judge_by_level(packed, drafted, target, warm, bars)
        own = target.own_tokens_among(packed.rows)
    else:
        look_up = target.distributions(warm)
        own = target.own_tokens_among(packed.rows)
        distributions, probs = look_up(packed.parent_rows, drafted[:, None])
        chances = probs[:, 0]
        accepted = chances > bars.of(distributions, ALL)[packed.parent_rows]
    paths = longest_paths(packed.first_nodes, batch.parents, accepted, chances)
    return Judgements.of_paths(batch.session_ids, paths, drafted, own(_last_rows(packed, paths)))


def _last_rows(packed: Packed, paths: NodePaths) -> Int64Array:
    """Return i64[steps]: the packed rows that follow the paths."""
    last = packed.first_rows.copy()
    some = np.flatnonzero(paths.lengths)
    last[some] += paths.nodes[(paths.firsts + paths.lengths - 1)[some]] + 1
    return last


def _judge_by_level(
    packed: Packed, drafted: Int64Array, target: TargetRows, warm: Rows, bars: Bars
) -> tuple[Float64Array, BoolArray]:
    """Return f64[nodes], bool[nodes]: each node's probability and whether it passes.

    They are 0 and False below a node that fails.
    """
    chances, accepted = np.zeros(len(drafted)), np.zeros(len(drafted), np.bool_)
    is_reached = np.zeros(len(packed.rows), np.bool_)
    is_reached[packed.first_rows] = True
    while len(level := np.flatnonzero(is_reached[packed.parent_rows])):
        rows, which = np.unique(packed.parent_rows[level], return_inverse=True)
        distributions, probs = target.distributions(warm[rows])(which, drafted[level, None])
        chances[level] = probs[:, 0]
        accepted[level] = chances[level] > bars.of(distributions, rows)[which]
        is_reached[:] = False
        is_reached[packed.node_rows[level[accepted[level]]]] = True
    return chances, accepted


def longest_paths(firsts: Int64Array, parents: Int32Array, accepted: BoolArray, probs: Float64Array) -> NodePaths:
    """Return the longest path of each step.

    `firsts` i64[steps + 1]: the start of each step's nodes, and the end of the last. The other arguments are those of
    `longest_path`, for all nodes.
    """
    paths = NodePaths(firsts[:-1], np.zeros(len(firsts) - 1, np.int64), np.zeros(len(parents), np.int32))
    library = host_kernels.kernels()
    if library is None:
        for step, (first, end) in enumerate(zip(firsts[:-1].tolist(), firsts[1:].tolist(), strict=True)):
            path = longest_path(parents[first:end], accepted[first:end], probs[first:end])
            paths.nodes[first : first + len(path)], paths.lengths[step] = path, len(path)
        return paths
    arrays = [np.ascontiguousarray(array) for array in (firsts, parents, accepted, probs)]
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arrays, paths.lengths, paths.nodes)]
    library.specq_longest(ctypes.c_long(len(paths.lengths)), *pointers)
    return paths


def longest_path(parents: Int32Array, accepted: BoolArray, probs: Float64Array) -> tuple[int, ...]:
    """Return the longest path of accepted nodes from the root of a tree. Of equals the likeliest, then the first.

    This is the rule in plain Python. It runs without a C compiler. `specq_longest` of kernels/walk.h does the same
    for all steps in one call.
    """
    above = parents.tolist()
    merits = {-1: (0, 0.0)}  # by last node of a path: its length and log-likelihood
    best = -1
    for node, (parent, ok, prob) in enumerate(zip(above, accepted.tolist(), probs.tolist(), strict=True)):
        if ok and parent in merits:
            length, likelihood = merits[parent]
            merits[node] = (length + 1, likelihood + math.log(prob))
            best = node if merits[node] > merits[best] else best
    path = []
    while best >= 0:
        path.append(best)
        best = above[best]
    return tuple(reversed(path))
