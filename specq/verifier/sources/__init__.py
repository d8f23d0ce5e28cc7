"""Sources of drafts for a verifier's sessions, and the verifier parts that sources need.

    interface, source_set     the interface of a source, and all sources of a verifier together.
    mailbox                   remote drafts, and the limit on their time.
    activations               hidden states for remote drafters.
    unread                    drafts that are verified before the host has read them.
    source_clock              the seconds and the results of each source in a step.

The sources themselves are `source.py` of each method in `specq.drafting`. Of the verifier they import only this
package. To add one, write a file with a subclass of `DraftSource` and a function `make`. Add their lines to
`specq.drafting.table` and `specq.protocol.origins`. Every source runs through the suite of
`specq.testing.conformance.sources`.
"""

from specq.verifier.control.choices import SourceTraits
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.grafting import DraftBatch, batch_of, batch_of_chains
from specq.verifier.sessions.session import Session, longest_chain
from specq.verifier.sources.interface import (
    UNBOUNDED,
    Budget,
    ComputedDrafts,
    DraftSource,
    Followed,
    Setup,
    accepted_paths,
    followed_rows,
)
from specq.verifier.sources.source_set import SourceSet
from specq.verifier.sources.unread import UnreadLayout, hung_unread, may_be_unread, put_tokens
from specq.verifier.step.node_choice import FLOOR, promised
from specq.verifier.step.rounds import Round, Rounds
from specq.verifier.step.verdicts import verdict_of
from specq.verifier.trees import NEXT_IDS, NONE, DraftTrees

__all__ = [
    "FLOOR",
    "NEXT_IDS",
    "NONE",
    "UNBOUNDED",
    "Budget",
    "ComputedDrafts",
    "DraftBatch",
    "DraftSource",
    "DraftTrees",
    "Followed",
    "Round",
    "Rounds",
    "Session",
    "Setup",
    "SourceSet",
    "SourceTraits",
    "StepCurve",
    "UnreadLayout",
    "accepted_paths",
    "batch_of",
    "batch_of_chains",
    "followed_rows",
    "hung_unread",
    "longest_chain",
    "may_be_unread",
    "promised",
    "put_tokens",
    "verdict_of",
]
