"""The exact distribution of what is emitted: enumerates a drafter's draws and integrates over the judge's uniforms.

    drawing    a toy target and draft model, plans of drafts, and all that may be drawn for them
    judging    what a strategy makes of each draw

The judge is a black box: a function from uniforms to tokens. Where its outcome changes is found by bisection, for each
node's uniform and for the residual's, all at once in one batch of many sessions. What one step, or two, leave unsaid is
completed with the target's own distribution, as later steps would; the joint distribution of the first tokens must then
be the target's: `error` says by how much it is not. A strategy must take its random numbers from the `draws` it is
given.
"""

from specq.testing.exact.drawing import DrawnChild, DrawnDraft, ExactWorld, drafts, point, sampled
from specq.testing.exact.judging import emitted, error, joint_distribution

__all__ = [
    "DrawnChild",
    "DrawnDraft",
    "ExactWorld",
    "drafts",
    "emitted",
    "error",
    "joint_distribution",
    "point",
    "sampled",
]
