"""What the lossy strategies share: accept nodes above a bar, take the longest accepted path, go on as the target would.

Of several longest paths the likeliest under the target is taken, as in Medusa's `evaluate_posterior`. Choosing the
longest is itself biased (the chance that *some* candidate survives favours tokens that were drafted often); that is why
the seed project's "longest of N candidates" is found here, among the lossy strategies, and not in `probabilistic`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from specq.types import BoolArray, Judgement, Tree
from specq.verification.packing import JudgedStep, PackedRows, take_rows
from specq.verification.sampling import choose_tokens

Float64Array = npt.NDArray[np.float64]


def judge_longest(
    steps: Sequence[JudgedStep], rows: PackedRows, probs: torch.Tensor, bars: torch.Tensor
) -> list[Judgement]:
    """Judge the steps of `rows`: accept a node iff its probability exceeds its bar; probs f64[rows, vocab], bars f64[rows].

    The correction is the target's own token, as in `deterministic`.
    """
    parents = np.concatenate([j.step.tree.parents + 1 + f for j, f in zip(steps, rows.first_rows, strict=True)])
    token_ids = np.concatenate([judged.step.tree.token_ids for judged in steps])
    row_index, token_index = (torch.from_numpy(a).long().to(probs.device) for a in (parents, token_ids))
    chance = probs[row_index, token_index]
    accepted = np.split(
        torch.stack([chance, (chance > bars[row_index]).double()]).cpu().numpy(),
        np.cumsum([judged.step.tree.num_nodes for judged in steps])[:-1],
        axis=1,
    )
    paths = [longest_path(j.step.tree, a[1] > 0, a[0]) for j, a in zip(steps, accepted, strict=True)]
    last = [first + (path[-1] + 1 if path else 0) for first, path in zip(rows.first_rows, paths, strict=True)]
    own = choose_tokens(take_rows(rows.logits, last), [rows.params[r] for r in last], [rows.positions[r] for r in last])
    return [
        Judgement(j.step.session_id, path, np.append(j.step.tree.token_ids[list(path)], token).astype(np.int32))
        for j, path, token in zip(steps, paths, own, strict=True)
    ]


def longest_path(tree: Tree, accepted: BoolArray, probs: Float64Array) -> tuple[int, ...]:
    """Return the longest path of accepted nodes from the root; of equals the likeliest, then the first."""
    best: tuple[int, float, tuple[int, ...]] = (0, 0.0, ())
    paths: dict[int, tuple[float, tuple[int, ...]]] = {-1: (0.0, ())}
    for node, (parent, ok, prob) in enumerate(zip(tree.parents.tolist(), accepted, probs.tolist(), strict=True)):
        if ok and parent in paths:
            likelihood, path = paths[parent]
            paths[node] = (likelihood + float(np.log(prob)), (*path, node))
            best = max(best, (len(path) + 1, *paths[node]), key=lambda candidate: candidate[:2])
    return best[2]
