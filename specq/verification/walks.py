"""The walk of `probabilistic` down the drafted trees of many sessions: the rule itself, child by child.

`walk` is the rule in plain Python. Tests change it, and it runs without a C compiler. `specq_walk` of
kernels/rows.c does the same for all sessions in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specq.protocol import BoolArray, Float64Array, Int32Array, Int64Array
from specq.verification import host_kernels
from specq.verification.drafted import Drafted
from specq.verification.judgements import NodePaths
from specq.verification.target_rows import Edits

CONTEXT = -1  # the end of a path without nodes


@dataclass(slots=True)
class Paths:
    """The accepted paths of some steps, as far as they are known. Arrays have one entry per step.

    - `ends` i64: the node at each path's end, or CONTEXT.
    - `lengths` i64: the number of nodes of each path.
    - `nodes` i32[n]: each path, from the start of the step's nodes on.
    - `has_ended` bool: all children of the end were rejected.
    - `num_edits` i64, `edit_ids` i64[steps, room], `edit_values` f64[steps, room]: for ended paths, the remaining
      target probabilities of some tokens.
    """

    ends: Int64Array
    lengths: Int64Array
    nodes: Int32Array
    has_ended: BoolArray
    num_edits: Int64Array
    edit_ids: Int64Array
    edit_values: Float64Array

    @staticmethod
    def of(drafted: Drafted) -> Paths:
        """Return paths that have not begun."""
        num_steps, most = len(drafted.firsts) - 1, int(np.diff(drafted.firsts).max(initial=0))
        room = drafted.weights.shape[1] + most
        return Paths(
            ends=np.full(num_steps, CONTEXT, np.int64),
            lengths=np.zeros(num_steps, np.int64),
            nodes=np.zeros(len(drafted.parents), np.int32),
            has_ended=np.zeros(num_steps, np.bool_),
            num_edits=np.zeros(num_steps, np.int64),
            edit_ids=np.zeros((num_steps, room), np.int64),
            edit_values=np.zeros((num_steps, room)),
        )

    def of_nodes(self, drafted: Drafted) -> NodePaths:
        """Return each step's accepted nodes, as in its own tree."""
        return NodePaths(drafted.firsts[:-1], self.lengths, self.nodes)

    def edits(self, which: Int64Array) -> Edits:
        """Return the edits of some steps' ended paths."""
        place, column = np.nonzero(np.arange(self.edit_ids.shape[1]) < self.num_edits[which, None])
        return Edits(place, self.edit_ids[which[place], column], self.edit_values[which[place], column])


def extend(paths: Paths, drafted: Drafted, probs: Float64Array, *, levels: int) -> None:
    """Judge the children at the ends of open paths, `levels` levels down.

    `probs`: f64[n, k + 1], the target's probabilities of `Drafted.named`, for the nodes that need them.
    """
    library = host_kernels.kernels()
    if library is None:
        for step in np.flatnonzero(~paths.has_ended).tolist():
            for _ in range(levels):
                if not walk(step, paths, drafted, probs):
                    break
        return
    arrays: list[npt.NDArray[np.generic]] = [
        drafted.firsts, drafted.parents, drafted.is_sampled, drafted.named, drafted.weights, drafted.uniforms, probs,
        paths.ends, paths.lengths, paths.nodes, paths.has_ended, paths.num_edits, paths.edit_ids, paths.edit_values,
    ]  # fmt: skip
    sizes = len(paths.ends), drafted.weights.shape[1], paths.edit_ids.shape[1], levels
    library.specq_walk(*map(ctypes.c_long, sizes), *(ctypes.c_void_p(array.ctypes.data) for array in arrays))


@dataclass(slots=True)
class SiblingGroup:
    """The children of one node, or of the context, while they are judged.

    It has an entry for each token of the children or their draft distribution.

    - `weights`: of the distribution of the sampled children, without those drawn so far.
    - `total`: the sum of the weights.
    - `residual`: the remaining target probabilities, unnormalised.
    - `mass`: their sum over the vocabulary.
    """

    token_ids: list[int]
    weights: list[float]
    residual: list[float]
    total: float
    mass: float = 1.0


def walk(step: int, paths: Paths, drafted: Drafted, probs: Float64Array) -> bool:
    """Judge the children at the end of one step's path.

    Extend the path by the accepted child, or end it and return False.
    """
    first, end = drafted.firsts[step : step + 2].tolist()
    children = first + np.flatnonzero(drafted.parents[first:end] == paths.ends[step])
    ordered = order_of_judgement(children.tolist(), drafted)
    sibling_group = sibling_group_of(ordered, drafted, probs)
    for child in ordered:
        if judge_child(
            sibling_group, int(drafted.named[child, -1]), drafted.uniforms[child], drafted.is_sampled[child]
        ):
            paths.nodes[first + paths.lengths[step]] = child - first
            paths.lengths[step] += 1
            paths.ends[step] = child - first
            return True
    end_path(step, paths, sibling_group)
    return False


def order_of_judgement(children: Sequence[int], drafted: Drafted) -> list[int]:
    """Return siblings in order of judgement: sampled ones in draw order, which is the tree's, then point masses."""
    return sorted(children, key=lambda child: not drafted.is_sampled[child])


def sibling_group_of(children: Sequence[int], drafted: Drafted, probs: Float64Array) -> SiblingGroup:
    """Begin to judge siblings."""
    sibling_group = SiblingGroup([], [], [], 0.0)
    for child in children:
        *distribution, own = drafted.named[child].tolist()
        if drafted.is_sampled[child] and not sibling_group.token_ids:  # siblings share their distribution
            sibling_group.token_ids, sibling_group.weights = distribution, drafted.weights[child].tolist()
            sibling_group.residual, sibling_group.total = (
                probs[child, :-1].tolist(),
                float(drafted.weights[child].sum()),
            )
        if own not in sibling_group.token_ids:
            sibling_group.token_ids.append(own)
            sibling_group.weights.append(0.0)
            sibling_group.residual.append(float(probs[child, -1]))
    return sibling_group


def judge_child(sibling_group: SiblingGroup, token_id: int, uniform: float, is_sampled: bool) -> bool:
    """Accept the child with that token, or subtract its distribution from the target's."""
    place = sibling_group.token_ids.index(token_id)
    if is_sampled:
        distribution = [weight / max(sibling_group.total, 1) for weight in sibling_group.weights]
    else:
        distribution = [float(i == place) for i in range(len(sibling_group.weights))]
    if uniform * distribution[place] * sibling_group.mass < sibling_group.residual[place]:
        return True
    taken = [
        min(left, share * sibling_group.mass) for left, share in zip(sibling_group.residual, distribution, strict=True)
    ]
    sibling_group.residual = [left - part for left, part in zip(sibling_group.residual, taken, strict=True)]
    sibling_group.mass -= sum(taken)
    strike(sibling_group, place)
    return False


def strike(sibling_group: SiblingGroup, place: int) -> None:
    """Remove a drawn token from the distribution of its later siblings."""
    sibling_group.total -= sibling_group.weights[place]
    sibling_group.weights[place] = 0.0


def end_path(step: int, paths: Paths, sibling_group: SiblingGroup) -> None:
    """Keep the remaining target probabilities, for the token after the path."""
    kept = [
        (token, left) for token, left in zip(sibling_group.token_ids, sibling_group.residual, strict=True) if token >= 0
    ]
    paths.num_edits[step] = len(kept)
    for column, (token, left) in enumerate(kept):
        paths.edit_ids[step, column], paths.edit_values[step, column] = token, left
    paths.has_ended[step] = True
