"""Heads that draft trees beside a real model: texts are the target's, token for token, whatever they draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specq.config import TargetConfig
from specq.drafting import make_sources
from specq.drafting.block.drafter import BlockHead
from specq.drafting.block.network import load_block
from specq.drafting.block.source import BlockSource
from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.eagle3.source import EagleSource
from specq.drafting.medusa.drafter import Medusa
from specq.drafting.medusa.network import load_heads
from specq.drafting.medusa.source import MedusaSource
from specq.drafting.trees.source import TreeSource
from specq.engines.torch.engine import TorchEngine
from specq.protocol import ConfigError, Open, SamplingParams, Speculation, Verdict
from specq.testing.checkpoints_block import block_shape_of, make_block
from specq.testing.checkpoints_eagle import eagle_shape_of, make_eagle
from specq.verifier import Setup, StepCurve, Verifier
from tests.drafting.medusa.test_medusa import _open, random_heads, texts, tiny
from tests.drafting.trees.drafting import counting
from tests.replaying import StandIn

__all__ = ["random_heads", "tiny"]  # fixtures

ASYNC = Speculation()
CURVE = StepCurve([1, 64], [0.005, 0.006])
Make = Callable[[TorchEngine], TreeSource]


@pytest.fixture(scope="module")
def about(tiny: str) -> dict[str, Any]:
    """What a head says of its target."""
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    return {"vocab": info.vocab_size, "num_tokens": info.num_tokens, "tokenizer_hash": info.tokenizer_hash}


@pytest.fixture(scope="module")
def random_eagle(about: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = eagle_shape_of(256, draft_vocab=300, **about)
    return make_eagle(tmp_path_factory.mktemp("eagle"), shape, embedding=False, scale=0.05)


@pytest.fixture(scope="module")
def random_block(about: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = block_shape_of(256, layers=(1, 5, 8, 11), **about)
    return make_block(tmp_path_factory.mktemp("block"), shape, range(0, 3000, 10), scale=0.05)


@pytest.fixture(params=["eagle3", "eagle3, recorded", "block", "block, recorded", "medusa"])
def make(request: pytest.FixtureRequest, tiny: str, random_eagle: Path, random_block: Path, random_heads: Path) -> Make:
    """Return what makes the source of a random head."""

    def of_block(engine: TorchEngine) -> TreeSource:
        replays = StandIn() if request.param == "block, recorded" else None
        head = BlockHead(load_block(str(random_block), tiny, engine.info, "cpu"), replays)
        return BlockSource(head, head.num_places)

    def of_eagle(engine: TorchEngine) -> TreeSource:
        replays = StandIn() if request.param == "eagle3, recorded" else None
        return EagleSource(Eagle(load_eagle(str(random_eagle), tiny, engine.info, "cpu"), replays))

    def of_medusa(engine: TorchEngine) -> TreeSource:
        return MedusaSource(Medusa(load_heads(str(random_heads), tiny, engine.info, "cpu"), engine.info.num_tokens))

    return {"eagle3": of_eagle, "block": of_block, "medusa": of_medusa}[request.param.split(",")[0]]


def test_a_random_head_changes_no_text(tiny: str, make: Make) -> None:
    """Greedy and sampled, sync and async, best first and in trees, several at once: that of plain decoding, token for
    token."""
    ways = [
        (SamplingParams(max_tokens=24, temperature=temperature, seed=7 * i, ignore_eos=True, top_k=top_k), speculation)
        for i, speculation in enumerate((ASYNC, Speculation(mode="sync"), Speculation(tree=((0, 0, 1), (1,), (2, 0)))))
        for temperature, top_k in ((0.0, 0), (0.8, 0), (0.8, 3))
    ]
    prompts = [[5 + i, 90, 17 * i + 3, 1000, 44] for i in range(len(ways))]
    jobs = [_open(i, params, way, prompts[i]) for i, (params, way) in enumerate(ways)]
    plain = [replace(job, speculation=Speculation(mode="plain")) for job in jobs]
    drafted = dict[str, int]()
    found = texts(tiny, counting(make, drafted), jobs)
    assert found == texts(tiny, lambda engine: [], plain)
    assert drafted["nodes"] > 200


def test_sessions_come_and_go(tiny: str, make: Make) -> None:
    """Jobs begin while others run, end, and their ids are used again."""
    engine = TorchEngine(tiny, device="cpu", kv_slots=2048)
    drafted = dict[str, int]()
    verifier = Verifier(engine, CURVE, counting(make, drafted)(engine), incarnation=1, measures_drafts=False)
    jobs, found = list[Open](), dict[tuple[int, int], list[int]]()
    for turn in range(200):
        if turn % 4 == 0 and turn < 60:
            session_id, epoch = (turn // 4) % 4, 1 + turn // 16
            params = SamplingParams(
                max_tokens=9 + turn % 7, temperature=0.8 * (turn % 8 == 0), seed=turn, ignore_eos=True
            )
            job = replace(_open(session_id, params, ASYNC, [5 + turn, 9, 700, 3]), epoch=epoch)
            verifier.handle(job, 0.0)
            jobs.append(job)
            found[session_id, epoch] = []
        verifier.begin(0.0)
        for verdict in verifier.step(lambda: 0.0):
            assert isinstance(verdict, Verdict)
            found[verdict.session_id, verdict.epoch] += verdict.token_ids.tolist()
        verifier.heartbeat()
    plain = [replace(job, session_id=i, speculation=Speculation(mode="plain")) for i, job in enumerate(jobs)]
    expected = texts(tiny, lambda engine: [], plain)
    assert {i: found[job.session_id, job.epoch] for i, job in enumerate(jobs)} == {
        i: text[: len(found[jobs[i].session_id, jobs[i].epoch])] for i, text in expected.items()
    }
    assert sum(map(len, found.values())) > 100
    assert drafted["nodes"] > 100


def test_a_head_is_made_of_a_configuration(
    tiny: str, random_eagle: Path, random_block: Path, random_heads: Path
) -> None:
    """By what its directory holds; a tree deeper than the chain, or than a block, is refused."""
    info = TorchEngine(tiny, device="cpu", kv_slots=64).info
    config = TargetConfig(model="tiny", heads=str(random_eagle), heads_tree="[[0,0],[1]]", prompt_lookup="none")
    setup = Setup(config, info, "", "cpu", lambda line: None, target=tiny, heads=str(random_eagle))
    source, _ = make_sources(setup)
    assert isinstance(source, EagleSource)
    assert source.layers == (1, 5, 8)
    block, _ = make_sources(setup._replace(heads=str(random_block)))
    assert isinstance(block, BlockSource)
    assert block.layers == (1, 5, 8, 11)
    other, _ = make_sources(setup._replace(heads=str(random_heads)))
    assert isinstance(other, MedusaSource)
    assert [one.name for one in make_sources(setup._replace(heads=""))] == ["grammar"]
    deeper = replace(config, heads_tree="[[0,0,0]]", chain=2)
    with pytest.raises(ConfigError, match=r"3 deep; target.chain is 2, so paths may have 2 ranks at most"):
        list(make_sources(setup._replace(config=deeper)))
    longer = replace(config, heads_tree="[[0,0,0,0,0]]", heads=str(random_block))
    with pytest.raises(ConfigError, match=r"5 deep; this block drafter predicts 4 tokens, so paths may have 4 ranks"):
        list(make_sources(setup._replace(config=longer, heads=str(random_block))))
