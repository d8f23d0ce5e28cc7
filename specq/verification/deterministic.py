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
import torch

from specq.types import Judgement
from specq.verification.draws import Draws
from specq.verification.packing import JudgedStep, pack, take_rows
from specq.verification.sampling import choose_tokens

# At T > 0 a CPU pays about as much for 16 rows as for the fixed part of one call: above twice that it is cheaper to ask
# level by level for the rows that accepted paths reach.
MANY_ROWS = 32


class Deterministic:
    """The default strategy; see the module."""

    def judge(self, steps: Sequence[JudgedStep], logits: torch.Tensor, draws: Draws) -> list[Judgement]:
        """See `specq.verification.judge.Strategy`; all noise comes from the seed, so that drafters can share it."""
        walks = [_Walk(judged) for judged in steps]
        if _is_lazy_cheaper(steps, logits):
            _walk_by_level(walks, logits)
        else:
            _walk_at_once(walks, logits)
        return [walk.judgement() for walk in walks]


class _Walk:
    """The accepted path of one session, as far as it is known: feed it the target's token of its current row."""

    def __init__(self, judged: JudgedStep) -> None:
        self.judged, self.step = judged, judged.step
        self.path: list[int] = []
        self.token_ids: list[int] = []
        self.node = -1
        edges = zip(self.step.tree.parents.tolist(), self.step.tree.token_ids.tolist(), strict=True)
        # Of siblings with equal tokens the first counts.
        self._children = {edge: i for i, edge in reversed(list(enumerate(edges)))}

    def advance(self, token_id: int) -> bool:
        """Take the target's token at the row of `node`; False where no child bears it: then the walk has ended."""
        self.token_ids.append(token_id)
        child = self._children.get((self.node, token_id))
        if child is None:
            return False
        self.path.append(child)
        self.node = child
        return True

    def judgement(self) -> Judgement:
        return Judgement(self.step.session_id, tuple(self.path), np.array(self.token_ids, np.int32))


def _is_lazy_cheaper(steps: Sequence[JudgedStep], logits: torch.Tensor) -> bool:
    """On a GPU a round of small kernels costs more than the rows; at T = 0 a row costs next to nothing."""
    num_sampled = sum(j.step.num_judged_rows for j in steps if j.step.params.temperature > 0)
    return logits.device.type == "cpu" and num_sampled > MANY_ROWS


def _walk_at_once(walks: Sequence[_Walk], logits: torch.Tensor) -> None:
    rows = pack([walk.judged for walk in walks], logits)
    tokens = choose_tokens(rows.logits, rows.params, rows.positions).tolist()
    for walk, first_row in zip(walks, rows.first_rows, strict=True):
        while walk.advance(tokens[first_row + walk.node + 1]):
            pass


def _walk_by_level(walks: Sequence[_Walk], logits: torch.Tensor) -> None:
    while walks:
        rows = take_rows(logits, [walk.judged.first_row + walk.node + 1 for walk in walks])
        positions = [walk.step.base_len + len(walk.path) for walk in walks]
        tokens = choose_tokens(rows, [walk.step.params for walk in walks], positions).tolist()
        walks = [walk for walk, token in zip(walks, tokens, strict=True) if walk.advance(token)]
