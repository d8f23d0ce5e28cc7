"""`specq train parallel` makes a parallel draft model for `tiny` that loads, fits and is measured, from a corpus of a
few lines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from specq.checkpoints import draft_form
from specq.cli import main
from specq.engines.torch import load, load_network
from specq.models import resolve_model
from specq.protocol import ConfigError
from specq.testing.checkpoints import make_checkpoint
from specq.testing.checkpoints_draft import MADE, PARALLEL, VOCAB, change_draft, draft_logits, make_draft, places_logits
from specq.training.architecture import hidden_states
from specq.training.distil import RolloutBatch
from specq.training.draft import FactorisedEmbedding, save_draft
from specq.training.foresight import BEYOND, UNKNOWN
from specq.training.parallel import Masks, ParallelDraft, draw_masks, foresee, open_draft, place_losses, place_ranks
from tests.each import each
from tests.training.stages import (
    SMALL,
    TARGET,
    Waits,
    check_it_goes_on,
    learn,
    losses,
    refusal,
    run_on,
    runner,
    tiny_info,
)

pytestmark = pytest.mark.timeout(180)
DRAFT = Path(resolve_model("tiny", "draft"))
CPU = torch.device("cpu")
OPTIONS = [*SMALL, "--num-places=3"]
run = runner("parallel", OPTIONS)


def test_all_stages_make_a_draft_that_fits_its_target(places, output):
    loaded, target = (load(str(path), device="cpu", kv_slots=64) for path in (places["out"], TARGET))
    assert (loaded.num_masks, loaded.info.vocab_size) == (2, 4096)
    assert loaded.info.tokenizer_hash == target.info.tokenizer_hash
    assert "rollouts: 7 of 7 prompts" in output
    assert "loss by place" in output


@pytest.mark.usefixtures("output")
def test_the_report_says_what_was_foreseen_beside_the_model_it_started_from(places):
    report = json.loads((places["work"] / "results.json").read_text())
    assert (report["num_places"], set(report["acceptance"]["figs"])) == (3, {"T=0", "T=0.8"})
    for found in report["acceptance"]["figs"].values():
        assert 1 <= found["chain"]["mean_accepted_length"] <= found["tree"]["mean_accepted_length"] <= 4
        assert len(found["chain"]["acceptance_by_position"]) == len(found["start"]["acceptance_by_position"]) == 3
        assert found["chain"]["num_new_tokens"] == found["start"]["num_new_tokens"]


@pytest.mark.slow  # test_medusa.py has the same
@pytest.mark.usefixtures("output")
def test_a_run_that_was_cut_off_goes_on(places):
    check_it_goes_on(run, places, "draft", "--keep=0.5")


@pytest.mark.slow
def test_it_learns_places(tmp_path):
    """What comes at each place."""
    assert max(losses(learn(run, tmp_path, "--seconds=2", "draft", step_s=0.1), "place")) < 4


# --- its parts ----------------------------------------------------------------------------------------------------


def settings(**changes):
    made = SimpleNamespace(device=CPU, num_places=4, keep=0.5, least_keep=0.25, hard_weight=0.5)
    made.autocast = lambda: torch.autocast("cpu", enabled=False)
    vars(made).update(changes)
    return made


def batch(counted):
    counted = torch.tensor(counted, dtype=torch.float32)
    token_ids = torch.randint(0, VOCAB, counted.shape, generator=torch.Generator().manual_seed(0))
    return RolloutBatch(token_ids, counted, counted.numpy())


def test_masks_are_dropped_at_random_and_none_without_those_before_it():
    """A share of the tokens has a first mask, of these a share a second, down to a least share; none speaks of what
    lies behind the end."""
    counted = np.array([[0.0] * 5 + [1.0] * 40 + [0.0] * 3, [0.0] * 48])
    anchors, places = draw_masks(counted, settings(), np.random.default_rng(0))
    pairs = [(a, p) for a, p in zip(anchors[0].tolist(), places[0].tolist(), strict=True) if a >= 0]
    of_place = [{anchor for anchor, place in pairs if place == number} for number in (1, 2, 3)]
    assert len(pairs) == len(set(pairs))
    assert [18, 6, 6] <= [len(own) for own in of_place] <= [20, 10, 10]
    assert of_place[2] <= of_place[1] <= of_place[0]
    assert all(anchor >= 5 and anchor + place <= 44 for anchor, place in pairs)
    assert set(anchors[1].tolist()) == {-1}
    other, _ = draw_masks(counted, settings(), np.random.default_rng(1))
    assert not np.array_equal(anchors, other)


@pytest.fixture
def draft(tmp_path):
    """A random parallel draft model as it is trained, and the directory that it was loaded from."""
    directory = make_draft(tmp_path / "parallel", PARALLEL)
    network = load_network(directory, CPU)
    words = network.model.embed_tokens.weight.detach()
    network.model.embed_tokens = FactorisedEmbedding(words[: VOCAB + 5], torch.eye(words.shape[1]), words[VOCAB + 5 :])
    return ParallelDraft(network, PARALLEL, network.lm_head.token_ids), directory


def test_masks_see_the_text_up_to_their_token_and_the_masks_before_them(draft):
    """All in one pass, whatever other masks there are: as plain arithmetic says it of each alone."""
    (network, shape, token_ids), directory = draft
    texts = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    masks = Masks(torch.tensor([[4, 9, 4, 4], [7, 7, -1, 2]]), torch.tensor([[1, 1, 3, 2], [2, 1, 0, 1]]))
    of_texts, of_masks = foresee(network, texts, masks, shape.vocab_size)
    for row in range(2):
        said = network.lm_head(of_texts[row, 11])
        expected = draft_logits(directory, texts[row].tolist())[token_ids]
        torch.testing.assert_close(said, expected, atol=1e-3, rtol=1e-3)
        for i, (anchor, place) in enumerate(zip(masks.anchors[row].tolist(), masks.places[row].tolist(), strict=True)):
            if anchor >= 0:
                read = texts[row, : anchor + 1].tolist()
                expected = places_logits(directory, read, place + 1)[place, token_ids]
                torch.testing.assert_close(network.lm_head(of_masks[row, i]), expected, atol=1e-3, rtol=1e-3)


def test_each_place_is_taught_by_what_the_target_says_there(draft):
    """A target that says what the draft says of a place gives that place the loss of its own entropy, and no
    divergence."""
    (_, shape, token_ids), directory = draft
    own, wholly = batch([[0.0] * 3 + [1.0] * 8 + [0.0]]), settings(keep=1.0, hard_weight=1.0)
    target = load_network(make_draft(directory.parent / "target", MADE, seed=4), CPU)
    output = target.lm_head.weight[:20].repeat(2, 1)[: len(token_ids)]
    with Waits() as waits:
        found = place_losses(draft[0], target, output, own, wholly, np.random.default_rng(0))
    assert not waits.found
    text = own.token_ids[0].tolist()
    taught = (hidden_states(target, own.token_ids)[0] @ output.T).argmax(-1)  # [length]: the likeliest next token
    for place in range(shape.num_places):
        places = range(3, 11 - place)
        said = [places_logits(directory, text[: p + 1], place + 1)[place, token_ids] for p in places]
        expected = torch.nn.functional.cross_entropy(torch.stack(said), taught[[p + place for p in places]])
        assert found[place].item() == pytest.approx(expected.item(), abs=2e-3)


def test_ranks_are_those_of_the_places_after_each_prefix(draft):
    (_, _, token_ids), directory = draft
    loaded = load_network(directory, CPU)
    unknown = next(i for i in range(VOCAB) if i not in token_ids)
    prompt, answer = [5, 6, 7, 8], [*token_ids[[3, 9, 1, 30]].tolist(), unknown]
    ranks = place_ranks(loaded, prompt, answer, None)
    assert ranks.shape == (6, PARALLEL.num_places)
    for p in range(5):
        logits = places_logits(directory, prompt + answer[:p], PARALLEL.num_places)
        for place in range(PARALLEL.num_places):
            if p + place >= 5:
                assert ranks[p, place] == BEYOND
            elif p + place == 4:
                assert ranks[p, place] == UNKNOWN
            else:
                assert ranks[p, place] == int((logits[place] > logits[place, answer[p + place]]).sum())
    assert (ranks[5] == BEYOND).all()


# --- what it starts from ------------------------------------------------------------------------------------------


def test_it_begins_as_the_model_it_starts_from(tmp_path):
    """Of Hugging Face layout: the first place of what is written says what that model says, but for 8 bits."""
    draft = open_draft(DRAFT, TARGET, 4, CPU, lambda: np.arange(5, dtype=np.int32), 16384)
    save_draft(draft.network, draft.shape, draft.token_ids, tmp_path)
    context = [5, 90, 17, 3, 1000]
    with torch.no_grad():
        expected = load_network(DRAFT, CPU)(torch.tensor([context])).logits[0, -1]
    ours = draft_logits(tmp_path, context)
    assert (draft.shape.num_places, draft.shape.head_size) == (4, 4096)
    assert (ours - expected).abs().max() < 0.05 * expected.abs().max()
    few = open_draft(DRAFT, TARGET, 4, CPU, lambda: np.arange(5, dtype=np.int32), 4095)
    assert few.token_ids.tolist() == [*range(5)]


def for_tiny(shape):
    """A shape for the tokens of the bundled target."""
    return replace(shape, vocab_size=4096, num_tokens=4096, tokenizer_hash=tiny_info().tokenizer_hash)


def test_it_starts_from_a_model_of_our_form_and_keeps_its_masks(tmp_path):
    """The factors of its embedding have the rank that they had; masks that it has stay, others are added."""
    shape = for_tiny(PARALLEL)
    directory = make_draft(tmp_path / "start", shape)
    draft = open_draft(directory, TARGET, 6, CPU, lambda: np.arange(5, dtype=np.int32), 5)
    assert draft.shape == replace(shape, num_places=6)
    save_draft(draft.network, draft.shape, draft.token_ids, tmp_path / "out")
    expected, ours = (places_logits(path, [5, 90, 17], 4) for path in (directory, tmp_path / "out"))
    known = draft.token_ids
    torch.testing.assert_close(ours[:, known], expected[:, known], atol=0.3, rtol=0.05)


def test_a_draft_may_share_the_embedding_and_the_head_of_the_model_it_starts_from(tmp_path):
    """They stay as they are and are not written; what is loaded has them, and needs the other beside it."""
    shape, out = for_tiny(MADE), tmp_path / "out"
    start = make_draft(tmp_path / "draft", shape)
    learn(run, tmp_path, f"--draft={start}", "--share", "--seconds=1", "draft")

    assert draft_form.draft_shape(out).shared == "../draft"
    ours, theirs = load_network(out, CPU), load_network(start, CPU)
    rows = slice(0, shape.vocab_size)
    assert torch.equal(ours.model.embed_tokens.weight[rows], theirs.model.embed_tokens.weight[rows])
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight)
    assert ours.lm_head.token_ids.tolist() == theirs.lm_head.token_ids.tolist()
    assert not torch.equal(ours.model.layers[0].mlp.up_proj.weight, theirs.model.layers[0].mlp.up_proj.weight)
    assert load(str(out), device="cpu", kv_slots=64).num_masks == 2
    saved = (draft_form.EMBEDDING, draft_form.LIFT, draft_form.HEAD)
    assert not set(saved) & set(load_file(out / draft_form.WEIGHTS))

    change_draft(start, hidden_size=64)
    with pytest.raises(ConfigError, match=r"has the embedding and the head of the one in .*draft"):
        load_network(out, CPU)
    places = {name: tmp_path / name for name in ("work", "out")}
    refused = run(places, f"--rollouts={tmp_path / 'a.npz'}", "--share", "--seconds=1", "draft")
    assert "only such a model can share" in refusal(refused)


OTHER_TOKENIZER, NO_LLAMA = "is for another tokenizer", "starts from a Llama"


@each(
    ("kind", "match"),
    [("llama", OTHER_TOKENIZER), ("ours", OTHER_TOKENIZER), ("opt", NO_LLAMA), ("qwen2", NO_LLAMA)],
)
def test_models_that_it_cannot_start_from_are_refused(tmp_path, kind, match):
    directory = make_draft(tmp_path / "start", MADE) if kind == "ours" else make_checkpoint(kind, tmp_path / "start")
    if match == NO_LLAMA:
        (directory / "tokenizer.json").write_text((TARGET / "tokenizer.json").read_text())
    result = run_on(run, tmp_path, [([5, 6], [7, 8, 9, 10])] * 2, f"--draft={directory}", "draft")
    assert match in refusal(result)


def test_a_target_without_a_draft_model_needs_one_named(tmp_path):
    options = [f"--target={TARGET}", *OPTIONS, f"--work={tmp_path}"]
    result = CliRunner().invoke(main, ["train", "parallel", *options, "draft"])
    assert "name one to start from with --draft" in refusal(result)
