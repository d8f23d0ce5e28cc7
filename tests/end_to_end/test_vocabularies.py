"""Draft workers of another vocabulary as real processes: the text stays the target's, and their drafts are accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specq import Client
from specq.config.loading import load
from specq.config.values import free_address
from specq.models import resolve_model
from specq.processes.up import Group, members
from specq.testing.checkpoints import make_renumbered

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
QUESTION = [{"role": "user", "content": "Tom has 3 boxes with 12 pencils each. How many pencils are there?"}]
READY_S = 120


@pytest.mark.parametrize("vocabulary", ["shared", "text"])
@pytest.mark.parametrize("colocated", [False, True], ids=["worker", "colocated"])
def test_text_is_the_targets_and_drafts_are_accepted(vocabulary: str, colocated: bool, tmp_path: Path) -> None:
    draft = str(make_renumbered(Path(resolve_model("tiny", "draft")), tmp_path))
    config = load()
    target = replace(config.target, model="tiny", drafts="always", prompt_lookup="none")
    if colocated:
        target = replace(target, draft_model=draft, vocabulary=vocabulary)
    config = replace(
        config,
        up=replace(config.up, drafters=0 if colocated else 1),
        broker=replace(config.broker, bind=free_address()),
        target=target,
        draft=replace(config.draft, model=draft, vocabulary=vocabulary, nice=0),
    )
    with Group(members(config, ["--log-level", "error"])) as group:
        group.wait_ready(READY_S)
        with Client(group.address) as client:
            for temperature in (0.0, 0.8):
                plain, drafted = (
                    client.generate(messages=QUESTION, max_tokens=40, temperature=temperature, seed=3, mode=mode)
                    for mode in ("plain", "sync")
                )
                assert drafted.token_ids == plain.token_ids
                if temperature == 0.0 or vocabulary == "shared":
                    assert drafted.stats["accepted_tokens"] > 8
