"""Sources of drafts: whatever drafts for a verifier's sessions.

    interface, source_set     what a source is, and a verifier's sources together
    mailbox                   remote drafters
    suffix                    what a session's text repeats, and shared_texts: earlier ones of the same owner
    lookahead                 n-grams that the target gives in rows of its own steps; lookahead_window: of one session
    text_drafts               what suffix and lookahead share
    colocated                 a draft model in the verifier's process; round_choice: how deep; offered_chains: what became of it
    medusa                    heads on the target's hidden states; rank_trees: the trees that they draft
    eagle                     an EAGLE-3 head on them and on its own; grown_trees: the trees that it grew, as drafts
    table                     which sources a configuration asks for

To add one: a file with a class that fulfils `DraftSource` and a function `make`, and one line in `SOURCES`. Every source runs
through the suite of `specq.testing.conformance.sources`.
"""

from specq.verifier.sessions.grafting import DraftBatch
from specq.verifier.sources.colocated import ColocatedDrafter
from specq.verifier.sources.eagle import EagleDrafter, usual_sizes
from specq.verifier.sources.interface import Budget, Computed, DraftSource, Setup
from specq.verifier.sources.lookahead import LookaheadDecoder
from specq.verifier.sources.source_set import SourceSet
from specq.verifier.sources.suffix import SuffixDecoder
from specq.verifier.sources.table import SOURCES, make_sources

__all__ = [
    "SOURCES",
    "Budget",
    "ColocatedDrafter",
    "Computed",
    "DraftBatch",
    "DraftSource",
    "EagleDrafter",
    "LookaheadDecoder",
    "Setup",
    "SourceSet",
    "SuffixDecoder",
    "make_sources",
    "usual_sizes",
]
