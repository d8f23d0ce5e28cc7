"""The exact output distribution: enumerates a drafter's draws and integrates over the judge's uniforms.

- `drawing`: a toy target and draft model, plans of drafts, and all possible draws for them.
- `judging`: a strategy's result for each draw.

The judge is a black box: a function from uniforms to tokens. Bisection finds the points at which its outcome changes.
It runs for each node's uniform and for the residual's, in one batch of many sessions. One or two steps may leave tokens
undecided. These are completed with the target's own distribution, as later steps would do. The joint distribution of
the first tokens must then be the target's. `error` returns the largest difference. A strategy must take its random
numbers from the given `draws`.
"""

from specq.testing.exact.drawing import DrawnDraft, ExactWorld, drafts, point, sampled
from specq.testing.exact.judging import emitted, error, joint_distribution

__all__ = [
    "DrawnDraft",
    "ExactWorld",
    "drafts",
    "emitted",
    "error",
    "joint_distribution",
    "point",
    "sampled",
]
