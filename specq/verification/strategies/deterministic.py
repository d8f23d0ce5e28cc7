"""`deterministic`: accept a node iff its token is the target's own token at that position.

The target's own token is y = argmax of `sampling.perturbed_scores`: a function of target logits, parameters, seed and
position only. So the text is the same with any drafter, or none, and follows the target's distribution exactly over
seeds. A drafter that adds the same noise to its own logits agrees as often as a coupling by shared exponential races can
(Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding").

The seed project accepts a mismatched draft with min(1, p/q) and then emits no residual sample; here a mismatch is never
accepted, and the target's own token takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.protocol import Int32Array, Int64Array, Judgement, SamplingParams
from specq.verification.interface import Draws, Strategy
from specq.verification.packing import JudgedStep, Packed, node_tokens, pack
from specq.verification.target_rows import TargetRows


class Deterministic(Strategy):
    """The default strategy; see the module."""

    def is_lossless(self, params: SamplingParams) -> bool:
        """Always: a draft changes no token."""
        return True

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> list[Judgement]:
        """See `Strategy.judge`; all noise comes from the seed, so that drafters can share it."""
        packed = pack(steps)
        paths = [[first] for first in packed.first_rows]
        if target.prefers_levels(int(np.count_nonzero(packed.rows["temperature"]))):
            tokens = _walk_by_level(paths, packed, node_tokens(steps), target)
        else:
            own_tokens = target.own_tokens(packed.rows)  # a GPU begins; the host goes on
            drafted = node_tokens(steps)
            tokens = own_tokens()
            _extend(paths, packed, tokens, drafted)
        return [_judgement(judged, path, tokens) for judged, path in zip(steps, paths, strict=True)]


def _walk_by_level(paths: list[list[int]], packed: Packed, drafted: Int64Array, target: TargetRows) -> Int32Array:
    """Extend paths as far as they are accepted; return i32[rows]: the target's own tokens at the rows they reach."""
    tokens = np.full(len(packed.rows), -1, np.int32)
    live = paths
    while live:
        ends = [path[-1] for path in live]
        tokens[ends] = target.own_tokens(packed.rows[ends])()
        _extend(live, packed, tokens, drafted)
        live = [path for path, end in zip(live, ends, strict=True) if path[-1] != end]
    return tokens


def _extend(paths: Sequence[list[int]], packed: Packed, tokens: Int32Array, drafted: Int64Array) -> None:
    """Extend paths of packed rows by the rows that follow nodes whose tokens are the target's own: tokens i32[rows], -1
    where they are unknown; drafted i64[nodes]."""
    matches = np.flatnonzero(tokens[packed.parent_rows] == drafted)[
        ::-1
    ]  # of siblings with equal tokens the first counts
    edges = zip(packed.parent_rows[matches].tolist(), packed.node_rows[matches].tolist(), strict=True)
    following = dict(edges)
    for path in paths:
        row = path[-1]
        while (row := following.get(row, -1)) >= 0:
            path.append(row)


def _judgement(judged: JudgedStep, path: list[int], tokens: Int32Array) -> Judgement:
    first, count = path[0], len(path)
    own = tokens[first : first + count] if path[-1] - first == count - 1 else tokens[path]
    return Judgement(judged.step.session_id, tuple([row - first - 1 for row in path[1:]]), own)
