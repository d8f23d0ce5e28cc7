"""What a draft worker does before it registers."""

import numpy as np
import pytest

from specq.config.sections import DraftConfig
from specq.drafting import DRAFTERS, DrafterSpec
from specq.drafting.vocabulary import RetellingDrafter
from specq.processes.draft import build_worker
from specq.protocol import ConfigError
from specq.protocol.messages import Assign
from specq.protocol.params import SamplingParams
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy_drafters import ToyProposer
from specq.text import tokenizer_hash


class Counting(ToyProposer):
    """Keeps the number of rows, and the temperatures, of each pass."""

    def __init__(self, model: str, **options: object) -> None:
        super().__init__()
        self.passes = []

    def expand(self, requests):
        rows = [len(self.contexts[r.session_id]) if r.node_id < 0 else 1 for r in requests]
        self.passes.append((sum(rows), {self.params[r.session_id].temperature for r in requests}))
        return super().expand(requests)


COUNTING = DrafterSpec(Counting)


@pytest.fixture(name="drafter")
def _drafter(monkeypatch):
    monkeypatch.setitem(DRAFTERS, "counting", f"{__name__}:COUNTING")
    return build_worker(DraftConfig(model="tiny", proposer="counting"))


def test_it_has_drafted_in_all_ways_that_differ(drafter):
    """Few and many rows, with and without noise: all GPU kernels for them are compiled."""
    passes = drafter.drafter.passes
    assert {0.0, 0.8} == {temperature for _, temperatures in passes for temperature in temperatures}
    for low, high in ((1, 1), (2, 16), (17, 32), (33, 512)):
        assert any(low <= rows <= high for rows, _ in passes), (low, high)


def test_a_closed_session_leaves_no_state(drafter):
    """No session, no acceptance statistics, and no pass that the broker would take for work."""
    assert drafter.drafter.contexts == {}
    assert (drafter.sessions, drafter.acceptance_stats, drafter.num_passes) == ({}, {}, 0)
    context, params = np.array([5, 6], np.int32), SamplingParams()
    drafter.handle(Assign(session_id=1, epoch=1, lane=0, prompt_len=2, params=params, token_ids=context))
    assert [draft.session_id for draft in drafter.step()] == [1]


# --- a target of another vocabulary -----------------------------------------------------------------------------------


@pytest.fixture
def other_target(tmp_path):
    """A model with only a configuration and a tokenizer."""
    for name, text in (tokenizer_files() | {"config.json": "{}"}).items():
        (tmp_path / name).write_text(text, "utf-8")
    return str(tmp_path)


@pytest.mark.parametrize("vocabulary", ["shared", "text"])
def test_it_drafts_for_a_target_of_another_vocabulary(vocabulary, other_target):
    """It shows the target's tokenizer, and drafts in its tokens."""
    drafter = build_worker(DraftConfig(model="tiny", vocabulary=vocabulary, target=other_target, device="cpu"))
    assert isinstance(drafter.drafter, RetellingDrafter)
    info = drafter.drafter.info
    assert (info.tokenizer_hash, info.num_tokens) == (tokenizer_hash(tokenizer_files()["tokenizer.json"]), 350)
    context, params = np.array([1, 40, 50], np.int32), SamplingParams()
    drafter.handle(Assign(session_id=1, epoch=1, lane=0, prompt_len=3, params=params, token_ids=context))
    [draft] = drafter.step()
    assert draft.token_ids.max() < 350


def test_another_tokenizer_is_refused_and_the_error_shows_the_overlap(other_target):
    with pytest.raises(ConfigError) as refused:
        build_worker(DraftConfig(model="tiny", target=other_target, device="cpu"))
    assert "draft model tiny (4096 tokens, tokenizer " in str(refused.value)
    assert "shared drafts only tokens that both have (86% of the target's 350 tokens); text turns its drafts" in str(
        refused.value
    )


def test_another_vocabulary_needs_the_targets_name():
    with pytest.raises(ConfigError, match=r"vocabulary is text, which needs the target's tokenizer; set draft\.target"):
        build_worker(DraftConfig(model="tiny", vocabulary="text", device="cpu"))


@pytest.mark.parametrize("config", [{"model": "tiny", "target": "tiny"}, {"proposer": "ngram", "target": "tiny"}])
def test_a_shared_vocabulary_needs_no_retokenizing_drafter(config):
    drafter = build_worker(DraftConfig(vocabulary="shared", device="cpu", **config))
    assert not isinstance(drafter.drafter, RetellingDrafter)


def test_a_target_without_a_tokenizer_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}", "utf-8")
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json, so its tokens cannot be compared"):
        build_worker(DraftConfig(model="tiny", vocabulary="text", target=str(tmp_path), device="cpu"))


@pytest.mark.parametrize(("width", "least"), [(8, 282), (2, 282), (20, 414)])
def test_too_few_kv_slots_are_refused_with_the_fewest_that_do(width, least, capsys):
    """With that number, all drafts at its start succeed."""
    options = {"model": "tiny", "device": "cpu", "width": width}
    with pytest.raises(
        ConfigError, match=rf"tiny has {least - 1} KV slots \(--kv-slots\); give at least {least}, or 0"
    ):
        build_worker(DraftConfig(kv_slots=least - 1, **options))
    capsys.readouterr()
    build_worker(DraftConfig(kv_slots=least, **options))
    assert "session_failed" not in "".join(capsys.readouterr())
