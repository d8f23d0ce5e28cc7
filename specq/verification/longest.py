"""What the lossy strategies share: accept nodes above a bar, take the longest accepted path, go on as the target would.

Of several longest paths the likeliest under the target is taken, as in Medusa's `evaluate_posterior`. Choosing the
longest is itself biased (the chance that *some* candidate survives favours tokens that were drafted often); that is why
the seed project's "longest of N candidates" is found here, among the lossy strategies, and not in `probabilistic`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from specq.protocol import BoolArray, Float64Array, Int64Array, Judgement, Tree
from specq.verification.packing import JudgedStep, Packed, node_tokens
from specq.verification.target_rows import TargetRows

# Of some rows (None: all) of the packed ones, and of nodes as (which of those rows judges it, its token) i64[n] each:
# f64[n], the nodes' probabilities, and f64[n], the bars.
Bars = Callable[[Int64Array | None, Int64Array, Int64Array], tuple[Float64Array, Float64Array]]


def judge_longest(steps: Sequence[JudgedStep], packed: Packed, target: TargetRows, bars: Bars) -> list[Judgement]:
    """Judge the steps that were packed: accept a node iff its probability exceeds its bar. The correction is the target's
    own token, as in `deterministic`."""
    token_ids = node_tokens(steps)
    if target.prefers_levels(len(packed.rows)):
        chances, accepted = _judge_by_level(packed, token_ids, bars)
    else:
        chances, limits = bars(None, packed.parent_rows, token_ids)
        accepted = chances > limits
    paths = [
        longest_path(judged.step.tree, accepted[span], chances[span])
        for judged, span in zip(steps, packed.spans(), strict=True)
    ]
    last = [
        first + (path[-1] + 1 if path else 0) for first, path in zip(packed.first_rows.tolist(), paths, strict=True)
    ]
    own = target.own_tokens(packed.rows[last])()
    return [
        Judgement(j.step.session_id, path, np.array([*j.step.tree.token_ids[list(path)].tolist(), token], np.int32))
        for j, path, token in zip(steps, paths, own.tolist(), strict=True)
    ]


def _judge_by_level(packed: Packed, token_ids: Int64Array, bars: Bars) -> tuple[Float64Array, BoolArray]:
    """Return f64[nodes], bool[nodes]: each node's probability and whether it passes; 0 and False below one that fails."""
    chances, accepted = np.zeros(len(token_ids)), np.zeros(len(token_ids), np.bool_)
    is_reached = np.zeros(len(packed.rows), np.bool_)
    is_reached[packed.first_rows] = True
    while len(level := np.flatnonzero(is_reached[packed.parent_rows])):
        rows, which = np.unique(packed.parent_rows[level], return_inverse=True)
        chances[level], limits = bars(rows, which, token_ids[level])
        accepted[level] = chances[level] > limits
        is_reached[:] = False
        is_reached[packed.node_rows[level[accepted[level]]]] = True
    return chances, accepted


def longest_path(tree: Tree, accepted: BoolArray, probs: Float64Array) -> tuple[int, ...]:
    """Return the longest path of accepted nodes from the root; of equals the likeliest, then the first."""
    parents = tree.parents.tolist()
    merits = {-1: (0, 0.0)}  # of paths that end at a node: their length and log-likelihood
    best = -1
    for node, (parent, ok, prob) in enumerate(zip(parents, accepted.tolist(), probs.tolist(), strict=True)):
        if ok and parent in merits:
            length, likelihood = merits[parent]
            merits[node] = (length + 1, likelihood + math.log(prob))
            best = node if merits[node] > merits[best] else best
    path = []
    while best >= 0:
        path.append(best)
        best = parents[best]
    return tuple(reversed(path))
