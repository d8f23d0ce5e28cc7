"""The verifier: sessions, their draft trees, and the step that checks them.

    core                      messages of the broker in, verdicts out, one engine inside
    session, history          what is committed; what penalties count
    open_sessions             all sessions in order of precedence, and which take part in the next step
    trees/                    the unverified nodes of all sessions
    sources/                  what drafts: remote drafters, and what the methods of `specq.drafting` fulfil
    grafting                  how drafts become nodes of the trees
    scheduler, shares, step_curve   which nodes share the next forward pass, and what a pass costs; choice_order: of
                                    sampled nodes
    flights, early_steps, waiting   steps in flight, and whether the next is launched before one has ended
    prefill_limit             how many rows of prompts a step has beside sessions that decode
    arms, load_level, window  which sources of drafts are used: those that raise the tokens a second
    source_clock, source_yields   what each source takes and brings by itself, and what that says of arms that were not
                                  tried
    even_chains               how long chains are where the engine is quicker if all are equally long
    kv_admission              which sessions have room in the engine
    rounds, verdicts          what a step commits to a session, and what is reported of it

In: Open, Draft, Ack, Close, FetchTokenizer. Out: Verdict, SessionFailed, TokenizerChunk. Time is an argument; nothing
here opens a socket.
"""

from specq.verifier.control.step_curve import StepCurve, profiled_rows, step_curves
from specq.verifier.core import Verifier
from specq.verifier.sources import Budget, ComputedDrafts, DraftBatch, DraftSource, Setup
from specq.verifier.step.verdicts import NO_REPORTS, Reports

__all__ = [
    "NO_REPORTS",
    "Budget",
    "ComputedDrafts",
    "DraftBatch",
    "DraftSource",
    "Reports",
    "Setup",
    "StepCurve",
    "Verifier",
    "profiled_rows",
    "step_curves",
]
