"""A block drafter in a draft worker: its drafts follow from the states that it receives, and change no text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specq.drafting import CONTEXT, Children, Expansion
from specq.drafting.block.drafter import BlockHead
from specq.drafting.block.network import load_block
from specq.drafting.block.remote import BlockTrees
from specq.engines.torch.engine import TorchEngine
from specq.protocol import BF16, SamplingParams
from specq.testing.checkpoints import make_checkpoint
from specq.testing.checkpoints_block import block_shape_of, make_block
from tests.drafting.block.test_block_drafter import INFO, KNOWN, SHAPE, Text
from tests.drafting.eagle3.test_eagle_remote import made, served, texts
from tests.drafting.medusa.test_medusa import tiny

__all__ = ["tiny"]  # a fixture

PLACES = SHAPE.num_places
FORM: dict[str, Any] = {"form": BF16, "window": 512}


def test_a_random_drafter_changes_no_text(tiny: str, tmp_path: Path) -> None:
    """Greedy and sampled, ahead of the verdicts and in rounds, several jobs at once."""
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    about = {"num_tokens": info.num_tokens, "tokenizer_hash": info.tokenizer_hash}
    heads = make_block(tmp_path, block_shape_of(256, info.vocab_size, (1, 5, 8), **about), range(300))
    plain = texts(served(made(tiny)))
    engine = made(tiny)
    world, trees = served(engine), BlockTrees(BlockHead(load_block(str(heads), tiny, info, "cpu")), engine.info, **FORM)
    world.add_drafter(b"d0", trees)
    drafted = texts(world)
    assert [job.token_ids for job in drafted] == [job.token_ids for job in plain]
    assert sum(int(str(job.stats["draft_tokens"])) for job in drafted) > 20


@pytest.fixture
def drafter(tmp_path: Path) -> BlockTrees:
    target = make_checkpoint("qwen2", tmp_path / "target")
    heads = make_block(tmp_path / "heads", SHAPE, KNOWN)
    return BlockTrees(BlockHead(load_block(str(heads), str(target), INFO, "cpu")), INFO, **FORM)


class Fed:
    """A session of a text whose states arrive as they are given."""

    def __init__(self, drafter: BlockTrees, text: Text, length: int) -> None:
        self.drafter, self.text, self.next_id = drafter, text, 0
        drafter.open(1, np.array(text.tokens[:length], np.int32), SamplingParams())

    def observe(self, first: int, end: int) -> None:
        """Give the states before the tokens at these positions."""
        self.drafter.observe(1, first, self.text.states[first - 1 : end - 1].numpy())

    def expand(self, node_id: int = CONTEXT) -> tuple[Children, list[int]]:
        """Return two children of a node, and their ids."""
        ids = [self.next_id, self.next_id + 1]
        self.next_id += 2
        (found,) = self.drafter.expand([Expansion(1, node_id, tuple(ids))])
        return found, ids

    def best(self, end: int, place: int) -> list[int]:
        """Return the two likeliest tokens of a block behind the first tokens, where their states are known."""
        own = BlockHead(self.drafter.head.drafter)
        own.observe(self.text.states, [self.text.part(1, 1, end)])
        return [KNOWN[i] for i in own.logits_of([1])[0, place].argsort(descending=True)[:2].tolist()]


def test_a_node_has_the_children_of_its_position(drafter: BlockTrees) -> None:
    """Down to the last place of the block, whatever is above a node; below it there is nothing."""
    fed = Fed(drafter, Text(3), 8)
    assert not fed.expand()[0].token_ids.size, "without states nothing is drafted"
    fed.observe(1, 8)
    level = [CONTEXT]
    for place in range(PLACES):
        found = [fed.expand(node_id) for node_id in level]
        assert [children.token_ids.tolist() for children, _ in found] == [fed.best(8, place)] * len(level)
        level = [node_id for _, ids in found for node_id in ids]
    assert not fed.expand(level[0])[0].token_ids.size


def test_committed_tokens_without_states_are_places_of_the_block(drafter: BlockTrees) -> None:
    """As many as it has. When their states arrive, the next block begins behind them."""
    fed = Fed(drafter, Text(4), 8)
    fed.observe(1, 8)
    first, _ = fed.expand()
    drafter.commit(1, np.array(fed.text.tokens[8:10], np.int32), [])
    assert fed.expand()[0].token_ids.tolist() == fed.best(8, 2)
    drafter.commit(1, np.array(fed.text.tokens[10:12], np.int32), [])
    assert not drafter.knows(1)
    assert not fed.expand()[0].token_ids.size
    fed.observe(8, 12)
    assert drafter.knows(1)
    assert fed.expand()[0].token_ids.tolist() == fed.best(12, 0)
    assert first.token_ids.tolist() == fed.best(8, 0)
