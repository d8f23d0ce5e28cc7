"""`deterministic`: accept a node iff its token is the target's own token at that position.

The target's own token is y = argmax of `sampling.perturbed_scores`: a function of target logits, parameters, seed and
position only. So the text is the same with any drafter, or none, and follows the target's law exactly over seeds. A
drafter that adds the same noise to its own logits agrees as often as a coupling by shared exponential races can
(Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding").

The seed project accepts a mismatched draft with min(1, p/q) and then emits no residual sample; here a mismatch is never
accepted, and the target's own token takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.types import Int32Array, Judgement
from specq.verification.draws import Draws
from specq.verification.packing import Int64Array, JudgedStep, Packed, PackedNodes, pack, pack_nodes
from specq.verification.target_rows import TargetRows


class Deterministic:
    """The default strategy; see the module."""

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> list[Judgement]:
        """See `specq.verification.judge.Strategy`; all noise comes from the seed, so that drafters can share it."""
        packed = pack(steps)
        paths = [[first] for first in packed.first_rows]
        if target.prefers_levels(int(np.count_nonzero(packed.rows["temperature"]))):
            tokens = _walk_by_level(paths, packed, pack_nodes(steps, packed), target)
        else:
            own_tokens = target.own_tokens(packed.rows)  # a GPU begins; the host goes on
            nodes = pack_nodes(steps, packed)
            tokens = own_tokens()
            _extend({path[-1]: path for path in paths}, nodes, _matches(nodes, tokens))
        return [_judgement(judged, path, tokens) for judged, path in zip(steps, paths, strict=True)]


def _walk_by_level(paths: list[list[int]], packed: Packed, nodes: PackedNodes, target: TargetRows) -> Int32Array:
    """Extend paths as far as they are accepted; return i32[rows]: the target's own tokens at the rows they reach."""
    tokens = np.full(len(packed.rows), -1, np.int32)
    ends = {path[-1]: path for path in paths}
    live = list(ends)
    while live:
        tokens[live] = target.own_tokens(packed.rows[live])()
        live = _extend(ends, nodes, _matches(nodes, tokens))
    return tokens


def _matches(nodes: PackedNodes, tokens: Int32Array) -> Int64Array:
    """Return, ascending, the nodes whose tokens are those of the rows that judge them; i32[rows], -1 where unknown."""
    return np.flatnonzero(tokens[nodes.parent_rows] == nodes.token_ids)


def _extend(ends: dict[int, list[int]], nodes: PackedNodes, matches: Int64Array) -> list[int]:
    """Extend paths, known by the packed rows at their ends, by nodes that match; return the rows that were reached."""
    reached = []
    edges = zip(nodes.parent_rows[matches].tolist(), nodes.rows[matches].tolist(), strict=True)
    for parent_row, row in edges:  # parents come first; of siblings with equal tokens the first counts
        if (path := ends.pop(parent_row, None)) is not None:
            path.append(row)
            ends[row] = path
            reached.append(row)
    return reached


def _judgement(judged: JudgedStep, path: list[int], tokens: Int32Array) -> Judgement:
    before = path[0] + 1
    return Judgement(judged.step.session_id, tuple([row - before for row in path[1:]]), tokens[path])
