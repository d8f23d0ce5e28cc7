"""An EAGLE-3 head in a draft worker, over sockets: the text stays the target's, and what is drafted of its hidden
states reaches it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specq import Client
from specq.config.loading import load
from specq.config.values import free_address
from specq.engines import read_info
from specq.models import resolve_model
from specq.processes.up import Group, members
from specq.protocol import EngineError
from specq.testing.checkpoints_eagle import change_eagle, eagle_shape_of, make_eagle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
QUESTION = [{"role": "user", "content": "Tom has 3 boxes with 12 pencils each. How many pencils are there?"}]
READY_S = 120


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    """A head that is sure of what it says, so that it is sent."""
    info = read_info(Path(resolve_model("tiny", "target")))
    shape = eagle_shape_of(256, info.vocab_size, 300, num_tokens=info.num_tokens, tokenizer_hash=info.tokenizer_hash)
    return make_eagle(tmp_path / "heads", shape, embedding=False)


def start(heads: Path, *options: str, drafters: int = 1) -> Group:
    config = load()
    config = replace(
        config,
        up=replace(config.up, drafters=drafters),
        broker=replace(config.broker, bind=free_address()),
        target=replace(config.target, model="tiny", drafts="always", prompt_lookup="none"),
        draft=replace(config.draft, model=str(heads), proposer="eagle3", nice=0, engine_options=options),
    )
    return Group(members(config, ["--log-level", "error"]))


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_text_is_the_targets_and_drafts_are_verified(heads: Path, form: str) -> None:
    """In rounds, ahead of the verdicts, and in a shape of the job's own; greedy and sampled. Some drafts are verified
    before it is known that they are always wrong."""
    ways = ({"mode": "sync"}, {"mode": "async"}, {"mode": "sync", "tree": [[0, 0, 0], [0, 1], [1, 0], [2]]})
    num_drafted = 0
    with start(heads, f"activations={form}", "window=32") as group:
        group.wait_ready(READY_S)
        with Client(group.address) as client:
            for temperature in (0.0, 0.8):
                job = {
                    "messages": QUESTION,
                    "max_tokens": 60,
                    "ignore_eos": True,
                    "temperature": temperature,
                    "seed": 3,
                }
                plain = client.generate(mode="plain", **job)
                for way in ways:
                    result = client.generate(**way, **job)
                    assert result.token_ids == plain.token_ids
                    num_drafted += result.stats["draft_tokens"]
    assert num_drafted > 0


def test_a_head_for_another_target_is_refused(heads: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Before it drafts, with the reason."""
    change_eagle(heads, target_hidden_size=512)
    with start(heads) as group, pytest.raises(EngineError, match="status 2"):
        group.wait_ready(READY_S)
    assert "this head takes hidden states of size 512; those of tiny have 256" in capfd.readouterr().err
