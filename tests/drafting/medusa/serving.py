"""A verifier of the toy text with heads."""

from __future__ import annotations

from typing import Any

from specq.drafting.medusa.source import MedusaSource
from specq.protocol import (
    Speculation,
)
from specq.testing.conformance.sources import Serving
from specq.testing.toy_drafters import ToyHeads

ASYNC = Speculation()


def serving(heads: ToyHeads, tree: tuple[tuple[int, ...], ...] = (), **options: Any) -> tuple[Serving, MedusaSource]:
    source = MedusaSource(heads, tree)
    return Serving([source], lambda verifier: None, **options), source


CHOICES = "[(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 0, 0, 1), (3,)]"  # as Medusa's choices are written
