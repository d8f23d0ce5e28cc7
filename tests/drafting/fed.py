"""An `eagle3` proposer whose sessions have hidden states of their first tokens from the beginning, and none later."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specq.drafting import PROPOSERS
from specq.drafting.eagle3.remote import EagleTrees
from specq.protocol import Int32Array, SamplingParams
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle

HIDDEN = 40
NUM_KNOWN = 7  # rows of states: as many as the context of the conformance suite has places behind its first token


class Fed:
    """Fulfils `Proposer`."""

    def __init__(self, proposer: EagleTrees) -> None:
        self.proposer, self.info = proposer, proposer.info
        self.expand, self.close, self.commit = proposer.expand, proposer.close, proposer.commit

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        self.proposer.open(session_id, token_ids, params)
        states = np.random.default_rng(5).normal(0, 1, (NUM_KNOWN, self.proposer.width)).astype(np.float32)
        self.proposer.observe(session_id, 1, states)


def make_trees(directory: Path, **options: object) -> EagleTrees:
    """Return the proposer of the table with a random head for a random target."""
    target = make_checkpoint("llama", directory / "target")
    heads = make_eagle(directory / "heads", eagle_shape_of(HIDDEN, VOCAB, 23, layers=(0, 1, 2)))
    made = PROPOSERS.resolve("eagle3").make(str(heads), target=str(target), device="cpu", **options)
    assert isinstance(made, EagleTrees)
    return made
