"""The verifier: sessions, their draft trees, and the step that checks them.

    core        one engine inside; `step` shows a step's way
    inbox       what is done with each message of the broker
    sessions/   the open sessions: what is committed, who takes part in the next step, who has room in the engine;
                grafting: how drafts come onto their trees
    trees/      the unverified nodes of all sessions
    sources/    what drafts: remote drafters, suffix decoding, a colocated draft model
    step/       planner, plan, choice of nodes, steps in flight, commit, verdicts
    control/    what is learned of steps, and decided by it (`controller` is its front): which sources are used, when
                the next step begins, how many rows of prompts it has

In: Open, Draft, Ack, Close, FetchTokenizer. Out: Verdict, SessionFailed, TokenizerChunk. Time is an argument; nothing
here opens a socket.
"""

from specq.verifier.control.arms import REMOTE, SUFFIX
from specq.verifier.control.step_curve import StepCurve, profiled_rows, step_curves
from specq.verifier.core import Verifier
from specq.verifier.sources import (
    SOURCES,
    Budget,
    ColocatedDrafter,
    Computed,
    DraftBatch,
    DraftSource,
    EagleDrafter,
    LookaheadDecoder,
    Setup,
    SuffixDecoder,
    make_sources,
    usual_sizes,
)
from specq.verifier.step.verdicts import NO_REPORTS, Reports

__all__ = [
    "NO_REPORTS",
    "REMOTE",
    "SOURCES",
    "SUFFIX",
    "Budget",
    "ColocatedDrafter",
    "Computed",
    "DraftBatch",
    "DraftSource",
    "EagleDrafter",
    "LookaheadDecoder",
    "Reports",
    "Setup",
    "StepCurve",
    "SuffixDecoder",
    "Verifier",
    "make_sources",
    "profiled_rows",
    "step_curves",
    "usual_sizes",
]
