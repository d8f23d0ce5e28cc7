"""A small target that decodes with Medusa heads as the draft model of a larger one, in real processes: the text stays
the larger one's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specq import Client
from specq.config.loading import load
from specq.config.values import free_address
from specq.engines import describe
from specq.models import resolve_model
from specq.processes.up import Group, members
from specq.protocol import EngineError
from specq.testing.checkpoints_heads import make_heads
from tests.end_to_end.test_parallel_model import READY_S, check_point_masses, check_texts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = resolve_model("tiny", "draft")  # a target like any other, of two layers


def make_random_heads(directory: Path, hidden: int) -> str:
    info = describe(
        Path(SMALL), engine="torch", name="small", dtype="float32", vocab_size=4096, max_length=2048, kv_slots=0
    )
    return str(make_heads(directory, hidden, tokenizer=(info.num_tokens, info.tokenizer_hash)))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random ones: what they guess is nonsense, and what the small target says is as good as ever."""
    return make_random_heads(tmp_path_factory.mktemp("heads"), 192)


def start(heads: str) -> Group:
    config = load()
    config = replace(
        config,
        up=replace(config.up, drafters=1),
        broker=replace(config.broker, bind=free_address()),
        target=replace(config.target, model="tiny", drafts="always", prompt_lookup="none"),
        draft=replace(config.draft, model=SMALL, heads=heads, nice=0),
    )
    return Group(members(config, ["--log-level", "error"]))


def test_text_is_the_targets_and_drafts_are_accepted(heads: str) -> None:
    """As of a parallel draft model; drawn drafts come to their end, too."""
    with start(heads) as group:
        group.wait_ready(READY_S)
        with Client(group.address) as client:
            check_texts(client, colocated=False)
            check_point_masses(client)


def test_heads_of_another_model_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By the draft worker, before it drafts, with the reason."""
    with start(make_random_heads(tmp_path / "heads", 256)) as group, pytest.raises(EngineError, match="status 2"):
        group.wait_ready(READY_S)
    assert "take hidden states of size 256; those of" in capfd.readouterr().err
