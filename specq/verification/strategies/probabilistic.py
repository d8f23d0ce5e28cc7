"""`probabilistic`: speculative sampling, exact over chains, N candidates and trees.

`walk` goes down the drafted trees of many sessions, child by child. It is the rule in plain Python. Tests change it,
and it runs without a C compiler. `specq_walk` of kernels/rows.c does the same for all sessions in one call.

The rule is from Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1, and
Chen et al. 2023. For siblings it is recursive rejection sampling without replacement (Yang et al. 2024, and Jeon et al.
2024). At a position with target distribution t, judge the children in order. Child x, drawn from draft distribution d,
is accepted with probability min(1, t(x) / d(x)). If it is rejected, t becomes norm(max(t - d, 0)) and the next child is
judged. After the last child, the token is drawn from the remaining t. After an accepted leaf, it is drawn from the
target's own distribution (the bonus).

- Sampled siblings are drawn without replacement from one draft distribution (`DraftDistributions`). Each is drawn from
  that distribution without the tokens of earlier siblings, renormalised. They are judged first, in draw order. Then
  come the point masses, whose draft distribution is all on their token. They are accepted with probability t(x).

The seed project accepts a mismatch with min(1, p/q) but emits no residual sample. It also picks the longest of N
accepted candidates. Both bias the text (tests/verification/ has them as mutants). Here depth and choice follow from the
rule.

A step does not wait for a sampled child that was drafted but is not in the step. Whether a child is verified is decided
without its token. So drawing the target's own token there is exact. The child's subtree stays only if the two agree.

Target distributions are kept unnormalised. `SiblingGroup.residual` holds them at the tokens of children or their
distributions. All other tokens keep the target's own probabilities, and `mass` is the sum. So a rejection changes k
numbers, not a vocabulary. The device computes distributions, probabilities at those tokens, and residual draws for all
sessions at once. The walk in between needs a few numbers per session."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specq.protocol import BoolArray, Float64Array, Int32Array, Int64Array, Judgement, SamplingParams
from specq.verification import host_kernels
from specq.verification.interface import Draws, Strategy
from specq.verification.judgements import Judgements, NodePaths
from specq.verification.packing import Drafted, JudgedStep, Packed, Placed, by_temperature, pack
from specq.verification.strategies.deterministic import Deterministic
from specq.verification.target_rows import Distributions, Edits, TargetRows

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


ALL_LEVELS = 2**31 - 1


class Probabilistic(Strategy):
    """See the module. At T = 0 the target's distribution is a point mass, and the rule is that of `deterministic`."""

    takes_distributions = True
    stops_at_accepted = True

    def is_lossless(self, params: SamplingParams) -> bool:
        """Return True: it is exact in distribution."""
        return True

    def says_own(self, params: SamplingParams) -> bool:
        """Return True at T = 0. Otherwise the token is drawn with a uniform number."""
        return params.temperature == 0

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """See `Strategy.judge`."""
        return by_temperature(
            steps,
            lambda of: Deterministic().judge(of, target, draws),
            lambda of: _judge_warm(of, target, draws),
        )


def _judge_warm(steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Judgements:
    batch, packed = Placed.of(steps).batch, pack(steps)
    look_up = None if target.prefers_levels(len(packed.rows)) else target.distributions(packed.rows)  # a GPU begins
    drafted = Drafted.of(batch, packed)
    at = packed.rows[packed.parent_rows]
    drafted.uniforms[:] = draws.accept(at["seed"], at["position"], drafted.named[:, -1])
    rows = packed.rows
    judged = None if look_up is None else target.walk(rows, drafted, draws.residual(rows["seed"], rows["position"]))
    if judged is not None:
        found, last = judged()
        return Judgements.of_paths(batch.session_ids, found, drafted.named[:, -1], last)
    paths, tokens = Paths.of(drafted), np.zeros(len(steps), np.int32)
    if look_up is None:
        _walk_by_level(paths, tokens, packed, drafted, target, draws)
    else:
        distributions, probs = look_up(packed.parent_rows, drafted.named)
        extend(paths, drafted, probs, levels=ALL_LEVELS)
        everyone = np.arange(len(steps))
        tokens[:] = draw_tokens(paths, everyone, distributions, _end_rows(paths, packed), target, draws)
    return Judgements.of_paths(batch.session_ids, paths.of_nodes(drafted), drafted.named[:, -1], tokens)


def _walk_by_level(
    paths: Paths, tokens: Int32Array, packed: Packed, drafted: Drafted, target: TargetRows, draws: Draws
) -> None:
    """Judge level by level: get the distributions of the rows that paths reach. Fill in the next tokens i32[steps]."""
    probs = np.zeros(drafted.named.shape)
    while len(live := np.flatnonzero(~paths.has_ended)):
        rows = _end_rows(paths, packed)[live]
        place = np.full(len(packed.rows), -1, np.int64)
        place[rows] = np.arange(len(rows))
        of_nodes = place[packed.parent_rows]
        nodes = np.flatnonzero(of_nodes >= 0)
        distributions, probs[nodes] = target.distributions(packed.rows[rows])(of_nodes[nodes], drafted.named[nodes])
        extend(paths, drafted, probs, levels=1)
        ended = paths.has_ended[live]
        if ended.any():
            tokens[live[ended]] = draw_tokens(paths, live[ended], distributions, np.flatnonzero(ended), target, draws)


def _end_rows(paths: Paths, packed: Packed) -> Int64Array:
    """Return i64[steps]: the packed rows at the paths' ends."""
    return packed.first_rows + paths.ends + 1


def draw_tokens(
    paths: Paths, which: Int64Array, distributions: Distributions, places: Int64Array, target: TargetRows, draws: Draws
) -> Int32Array:
    """Draw the corrections or bonuses of steps whose paths have ended, at the places i64[n] of some distributions."""
    rows = distributions.rows[places]
    return target.draw(distributions, places, paths.edits(which), draws.residual(rows["seed"], rows["position"]))
