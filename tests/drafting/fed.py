"""A drafter whose sessions have hidden states of their first tokens from the beginning, and none later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specq.drafting import DRAFTERS, Children, Drafter, Expansion
from specq.drafting.trees.remote import FedDrafter
from specq.protocol import Int32Array, SamplingParams
from specq.testing.checkpoints import VOCAB, make_checkpoint
from specq.testing.checkpoints_block import block_shape_of, make_block
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle

HIDDEN = 40
NUM_KNOWN = 7  # rows of states: as many as the context of the conformance suite has places behind its first token


class Fed(Drafter):
    """See the module."""

    def __init__(self, trees: FedDrafter[Any]) -> None:
        self.trees, self.info = trees, trees.info

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        self.trees.open(session_id, token_ids, params)
        states = np.random.default_rng(5).normal(0, 1, (NUM_KNOWN, self.trees.width)).astype(np.float32)
        self.trees.observe(session_id, 1, states)

    def close(self, session_id: int) -> None:
        self.trees.close(session_id)

    def commit(self, session_id: int, token_ids: Int32Array, path: Sequence[int]) -> None:
        self.trees.commit(session_id, token_ids, path)

    def expand(self, requests: Sequence[Expansion]) -> list[Children]:
        return self.trees.expand(requests)


def make_trees(directory: Path, name: str = "eagle3", **options: object) -> FedDrafter[Any]:
    """Return a drafter of the table with a random head for a random target."""
    target = make_checkpoint("llama", directory / "target")
    if name == "eagle3":
        heads = make_eagle(directory / "heads", eagle_shape_of(HIDDEN, VOCAB, 23, layers=(0, 1, 2)))
    else:
        heads = make_block(directory / "heads", block_shape_of(HIDDEN, VOCAB, (0, 2), block_size=32), range(0, 92, 4))
    made = DRAFTERS.resolve(name).make(str(heads), target=str(target), device="cpu", **options)
    assert isinstance(made, FedDrafter)
    return made
