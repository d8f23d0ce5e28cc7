"""What drafts beside the remote drafters, made of a verifier's configuration.

Rule: modules of sources are imported when their source is made, so a verifier without a draft model needs none of its
libraries.
"""

from __future__ import annotations

from collections.abc import Iterator

from specq.protocol import COLOCATED, EAGLE, LOOKAHEAD, MEDUSA, SUFFIX
from specq.runtime import resolve
from specq.verifier.sources.interface import DraftSource, Setup

SOURCES = {
    COLOCATED: "specq.drafting.draft_model.making:make",
    MEDUSA: "specq.drafting.medusa.source:make",
    EAGLE: "specq.drafting.eagle3.source:make",
    SUFFIX: "specq.drafting.suffix.source:make",
    LOOKAHEAD: "specq.drafting.lookahead.source:make",
}


def make_sources(setup: Setup) -> Iterator[DraftSource]:
    """Yield the sources that the configuration asks for, in the order in which they are asked; ConfigError where one
    does not fit the target."""
    for name in SOURCES:
        source = resolve("draft source", SOURCES, name)(setup)
        if source is not None:
            yield source
