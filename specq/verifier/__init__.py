"""The verifier: sessions, their draft trees, and the step that checks them.

    core                     messages of the broker in, verdicts out, one engine inside
    session, draft_tree      what is committed, and the unverified nodes below it; lanes: where the nodes came from
    scheduler, step_curve    which nodes share the next forward pass, and what a pass costs
    kv_admission             which sessions have room in the engine
    colocated, round_choice  a drafter in the verifier's own process
    verdicts, session_stats  what is reported of a round

In: Open, Draft, Close. Out: Verdict. Time is an argument; nothing here opens a socket.
"""

from specq.verifier.colocated import ColocatedDrafter
from specq.verifier.core import Verifier
from specq.verifier.step_curve import StepCurve

__all__ = ["ColocatedDrafter", "StepCurve", "Verifier"]
