"""`probabilistic`: speculative sampling, exact over chains, N candidates and trees.

The rule (Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1; Chen et al.
2023; for siblings, recursive rejection sampling without replacement: Yang et al. 2024, and Jeon et al. 2024): at a
position with target law t, judge its children in order. Child x, drawn from law d, is accepted with probability
min(1, t(x) / d(x)); if it is not, t becomes norm(max(t - d, 0)) and the next child is judged. After the last, the token is
drawn from what t has become; after an accepted leaf, from the target's own law (the bonus).

- Sampled siblings were drawn without replacement from one law (`DraftLaws`): the law of each is that law without its
  elders' tokens, renormalised. They are judged first, in draw order; then the point masses, whose law is all on their
  token: they are accepted with probability t(x).
- Where `Tree.waits`, nothing more is judged or drawn.

The seed project accepts a mismatch with min(1, p/q) but emits no residual sample, and picks the longest of N accepted
candidates. Both bias the text (tests/verification/ has them as mutants); here depth and choice come out of the rule.

Target laws are kept unnormalised: `residual` at the tokens that children or their laws name, the target's own
probabilities everywhere else, and `mass` for their sum. So a rejection touches k numbers, not a vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specq.types import BoolArray, Judgement
from specq.verification.draws import Draws, Float64Array
from specq.verification.families import Families, Int64Array, PackedNodes
from specq.verification.packing import JudgedStep, PackedRows, pack
from specq.verification.sampling import target_probs


class Probabilistic:
    """See the module."""

    def judge(self, steps: Sequence[JudgedStep], logits: torch.Tensor, draws: Draws) -> list[Judgement]:
        """See `specq.verification.judge.Strategy`."""
        rows = pack(steps, logits)
        probs = target_probs(rows.logits, rows.params)
        nodes = PackedNodes.of(steps, rows)
        families = Families.of(nodes)
        residual = families.target_probs(probs)
        chances = judge_children(nodes, families, residual)
        uniforms = draws.accept([p.seed for p in nodes.params], nodes.positions, nodes.token_ids)
        accepted = (uniforms < chances).tolist()
        paths = [walk(judged, first, families, accepted) for judged, first in zip(steps, rows.first_rows, strict=True)]
        drawn = draw_residuals(steps, rows, paths, probs, families, residual, draws)
        return [
            Judgement(
                j.step.session_id, path, np.array([*j.step.tree.token_ids[list(path)].tolist(), *token], np.int32)
            )
            for j, path, token in zip(steps, paths, drawn, strict=True)
        ]


def judge_children(nodes: PackedNodes, families: Families, residual: Float64Array) -> Float64Array:
    """Return f64[nodes]: each node's chance of acceptance (1 or more is certain), given that it is reached.

    residual f64[families, columns] comes as target probabilities and leaves as what remains after all children.
    """
    chances = np.zeros(len(nodes.token_ids))
    mass = np.ones(len(residual))
    weights = families.weights.copy()  # [families, columns], of the tokens not drawn yet
    for children in families.by_rank:
        family, column = families.of_node[children], families.column[children]
        expected = mass[family, None] * child_laws(weights[family], column, nodes.is_sampled[children])
        with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 after a certain elder: never reached
            chances[children] = residual[family, column] / expected[np.arange(len(children)), column]
        taken = np.minimum(residual[family], expected)
        residual[family] -= taken
        mass[family] -= taken.sum(1)
        strike(weights, family, column)
    return chances


def strike(weights: Float64Array, family: Int64Array, column: Int64Array) -> None:
    """Take drawn tokens out of the laws f64[families, columns] that their younger siblings were drawn from."""
    weights[family, column] = 0


def child_laws(weights: Float64Array, column: Int64Array, is_sampled: BoolArray) -> Float64Array:
    """Return f64[children, columns]: the law of each child, given weights without its elders' tokens."""
    point = np.zeros_like(weights)
    point[np.arange(len(column)), column] = 1
    total = np.maximum(weights.sum(1, keepdims=True), 1)
    return np.where(is_sampled[:, None], weights / total, point)


def walk(judged: JudgedStep, first_row: int, families: Families, accepted: Sequence[bool]) -> tuple[int, ...]:
    """Return the indices, in the step's tree, of the nodes on the accepted path."""
    waits = judged.step.tree.waits
    first_node = families.first_nodes[first_row]
    path: list[int] = []
    node = -1
    while waits is None or not waits[node + 1]:
        children = families.children.get(first_row + node + 1, ())
        following = next((child for child in children if accepted[child]), None)
        if following is None:
            break
        node = following - first_node
        path.append(node)
    return tuple(path)


def draw_residuals(
    steps: Sequence[JudgedStep],
    rows: PackedRows,
    paths: Sequence[tuple[int, ...]],
    probs: torch.Tensor,
    families: Families,
    residual: Float64Array,
    draws: Draws,
) -> list[list[int]]:
    """Return, for each step, the correction or bonus token, or nothing where a sampled child waits."""
    last = [path[-1] + 1 if path else 0 for path in paths]
    waits = [j.step.tree.waits is not None and bool(j.step.tree.waits[r]) for j, r in zip(steps, last, strict=True)]
    drawing = [i for i, is_waiting in enumerate(waits) if not is_waiting]
    at = [rows.first_rows[i] + last[i] for i in drawing]
    uniforms = draws.residual([rows.params[r].seed for r in at], [rows.positions[r] for r in at])
    tokens = dict(zip(drawing, draw_tokens(residual_laws(at, probs, families, residual), uniforms), strict=True))
    return [[tokens[i]] if i in tokens else [] for i in range(len(steps))]


def residual_laws(at: Sequence[int], probs: torch.Tensor, families: Families, residual: Float64Array) -> torch.Tensor:
    """Return f64[len(at), vocab], unnormalised: what the target's law at some rows has become."""
    laws = probs[torch.tensor(at, dtype=torch.long, device=probs.device)]
    judged = [(i, families.of_row[row]) for i, row in enumerate(at) if row in families.of_row]
    if judged:
        index, family = np.array(judged).T
        place, column = np.nonzero(families.token_ids[family] >= 0)
        tokens = families.token_ids[family[place], column]
        values = torch.from_numpy(residual[family[place], column]).to(probs.device)
        laws[torch.from_numpy(index[place]).to(probs.device), torch.from_numpy(tokens).to(probs.device)] = values
    return laws


def draw_tokens(laws: torch.Tensor, uniforms: Float64Array) -> list[int]:
    """Return one token of each unnormalised law f64[n, vocab], by inversion of uniforms f64[n] in (0, 1)."""
    if not len(uniforms):
        return []
    cumulative = laws.cumsum(1)
    aims = torch.from_numpy(uniforms).to(laws.device)[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, aims, right=True)[:, 0]  # the first with more than the aim: never weight 0
    return found.clamp(max=laws.shape[1] - 1).tolist()
