"""`deterministic`: accept a node iff its token is the target's own token at that position.

The target's own token is y = argmax of `sampling.perturbed_scores`. It is a function of target logits, parameters, seed
and position only. So the text is the same with any drafter, or none. Over seeds it follows the target's distribution
exactly. A drafter may add the same noise to its own logits. It then agrees as often as a coupling by shared exponential
races (Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding").

The seed project accepts a mismatched draft with min(1, p/q) and then emits no residual sample. Here a mismatch is never
accepted, and the target's own token takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from specq.protocol import Int32Array, Int64Array, IntpArray, Judgement, SamplingParams
from specq.verification.interface import Draws, Strategy
from specq.verification.judgements import CORRECTION, Judgements, ends_of
from specq.verification.packing import JudgedStep, Packed, Placed, node_tokens, pack
from specq.verification.target_rows import TargetRows

MANY = 8  # number of steps from which on arrays are faster than a loop


class Deterministic(Strategy):
    """The default strategy: see the module."""

    def is_lossless(self, params: SamplingParams) -> bool:
        """Return True: a draft never changes a token."""
        return True

    def says_own(self, params: SamplingParams) -> bool:
        """Return True."""
        return True

    def follows_own(self, params: SamplingParams) -> bool:
        """Return True: a node is accepted if its token is the target's own."""
        return True

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """See `Strategy.judge`. All noise comes from the seed, so drafters can share it."""
        placed, packed = Placed.of(steps), pack(steps)
        if len(packed.node_rows) and target.prefers_levels(int(np.count_nonzero(packed.rows["temperature"]))):
            paths = [[first] for first in packed.first_rows.tolist()]
            tokens = _walk_by_level(paths, packed, node_tokens(placed), target)
            return _judgements(placed.batch.session_ids, *_flat(paths), packed, tokens)
        return self.judge_by_own(placed, packed, target.own_tokens(packed.rows)())

    def judge_by_own(self, steps: Placed, packed: Packed, tokens: Int32Array) -> Judgements:
        """See `Strategy.judge_by_own`."""
        session_ids = steps.batch.session_ids
        if not len(packed.node_rows):
            return Judgements.of_tokens(session_ids, tokens)
        if len(session_ids) >= MANY:
            return _judgements(session_ids, *_walk_all(packed, tokens, node_tokens(steps)), packed, tokens)
        paths = [[first] for first in packed.first_rows.tolist()]
        _extend(paths, packed, tokens, node_tokens(steps))
        return _judgements(session_ids, *_flat(paths), packed, tokens)


def _walk_by_level(paths: list[list[int]], packed: Packed, drafted: Int64Array, target: TargetRows) -> Int32Array:
    """Extend paths as far as they are accepted. Return i32[rows]: the target's own tokens at the reached rows."""
    tokens = np.full(len(packed.rows), -1, np.int32)
    live = paths
    while live:
        ends = [path[-1] for path in live]
        tokens[ends] = target.own_tokens(packed.rows[ends])()
        _extend(live, packed, tokens, drafted)
        live = [path for path, end in zip(live, ends, strict=True) if path[-1] != end]
    return tokens


def _extend(paths: Sequence[list[int]], packed: Packed, tokens: Int32Array, drafted: Int64Array) -> None:
    """Extend paths of packed rows by the rows that follow nodes with the target's own tokens.

    - `tokens`: i32[rows], -1 if unknown.
    - `drafted`: i64[nodes].
    """
    matches = np.flatnonzero(tokens[packed.parent_rows] == drafted)[
        ::-1
    ]  # of siblings with equal tokens the first counts
    following = dict(zip(packed.parent_rows[matches].tolist(), packed.node_rows[matches].tolist(), strict=True))
    for path in paths:
        row = path[-1]
        while (row := following.get(row, -1)) >= 0:
            path.append(row)


def _walk_all(packed: Packed, tokens: Int32Array, drafted: Int64Array) -> tuple[IntpArray, IntpArray]:
    """Return (num_tokens, reached) as `_flat` does, for the paths of `_extend`.

    It handles many steps at once, level by level.
    """
    matches = np.flatnonzero(tokens[packed.parent_rows] == drafted)[::-1]
    following = np.full(len(tokens) + 1, -1, np.intp)  # no row follows row -1, the last one here
    following[packed.parent_rows[matches]] = packed.node_rows[matches]  # of several, the last one stays
    levels, rows = list[IntpArray](), packed.first_rows.astype(np.intp, copy=False)
    while len(rows) and rows.max() >= 0:
        levels.append(rows)
        rows = following[rows]
    paths = np.array(levels, np.intp).T  # [steps, levels]; faster than `np.stack`
    is_reached = paths >= 0
    return is_reached.sum(1), paths[is_reached]


def _flat(paths: Sequence[list[int]]) -> tuple[IntpArray, IntpArray]:
    """Return the number of rows of each path, i64[steps], and these rows.

    They are a step's first row, and the rows that follow accepted nodes.
    """
    num_tokens = np.array([len(path) for path in paths], np.intp)
    return num_tokens, np.fromiter(chain.from_iterable(paths), np.intp)


def _judgements(
    session_ids: list[int], num_tokens: IntpArray, reached: IntpArray, packed: Packed, tokens: Int32Array
) -> Judgements:
    """Return the judgements of paths in the form of `_flat`."""
    nodes = np.full(len(reached), CORRECTION, np.int32)
    nodes[:-1] = (reached - packed.first_rows.repeat(num_tokens) - 1)[1:]
    nodes[ends_of(num_tokens) - 1] = CORRECTION
    return Judgements(session_ids, num_tokens, tokens[reached], nodes)
