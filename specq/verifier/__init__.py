"""The verifier: sessions, their draft trees, and the step that checks them.

    core        messages of the broker in, verdicts out, one engine inside; inbox: what comes of each message
    sessions/   what is committed, who takes part in the next step,
    who has room in the engine; how drafts come onto trees
    trees/      the unverified nodes of all sessions
    sources/    what drafts: remote drafters, and what the methods of `specq.drafting` fulfil
    step/       which nodes share the next forward pass (plan, node_choice), steps in flight, what they commit, and what
                is reported of it
    control/    which sources are used, what a step may take, and when the next one begins

In: Open, Draft, Ack, Close, FetchTokenizer. Out: Verdict, SessionFailed, TokenizerChunk. Time is an argument; nothing
here opens a socket.
"""

from specq.verifier.control.background import MOST_SLOWDOWN
from specq.verifier.control.choices import Choice
from specq.verifier.core import Verifier
from specq.verifier.models.goodput import best_by_goodput
from specq.verifier.models.step_curve import StepCurve, profiled_rows, step_curves
from specq.verifier.sources import Budget, ComputedDrafts, DraftBatch, DraftSource, Setup
from specq.verifier.step.verdicts import NO_REPORTS, Reports

__all__ = [
    "MOST_SLOWDOWN",
    "NO_REPORTS",
    "Budget",
    "Choice",
    "ComputedDrafts",
    "DraftBatch",
    "DraftSource",
    "Reports",
    "Setup",
    "StepCurve",
    "Verifier",
    "best_by_goodput",
    "profiled_rows",
    "step_curves",
]
