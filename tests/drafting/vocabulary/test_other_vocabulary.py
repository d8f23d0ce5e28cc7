"""A colocated draft model whose vocabulary is not the target's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specq.config import TargetConfig
from specq.drafting.draft_model import making
from specq.drafting.draft_model.contexts import Contexts
from specq.drafting.draft_model.making import make
from specq.drafting.draft_model.source import ColocatedSource
from specq.drafting.interface import NodeChains
from specq.models import resolve_model
from specq.protocol import ConfigError, SamplingParams
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import toy_info
from specq.text import tokenizer_hash
from specq.verifier.sources.interface import Setup

HASH = tokenizer_hash(tokenizer_files()["tokenizer.json"])
INFO = replace(toy_info(), name="other", num_tokens=350, vocab_size=352, tokenizer_hash=HASH)


@pytest.fixture
def target(tmp_path: Path) -> str:
    """What of a target is read: its tokenizer."""
    for name, text in (tokenizer_files() | {"config.json": "{}"}).items():
        (tmp_path / name).write_text(text, "utf-8")
    return str(tmp_path)


def made(target: str, vocabulary: str) -> ColocatedSource:
    config = TargetConfig(draft_model="tiny", vocabulary=vocabulary, max_sessions=2, chain=3)
    draft = resolve_model("tiny", "draft")
    drafter = make(Setup(config, INFO, draft, "cpu", bool, target=target, draft_tokenizer=draft))
    assert drafter is not None
    return drafter


def test_by_default_it_is_refused_with_what_is_shared(target: str) -> None:
    with pytest.raises(
        ConfigError, match=r"tokenizer of any target: other .* both have \(86% of the target's 350 tokens\)"
    ):
        made(target, "same")


@pytest.mark.parametrize("vocabulary", ["shared", "text"])
def test_it_drafts_chains_and_trees_in_the_targets_tokens(target: str, vocabulary: str) -> None:
    drafter = made(target, vocabulary)
    assert isinstance(drafter.chains, NodeChains)
    assert drafter.shaped is not None
    assert {drafter.chains.info.tokenizer_hash, drafter.shaped.worker.drafter.info.tokenizer_hash} == {HASH}
    drafter.chains.open(1, np.array([1, 40, 50], np.int32), SamplingParams())
    assert drafter.chains.start([1], 3, 2).collect().token_ids.max() < 350


@pytest.mark.parametrize("records", [False, True])
def test_where_passes_are_recorded_those_of_many_sessions_are_run_before_any_comes(
    target: str, monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    warmed, measured = list[int](), list[list[int]]()
    monkeypatch.setattr(Contexts, "recorded_sizes", (1, 16) if records else ())
    monkeypatch.setattr(Contexts, "warm_up", lambda _, most: warmed.append(most))
    monkeypatch.setattr(making, "level_times", lambda _, sizes, *__: measured.append(sizes) or [0.001] * len(sizes))
    config = TargetConfig(draft_model="tiny", vocabulary="text", max_sessions=200)
    draft = resolve_model("tiny", "draft")
    assert make(Setup(config, INFO, draft, "cpu", bool, target=target, draft_tokenizer=draft)) is not None
    assert warmed == [200]
    assert measured[0][-2:] == ([192, 200] if records else [1])
