"""Sources of drafts: whatever drafts for a verifier's sessions.

    interface, source_set     what a source is, and a verifier's sources together
    mailbox                   remote drafters
    lookup                    what a session's text repeats
    colocated                 a draft model in the verifier's process; round_choice: how deep; offered_chains: what became of it
    table                     which sources a configuration asks for

To add one: a file with a class that fulfils `DraftSource` and a function `make`, and one line in `SOURCES`. Every source runs
through the suite of `specq.testing.conformance.sources`.
"""

from specq.verifier.grafting import DraftBatch
from specq.verifier.sources.interface import Budget, Computed, DraftSource, Setup
from specq.verifier.sources.lookup import PromptLookup
from specq.verifier.sources.source_set import SourceSet
from specq.verifier.sources.table import SOURCES, make_sources

__all__ = [
    "SOURCES",
    "Budget",
    "Computed",
    "DraftBatch",
    "DraftSource",
    "PromptLookup",
    "Setup",
    "SourceSet",
    "make_sources",
]
