"""`specq train draft` makes a draft model for `tiny` that loads, fits and is measured, from a corpus of a few lines."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specq.engines.torch import load
from specq.protocol import ConfigError
from specq.testing.checkpoints_draft import MADE, draft_logits
from specq.text import TextCodec, load_tokenizer_files, tokenizer_hash
from specq.training.architecture import hidden_states
from specq.training.chat_prompts import chat_of, corpus_prompts
from specq.training.decoding import generate
from specq.training.draft import WARM_UP_STEPS, build_draft, principal, rate, save_draft
from specq.training.optimizer import build_optimizers
from specq.training.report import count_rounds
from specq.training.rollouts import join_rollouts, load_rollouts, save_rollouts
from tests.training.stages import TARGET, refusal, runner, write_corpus

SIZES = [
    *("--hidden-size=32", "--intermediate-size=48", "--num-layers=1", "--head-dim=16", "--embedding-rank=8"),
    *("--head-size=20", "--batch-tokens=128", "--seconds=1.5"),
]
SMALL = [
    *("--device=cpu", "--rollout-rows=3", "--rollout-tokens=6", "--rollout-seconds=60"),
    *("--bench-prompts=2", "--bench-tokens=6"),
]
pytestmark = pytest.mark.timeout(120)
run = runner("draft", [*SMALL, *SIZES])


def test_all_stages_make_a_draft_that_fits_its_target(places, output):
    loaded = load(str(places["out"]), device="cpu", kv_slots=64)
    tokenizer = load_tokenizer_files(TARGET)["tokenizer.json"]
    assert loaded.info.tokenizer_hash == tokenizer_hash(tokenizer)
    assert 1 < len(loaded.token_ids) <= 20
    assert "rollouts: 7 of 7 prompts" in output


def test_the_report_says_what_was_accepted(places, output):
    report = json.loads((places["work"] / "results.json").read_text())
    figures = report["acceptance"]["figs"]
    assert set(figures) == {"T=0", "T=0.8"}
    for lengths in figures.values():
        assert all(1 <= lengths[str(n)]["mean_accepted_length"] <= n + 1 for n in (1, 3, 4, 5, 8))


@pytest.mark.usefixtures("output")
def test_what_was_rolled_out_before_is_not_done_again(places):
    before = {path: path.stat().st_mtime_ns for path in (places["work"] / "rollouts").iterdir()}
    result = run(places, "rollouts")
    assert (result.exit_code, result.stdout) == (0, "== rollouts\n")
    assert {path: path.stat().st_mtime_ns for path in (places["work"] / "rollouts").iterdir()} == before


def test_rollouts_made_elsewhere_are_taken(places, tmp_path):
    """In the form of arrays tokens, prompt, answer; beside those of this run."""
    tokens = np.arange(10, 22, dtype=np.uint16)
    np.savez(tmp_path / "a.npz", tokens=tokens, prompt=np.array([2, 1]), answer=np.array([4, 5]), sampled=[True, False])
    save_rollouts(tmp_path / "b.npz", [([1, 2], [3]), ([4], [70_000, 6])])

    joined = join_rollouts([load_rollouts(tmp_path / name) for name in ("a.npz", "b.npz")])

    expected = [[*range(10, 16)], [*range(16, 22)], [1, 2, 3], [4, 70_000, 6]]
    assert [joined.rollout(i).tolist() for i in range(4)] == expected
    assert joined.answered().tolist() == [12, 13, 14, 15, 17, 18, 19, 20, 21, 3, 70_000, 6]
    assert joined.num_answered == 12


def test_a_broken_file_of_rollouts_is_named(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(ConfigError, match=r"a\.npz cannot be read as rollouts"):
        load_rollouts(tmp_path / "a.npz")


def test_a_target_elsewhere_is_refused(places):
    """What looks like a hub name is not fetched."""
    assert "some/model does not exist" in refusal(run(places, "--target=some/model", "rollouts"))


def test_what_is_written_says_what_was_trained(tmp_path, target):
    """The engine's arithmetic on the file is the trained network's on its own weights, but for 8 bits."""
    torch.manual_seed(0)
    ids = np.arange(0, 111, 3, dtype=np.int32)
    shape = replace(MADE, vocab_size=4096, num_tokens=4096, head_size=len(ids))
    network = build_draft(shape, target, ids)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    context = [5, 90, 17, 3, 1000]
    trained = network.lm_head(hidden_states(network, torch.tensor([context])))[0, -1]

    save_draft(network, shape, ids, tmp_path)

    torch.testing.assert_close(draft_logits(tmp_path, context)[ids], trained.detach(), atol=0.3, rtol=0.05)


def test_embeddings_keep_their_products_in_the_leading_directions():
    values = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)) @ torch.randn(4, 12)
    low = principal(values, 6)
    assert low.shape == (30, 6)
    torch.testing.assert_close(low @ low.T, values @ values.T, atol=1e-3, rtol=1e-3)


def test_layers_learn_by_muon_and_all_else_by_adamw(target):
    network = build_draft(replace(MADE, vocab_size=4096, head_size=5), target, np.arange(5, dtype=np.int32))
    muon, adamw = build_optimizers(network, 0.001, 0.01, matrix_lr=0.006)
    assert [group["peak_lr"] for group in (*muon.param_groups, *adamw.param_groups)] == [0.006, 0.001]
    others = {id(parameter) for parameter in adamw.param_groups[0]["params"]}
    named = [(name, parameter) for name, parameter in network.named_parameters() if id(parameter) in others]
    matrices = {name for name, parameter in named if parameter.ndim == 2}
    assert matrices == {"model.embed_tokens.weight", "model.embed_tokens.lift", "lm_head.weight"}


def test_the_rate_warms_up_holds_and_falls():
    assert rate(0, 0.0) == 1 / WARM_UP_STEPS
    assert rate(WARM_UP_STEPS, 0.2) == rate(10, 0.2) == 1
    assert rate(9999, 0.8) == pytest.approx(0.2 / 0.55)
    assert rate(9999, 1.0) == 0.01


def test_an_answer_ends_with_what_ended_it(target):
    """Also where padding is one of the end tokens. One that is cut short is the start of the whole one: nothing is put
    behind it, such as padding that would be an end."""
    prompts = [[5, 9, 70, 8], [300, 6, 7, 80, 90, 44, 12]]
    ways = {"num_new": 6, "temperatures": [0.0, 0.0]}
    free = generate(target, prompts, stops=[], pad_id=3, **ways)
    stops = [free[0][2], free[1][4]]

    answers = generate(target, prompts, stops=stops, pad_id=stops[0], **ways)

    for answer, whole in zip(answers, free, strict=True):
        end = min(whole.index(stop) for stop in stops if stop in whole)
        assert answer == whole[: end + 1]
    cut = generate(target, prompts, stops=[1], pad_id=1, goes_on=lambda num_said: num_said < 5, **ways)
    whole = generate(target, prompts, stops=[1], pad_id=1, **ways)
    assert cut == [answer[:5] for answer in whole]
    assert max(map(len, whole)) > 5


def test_rounds_are_counted_for_any_length():
    hits = [[True, True, True, False, True, True]]
    assert [count_rounds(hits, length).accepted_counts for length in (1, 2, 8)] == [(1, 1, 1), (2, 0, 2), (3, 2)]


def test_prompts_are_in_the_targets_own_template(tmp_path):
    chat = chat_of(TARGET, (1,))
    settings = SimpleNamespace(corpus=write_corpus(tmp_path / "corpus"), limit=2, is_split=False)
    prompts = corpus_prompts(settings, chat, np.random.default_rng(0))
    texts = [TextCodec(load_tokenizer_files(TARGET)).decode(ids, skip_special=False) for ids in prompts]
    assert len(texts) == 5  # at most two records of each shard
    assert any("Is 4 even?" in text and "look it up" not in text for text in texts)
    assert all(text.startswith("<|im_start|>user\n") and text.endswith("<|im_start|>assistant\n") for text in texts)
