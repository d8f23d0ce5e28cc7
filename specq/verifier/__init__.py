"""The verifier: sessions, their draft trees, and the step that checks them.

    core                      messages of the broker in, verdicts out, one engine inside
    session, history          what is committed; what penalties count
    trees                     the unverified nodes of all sessions
    grafting                  how a draft becomes nodes of a tree; prompt_lookup: what the text repeats
    scheduler, step_curve     which nodes share the next forward pass, and what a pass costs; choice_order: of sampled nodes
    arms                      whether remote drafters are listened to
    kv_admission              which sessions have room in the engine
    rounds, verdicts          what a step commits to a session, and what is reported of it
    colocated, round_choice   a drafter in the verifier's own process; offered_chains: what it drafts and what became of it

In: Open, Draft, Ack, Close, FetchTokenizer. Out: Verdict, SessionFailed, TokenizerChunk. Time is an argument; nothing here opens
a socket.
"""

from specq.verifier.colocated import ColocatedDrafter
from specq.verifier.core import Verifier
from specq.verifier.step_curve import StepCurve

__all__ = ["ColocatedDrafter", "StepCurve", "Verifier"]
