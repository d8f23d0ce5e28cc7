"""`probabilistic`: speculative sampling, exact over chains, N candidates and trees.

The rule (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1; Chen et al.
2023; for siblings, recursive rejection sampling without replacement: Yang et al. 2024, and Jeon et al. 2024): at a
position with target law t, judge its children in order. Child x, drawn from law d, is accepted with probability
min(1, t(x) / d(x)); if it is not, t becomes norm(max(t - d, 0)) and the next child is judged. After the last, the token is
drawn from what t has become; after an accepted leaf, from the target's own law (the bonus).

- Sampled siblings were drawn without replacement from one law (`DraftLaws`): the law of each is that law without its
  elders' tokens, renormalised. They are judged first, in draw order; then the point masses, whose law is all on their
  token: they are accepted with probability t(x).

The seed project accepts a mismatch with min(1, p/q) but emits no residual sample, and picks the longest of N accepted
candidates. Both bias the text (tests/verification/ has them as mutants); here depth and choice come out of the rule.

Nothing waits for a sampled child that was drafted but is not in the step: whether it is verified is decided without
looking at its token. So drawing the target's own token there, and keeping the child's subtree only if the two agree, is
exact.

Target laws are kept unnormalised: `Family.residual` at the tokens that children or their laws name, the target's own
probabilities everywhere else, and `mass` for their sum. So a rejection touches k numbers, not a vocabulary. Laws, their
probabilities at those tokens, and the residual draws come for all sessions at once from the device; the walk in between
asks a few numbers of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specq.types import Judgement, Tree
from specq.verification.deterministic import Deterministic
from specq.verification.draws import Draws
from specq.verification.packing import (
    Float64Array,
    Int64Array,
    JudgedStep,
    Packed,
    PackedNodes,
    by_temperature,
    pack,
    pack_nodes,
)
from specq.verification.target_rows import Edits, Laws, TargetRows

NO_EDITS = Edits(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


class Probabilistic:
    """See the module. At T = 0 the target's law is a point mass, and the rule is that of `deterministic`."""

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> list[Judgement]:
        """See `specq.verification.judge.Strategy`."""
        return by_temperature(
            steps,
            lambda of: Deterministic().judge(of, target, draws),
            lambda of: _judge_warm(of, target, draws),
        )


