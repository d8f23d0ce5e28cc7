"""`specq train block` makes a drafter for `tiny` that loads, fits and is measured, from a corpus of a few lines."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specq.drafting.block.drafter import BlockHead
from specq.drafting.block.form import block_shape
from specq.drafting.block.network import BlockDrafter, load_block
from specq.drafting.block.source import BlockSource
from specq.protocol import ConfigError, SamplingParams, Speculation
from specq.testing.checkpoints_block import block_logits, block_shape_of, make_block
from specq.training.architecture import tapped_states
from specq.training.block import (
    BlockForesight,
    Labels,
    block_states,
    build_block,
    draw_labels,
    layers_of,
    path_weights,
    place_losses,
)
from specq.training.decoding import generate
from specq.training.distil import RolloutBatch, token_losses
from specq.training.rollouts import save_rollouts
from specq.training.teaching import teach
from tests.drafting.medusa.test_medusa import _open, texts
from tests.drafting.trees.drafting import counting
from tests.each import each
from tests.training.stages import SMALL, TARGET, Waits, check_it_goes_on, losses, runner, tiny_info

pytestmark = pytest.mark.timeout(240)
TINY = str(TARGET)
SHAPE = block_shape_of(256, 4096, (1, 5, 8), block_size=4)
run = runner("block", [*SMALL, "--block-size=4", "--num-layers=2", "--num-states=3", "--num-anchors=4"])


def drafter_in(directory) -> BlockDrafter:
    """Load a drafter for the bundled target."""
    return load_block(str(directory), TINY, tiny_info(), "cpu")


def test_all_stages_make_a_drafter_that_fits_its_target(places, output):
    """And that drafts: texts are the target's, token for token, several at once."""
    drafter = drafter_in(places["out"])
    shape = block_shape(places["out"])
    assert shape.layers == (1, 5, 9)
    assert (shape.num_places, len(drafter.token_ids) > 1) == (3, True)
    assert "loss by place" in output
    ways = [(t, Speculation(mode=mode)) for mode in ("async", "sync") for t in (0.0, 0.8)]
    jobs = [
        _open(i, SamplingParams(max_tokens=20, temperature=t, seed=i, ignore_eos=True), way, [5 + i, 90, 1000, 44])
        for i, (t, way) in enumerate(ways)
    ]
    plain = [replace(job, speculation=Speculation(mode="plain")) for job in jobs]
    drafted = dict[str, int]()

    def make(engine):
        return BlockSource(BlockHead(drafter), shape.num_places)

    assert texts(TINY, counting(make, drafted), jobs) == texts(TINY, lambda engine: [], plain)
    assert drafted["nodes"] > 20


@pytest.mark.usefixtures("output")
def test_the_report_says_what_was_foreseen(places):
    figures = json.loads((places["work"] / "results.json").read_text())["acceptance"]["figs"]
    assert set(figures) == {"T=0", "T=0.8"}
    for found in figures.values():
        assert 1 <= found["chain"]["mean_accepted_length"] <= found["tree"]["mean_accepted_length"] <= 4
        assert len(found["among_first"]["10"]) == 3


@pytest.mark.slow  # test_medusa.py has the same
@pytest.mark.usefixtures("output")
def test_a_run_that_was_cut_off_goes_on(places):
    check_it_goes_on(run, places, "drafter", "--seed=3")


def adamw(network, **_):
    """Return an optimizer without Muon, whose products in bfloat16 take a CPU seconds a step."""
    (group,) = (optimizer := torch.optim.AdamW(network.parameters(), lr=3e-3)).param_groups
    group["peak_lr"] = group["lr"]
    return [optimizer]


def test_a_trained_drafter_is_accepted_more_often_than_an_untrained_one(tmp_path, target, monkeypatch):
    """On the target's own greedy answers, in a fixed number of steps, independent of the clock."""
    monkeypatch.setattr("specq.training.block.build_optimizers", adamw)
    prompts = [[5, 6, 7], [90, 1000, 44], [9, 300, 12], [7, 8, 9]]
    answers = generate(target, prompts, num_new=40, temperatures=[0.0] * 4, stops=[], pad_id=0)
    pairs = list(zip(prompts, answers, strict=True))
    save_rollouts(tmp_path / "a.npz", pairs + pairs)  # half of them are not trained on
    places = {name: tmp_path / name for name in ("work", "out")}
    options = (f"--rollouts={tmp_path / 'a.npz'}", "--batch-tokens=512", "--num-anchors=16", "--num-layers=1")
    first = run(places, *options, "--seconds=0.5", "drafter")
    untrained = drafter_in(places["out"])
    trained = run(places, *options, "--seconds=24", "drafter")
    assert all(
        after < before / 2
        for before, after in zip(losses(first.output, "place"), losses(trained.output, "place"), strict=True)
    )
    shares = [share_predicted(target, drafter, prompts, answers) for drafter in (untrained, drafter_in(places["out"]))]
    assert shares[0] < 0.1
    assert shares[1] > 0.4


def share_predicted(target, drafter, prompts, answers) -> float:
    """Return how many tokens of answers are the first choice of the block's first place."""
    found = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = BlockForesight(target, drafter).logits(prompt, answer)
            chosen = drafter.token_ids[logits[:-1, 0].argmax(-1).numpy()]
            found.append(np.mean(chosen == np.array(answer[1:])))
    return float(np.mean(found))


