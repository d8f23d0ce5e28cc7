"""A block drafter's trees that a step verifies before the host has read them: the text is the target's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specq.drafting.block.drafter import BlockHead
from specq.drafting.block.network import load_block
from specq.drafting.block.source import BlockSource
from specq.drafting.trees.grown_trees import SHAPES
from specq.drafting.trees.interface import TreeRequest
from specq.protocol import ModelInfo, SamplingParams
from specq.testing.checkpoints_block import block_shape_of, make_block
from specq.verifier import Verifier
from specq.verifier.sources import Followed
from tests.drafting.eagle3.test_unread_texts import DEVICES, plain, serve, tiny
from tests.drafting.eagle3.unread import CURVE, is_read_as_on_device, noted
from tests.engines.test_overlap import make_engine
from tests.replaying import StandIn

__all__ = ["plain", "tiny"]  # fixtures


def make_head(tiny: Path, directory: Path, info: ModelInfo, device: str, *, is_recorded: bool = True) -> BlockHead:
    """Return a random drafter of 300 tokens."""
    about = {"num_tokens": info.num_tokens, "tokenizer_hash": info.tokenizer_hash}
    made = make_block(directory, block_shape_of(256, info.vocab_size, (1, 5, 8), **about), range(300))
    where = device[:4].strip()
    return BlockHead(
        load_block(str(made), str(tiny), info, where), StandIn() if is_recorded and where == "cpu" else None
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_texts_are_the_targets_own(
    tiny: Path, plain: dict[int, list[int]], tmp_path: Path, device: str, mode: str
) -> None:
    """Greedy and sampled, of sessions that come and are closed while they are drafted."""
    engine, count = make_engine(tiny, device, overlaps=True), 5
    head = make_head(tiny, tmp_path, engine.info, device)
    source = BlockSource(head, head.num_places)
    unread, lengths = noted(source), list[int]()
    verifier = Verifier(
        engine, CURVE, [source], incarnation=1, max_sessions=64, max_step_rows=512, measures_drafts=False
    )
    found = serve(verifier, mode, count, closes=mode == "async", lengths=lengths)
    ended = [i for i in range(count) if i or mode == "sync"]
    assert {i: found[i] for i in ended} == {i: plain[i] for i in ended}
    assert found[0] == plain[0][: len(found[0])]
    assert len(unread) > 10 or mode == "sync"


@pytest.mark.parametrize("is_recorded", [False, True], ids=["as needed", "recorded"])
def test_trees_are_on_the_device_as_they_are_read(tiny: Path, tmp_path: Path, *, is_recorded: bool) -> None:
    """Where passes are recorded, level sizes were given, and the device ranks the tokens of all texts."""
    engine = make_engine(tiny, "cpu", overlaps=False)
    head = make_head(tiny, tmp_path, engine.info, "cpu", is_recorded=is_recorded)
    assert head.runs_beside_host == is_recorded
    assert head.limit_vocab <= engine.info.vocab_size
    states = torch.randn(40, head.drafter.network.fc.in_features)
    head.observe(states, [Followed(i, 1, [5 + i, 6, 7], [i, 10 + i, 20 + i]) for i in range(3)])
    sizes = SHAPES[-1][: head.num_places]
    sampled = [SamplingParams(temperature=0.8 * (i % 2), seed=i) for i in range(3)]
    sized = TreeRequest(range(3), sampled, len(sizes), None, -9.0, sizes)
    cut = sized._replace(params=[SamplingParams(temperature=0.8, top_k=3), *sampled[1:]])
    for request, is_there in ((sized, is_recorded), (sized._replace(level_sizes=()), False), (cut, False)):
        assert is_read_as_on_device(head, request) == is_there