def _judge_warm(steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> list[Judgement]:
    packed = pack(steps)
    by_level = target.prefers_levels(len(packed.rows))
    look_up = None if by_level else target.laws(packed.rows)  # a GPU begins; the host goes on
    nodes = pack_nodes(steps, packed)
    named = named_tokens(steps, nodes)
    at = packed.rows[nodes.parent_rows]
    uniforms = draws.accept(at["seed"], at["position"], nodes.token_ids).tolist()
    walks = [
        Walk(judged, first_row, span.start, uniforms)
        for judged, first_row, span in zip(steps, packed.first_rows, nodes.spans, strict=True)
    ]
    if look_up is None:
        _walk_by_level(walks, packed, named, target, draws)
    else:
        _walk_at_once(walks, *look_up(nodes.parent_rows, named), target, draws)
    return [walk.judgement() for walk in walks]


def _walk_at_once(walks: Sequence[Walk], laws: Laws, probs: Float64Array, target: TargetRows, draws: Draws) -> None:
    for walk in walks:
        while walk.advance(probs):
            pass
    draw_tokens(walks, [walk.row for walk in walks], laws, target, draws)


def _walk_by_level(walks: Sequence[Walk], packed: Packed, named: Int64Array, target: TargetRows, draws: Draws) -> None:
    while walks:
        groups = [walk.children() for walk in walks]
        nodes = np.array([node for group in groups for node in group], np.int64)
        which = np.repeat(np.arange(len(walks)), [len(group) for group in groups])
        laws, probs = target.laws(packed.rows[[walk.row for walk in walks]])(which, named[nodes])
        of_nodes = dict(zip(nodes.tolist(), probs, strict=True))
        goes_on = [walk.advance(of_nodes) for walk in walks]
        ended = [place for place, is_live in enumerate(goes_on) if not is_live]
        draw_tokens([walks[place] for place in ended], ended, laws, target, draws)
        walks = [walk for walk, is_live in zip(walks, goes_on, strict=True) if is_live]


def named_tokens(steps: Sequence[JudgedStep], nodes: PackedNodes) -> Int64Array:
    """Return i64[nodes, k + 1]: the tokens of the law that each node was drawn from, -1 where there are none, and its own."""
    laws = [judged.step.tree.laws for judged in steps]
    width = max((of_tree.ids.shape[1] for of_tree in laws if of_tree is not None), default=0)
    named = np.full((len(nodes.token_ids), width + 1), -1, np.int64)
    named[:, -1] = nodes.token_ids
    for of_tree, span in zip(laws, nodes.spans, strict=True):
        if of_tree is not None and len(of_tree.ids):
            ids = np.where(of_tree.rows[:, None] >= 0, of_tree.ids[of_tree.rows], -1)
            named[span, : ids.shape[1]] = ids
    return named


@dataclass(slots=True)
class Family:
    """The children of one row while they are judged; an entry for each token that they or their law name.

    token_ids  i64[c], -1 where the law has fewer tokens than there is room for
    weights    f64[c], of the law that the sampled ones were drawn from, without those drawn so far; total: their sum
    residual   f64[c], what is left of the target's probabilities, unnormalised; mass: their sum over the vocabulary
    """

    token_ids: Int64Array
    weights: Float64Array
    residual: Float64Array
    total: float
    mass: float = 1.0


def judge_child(family: Family, place: int, uniform: float, *, is_sampled: bool) -> bool:
    """Accept the child whose token stands at `place`; or else take its law from the target's."""
    own = family.weights[place] / max(family.total, 1) if is_sampled else 1.0
    if uniform * own * family.mass < family.residual[place]:
        return True
    law = family.weights / max(family.total, 1) if is_sampled else (np.arange(len(family.weights)) == place) * 1.0
    taken = np.minimum(family.residual, law * family.mass)
    family.residual -= taken
    family.mass -= float(taken.sum())
    strike(family, place)
    return False


def strike(family: Family, place: int) -> None:
    """Take a drawn token out of the law that its younger siblings were drawn from."""
    family.total -= float(family.weights[place])
    family.weights[place] = 0


def order_of_judgement(children: Sequence[int], tree: Tree) -> list[int]:
    """Return siblings as they are judged: sampled ones in draw order, which is the tree's, then point masses."""
    return sorted(children, key=lambda child: tree.laws is None or bool(tree.laws.rows[child] < 0))


class Walk:
    """The accepted path of one session, as far as it is known, and `row`, the packed row at its end.

    first_node: where the step's nodes begin among all; uniforms: of all nodes
    """

    def __init__(self, judged: JudgedStep, first_row: int, first_node: int, uniforms: Sequence[float]) -> None:
        self.step, self.tree = judged.step, judged.step.tree
        self.row = self.first_row = first_row
        self.first_node, self.uniforms = first_node, uniforms
        self.path: list[int] = []
        self.family: Family | None = None  # of `row`, once it was judged
        self.token_id = -1  # the correction or bonus
        self._children: dict[int, list[int]] = {}
        for child, parent in enumerate(self.tree.parents.tolist()):
            self._children.setdefault(parent, []).append(child)

    def children(self) -> list[int]:
        """Return the children at the path's end, as packed nodes."""
        return [self.first_node + child for child in self._children.get(self.row - self.first_row - 1, ())]

    def advance(self, probs: Mapping[int, Float64Array] | Float64Array) -> bool:
        """Judge the children at the path's end and go on to the one that is accepted; False where there is none.

        probs   of packed nodes, each f64[k + 1]: the target's probabilities of `named_tokens`
        """
        children = order_of_judgement(self._children.get(self.row - self.first_row - 1, ()), self.tree)
        self.family = self._family(children, probs) if children else None
        for child in children:
            if self.judges(child):
                self.path.append(child)
                self.row = self.first_row + child + 1
                return True
        return False

    def judges(self, child: int) -> bool:
        """Judge the next child of `family`."""
        assert self.family is not None
        place = int((self.family.token_ids == self.tree.token_ids[child]).argmax())
        is_sampled = self.tree.laws is not None and bool(self.tree.laws.rows[child] >= 0)
        return judge_child(self.family, place, self.uniforms[self.first_node + child], is_sampled=is_sampled)

    def judgement(self) -> Judgement:
        tokens = [*self.tree.token_ids[self.path].tolist(), self.token_id]
        return Judgement(self.step.session_id, tuple(self.path), np.array(tokens, np.int32))

    def _family(self, children: Sequence[int], probs: Mapping[int, Float64Array] | Float64Array) -> Family:
        laws, eldest = self.tree.laws, children[0]
        token_ids: Int64Array = np.zeros(0, np.int64)
        weights: Float64Array = np.zeros(0)
        residual: Float64Array = np.zeros(0)
        if laws is not None and (row := laws.rows[eldest]) >= 0:
            token_ids, weights = laws.ids[row].astype(np.int64), laws.weights[row].astype(np.float64)
            residual = probs[self.first_node + eldest][: len(weights)].copy()
        named = token_ids.tolist()
        others = [child for child in children if self.tree.token_ids[child] not in named]
        if others:
            own = [probs[self.first_node + child][-1] for child in others]
            token_ids = np.concatenate([token_ids, self.tree.token_ids[others]])
            weights, residual = np.pad(weights, (0, len(others))), np.concatenate([residual, own])
        return Family(token_ids, weights, residual, float(weights.sum()))


def draw_tokens(walks: Sequence[Walk], which: Sequence[int], laws: Laws, target: TargetRows, draws: Draws) -> None:
    """Draw the correction or bonus of walks that have ended at the rows `which` of some laws."""
    if walks:
        at = np.array(which)
        rows = laws.rows[at]
        uniforms = draws.residual(rows["seed"], rows["position"])
        tokens = target.draw(laws, at, residual_laws(walks), uniforms)
        for walk, token in zip(walks, tokens.tolist(), strict=True):
            walk.token_id = token


def residual_laws(walks: Sequence[Walk]) -> Edits:
    """Return what has become of the target's laws at the walks' ends."""
    families = [(place, walk.family) for place, walk in enumerate(walks) if walk.family is not None]
    if not families:
        return NO_EDITS
    token_ids = np.concatenate([family.token_ids for _, family in families])
    places = np.repeat([place for place, _ in families], [len(family.token_ids) for _, family in families])
    values = np.concatenate([family.residual for _, family in families])
    is_token = token_ids >= 0
    return Edits(places[is_token], token_ids[is_token], values[is_token])