def test_training_meets_the_blocks_that_drafting_meets(tmp_path, target):
    """Each block sees the features before its anchor, and itself; many blocks of a text do not see each other."""
    made = make_block(tmp_path, SHAPE, scale=0.2)  # so that positions matter
    network = drafter_in(made).network
    tokens = torch.tensor([[5, 90, 17, 1000, 44, 9, 300, 7, 8]])
    anchors = torch.tensor([[1, 3, 4, 8]])
    with torch.inference_mode():
        taps, _ = tapped_states(target, tokens, SHAPE.layers)
        states = block_states(network, taps, tokens, anchors)
    matrices = network.get_buffer("embedding"), network.get_buffer("output")
    for own, anchor in zip(states[0], anchors[0].tolist(), strict=True):
        expected = block_logits(made, SHAPE, taps[0, :anchor], int(tokens[0, anchor]), matrices)
        torch.testing.assert_close(network.logits(own), expected, atol=5e-3, rtol=1e-3)


COUNTED = torch.tensor([[0] * 5 + [1] * 6 + [0], [1] * 11 + [0], [0] * 12], dtype=torch.float32)


@pytest.fixture
def batch() -> RolloutBatch:
    token_ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    return RolloutBatch(token_ids, COUNTED, COUNTED.numpy())


def test_anchors_are_where_the_target_answers(batch):
    """All of them, if there is room; of a row without an answer nothing counts."""
    labels = draw_labels(batch, 6, 3, np.random.default_rng(1))
    assert labels.anchors[0].tolist() == [5, 6, 7, 8, 9, 10]
    assert set(labels.anchors[1].tolist()) < set(range(11))
    assert labels.counted[0].tolist() == [[1, 1, 1]] * 4 + [[1, 1, 0], [1, 0, 0]]
    assert not labels.counted[2].any()
    again = draw_labels(batch, 6, 3, np.random.default_rng(2))
    assert again.anchors[1].tolist() != labels.anchors[1].tolist()


def test_each_place_learns_what_the_target_says_there(tmp_path, target, batch):
    """At the position before its token, as all places of all blocks that count; less behind an unlikely token."""
    network = drafter_in(make_block(tmp_path, SHAPE, range(50), scale=0.2)).network
    settings = SimpleNamespace(
        num_anchors=4, hard_weight=0.5, off_path=0.25, autocast=lambda: torch.autocast("cpu", enabled=False)
    )
    columns, output = torch.arange(50), network.get_buffer("output")
    with torch.no_grad():
        with Waits() as waits:
            found = place_losses(network, target, batch, columns, settings, np.random.default_rng(3))
        assert not waits.found
        labels = draw_labels(batch, 4, 3, np.random.default_rng(3))
        taps, hidden = tapped_states(target, batch.token_ids, SHAPE.layers)
        states = block_states(network, taps, batch.token_ids, labels.anchors)
        taught = hidden @ output.T
        likeliest = taught.argmax(-1)
        total, weights = np.zeros(3), np.zeros(3)
        for row in range(2):
            for block, anchor in enumerate(labels.anchors[row].tolist()):
                for place in range(3):
                    at = anchor + place
                    if at >= 12 or not COUNTED[row, at]:
                        continue
                    before = range(anchor, at)
                    weight = 1.0 if all(likeliest[row, t] == batch.token_ids[row, t + 1] for t in before) else 0.25
                    said = network.logits(states[row, block, place])[None]
                    total[place] += weight * token_losses(said, taught[row, at][None], 0.5).item()
                    weights[place] += weight
    assert found.tolist() == pytest.approx(total / weights, abs=1e-4)


def test_a_place_behind_an_unlikely_token_counts_less(target):
    """All places behind it, and only in this block."""
    tokens = torch.tensor([[5, 90, 17, 1000, 44, 9]])
    with torch.inference_mode():
        _, hidden = tapped_states(target, tokens, ())
        for t in range(2, 5):  # the tokens from position 3 on are the likeliest ones
            _, hidden = tapped_states(target, tokens, ())
            tokens[0, t + 1] = int((hidden[0, t] @ target.lm_head.weight.T).argmax())
        _, hidden = tapped_states(target, tokens, ())
        counted = torch.tensor([[1, 1, 1, 1, 1, 0.0]])
        batch = RolloutBatch(tokens, counted, counted.numpy())
        columns = torch.arange(4096)
        taught = teach(hidden, target.lm_head.weight, batch, 0.5)
        anchors, places = torch.tensor([[0, 1, 2]]), torch.tensor([[[0, 1, 2], [1, 2, 3], [2, 3, 4]]])
        labels = Labels(anchors, places, torch.ones(1, 3, 3))
        found = path_weights(taught, labels, batch, columns, 0.3)
    assert found[0, 2].tolist() == [1, 1, 1]
    assert found[0, 1].tolist() == pytest.approx([1, 0.3, 0.3])
    assert found[0, 0].tolist() == pytest.approx([1, 0.3, 0.3])


@each(
    ("num_layers", "count", "layers"),
    [(30, 5, (1, 8, 14, 20, 27)), (12, 5, (1, 3, 5, 7, 9)), (6, 3, (1, 2, 3)), (4, 3, (0, 2, 3)), (36, 1, (18,))],
)
def test_layers_are_evenly_spaced(num_layers, count, layers):
    assert layers_of(num_layers, count) == layers
    with pytest.raises(ConfigError, match="the target has 2 layers, and the drafter would read 5; give a lower --num"):
        layers_of(2, 5)


def test_a_fresh_drafter_has_the_targets_shape(target):
    network = build_block(SHAPE, target, np.array([4, 90, 1000], np.int32))
    assert torch.equal(network.get_buffer("output"), target.lm_head.weight[[4, 90, 1000]])
    assert torch.equal(network.norm.weight, target.model.norm.weight)
    assert not network.get_buffer("embedding").requires_grad
