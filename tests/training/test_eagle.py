"""`specq train eagle3` makes a head for `tiny` that loads, fits and is measured, from a corpus of a few lines."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specq.drafting.eagle3.drafter import Eagle
from specq.drafting.eagle3.form import eagle_shape
from specq.drafting.eagle3.loading import load_eagle
from specq.drafting.eagle3.source import EagleSource
from specq.engines.torch.engine import TorchEngine
from specq.protocol import ConfigError, SamplingParams, SessionStep, Speculation, Tap
from specq.testing.checkpoints_eagle import eagle_logits, eagle_shape_of, make_eagle
from specq.training.architecture import tapped_states
from specq.training.distil import RolloutBatch, token_losses
from specq.training.eagle import (
    LEAST_SCALE,
    build_eagle,
    channel_scales,
    layers_of,
    save_eagle,
    start_eagle,
    step_losses,
    trained_states,
)
from tests.drafting.medusa.test_medusa import _open, texts
from tests.drafting.trees.drafting import counting
from tests.each import each
from tests.training.stages import SMALL, TARGET, Waits, check_it_goes_on, learn, losses, runner, tiny_info

pytestmark = pytest.mark.timeout(240)
TINY = str(TARGET)
SHAPE = eagle_shape_of(256, 4096, 50, layers=(1, 5, 8))
run = runner("eagle3", [*SMALL, "--num-steps=3"])


def head_in(directory):
    """Load a head for the bundled target."""
    return load_eagle(str(directory), TINY, tiny_info(), "cpu")


def changed(network):
    """Change the values of a network somewhat."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    return network


def test_all_stages_make_a_head_that_fits_its_target(places, output):
    """And that drafts: texts are the target's, token for token, several at once."""
    head = head_in(places["out"])
    assert head.layers == (1, 5, 8)
    assert len(head.token_ids) > 1
    assert "loss by step" in output
    ways = [
        (0.0, Speculation()),
        (0.8, Speculation()),
        (0.0, Speculation(mode="sync")),
        (0.8, Speculation(mode="sync")),
    ]
    jobs = [
        _open(i, SamplingParams(max_tokens=20, temperature=t, seed=i, ignore_eos=True), way, [5 + i, 90, 1000, 44])
        for i, (t, way) in enumerate(ways)
    ]
    plain = [replace(job, speculation=Speculation(mode="plain")) for job in jobs]
    drafted = dict[str, int]()

    def make(engine):
        return EagleSource(Eagle(load_eagle(str(places["out"]), TINY, engine.info, "cpu")))

    assert texts(TINY, counting(make, drafted), jobs) == texts(TINY, lambda engine: [], plain)
    assert drafted["nodes"] > 20


@pytest.mark.usefixtures("output")
def test_the_report_says_what_was_foreseen(places):
    figures = json.loads((places["work"] / "results.json").read_text())["acceptance"]["figs"]
    assert set(figures) == {"T=0", "T=0.8"}
    for found in figures.values():
        lengths = {name: found[name]["mean_accepted_length"] for name in ("chain", "tree", "chain of 4", "tree of 4")}
        assert 1 <= lengths["chain of 4"] <= lengths["tree of 4"] <= 5
        assert lengths["chain"] <= lengths["tree"] <= 9
        assert len(found["among_first"]["10"]) == 8


@pytest.mark.slow  # test_medusa.py has the same
@pytest.mark.usefixtures("output")
def test_a_run_that_was_cut_off_goes_on(places):
    check_it_goes_on(run, places, "head", "--seed=3")


def test_a_head_learns(tmp_path):
    """The tokens two and three places later, in a fixed number of steps, independent of the clock."""
    said = learn(run, tmp_path, "--seconds=8", "head", step_s=0.4)
    (shown,) = [line for line in said.splitlines() if "by step" in line]
    assert shown.startswith("step 20, ")
    assert max(losses(said, "step")) < 1.3  # less than ln 4, though the target is not sure itself
    assert eagle_shape(tmp_path / "out").draft_vocab_size == 4


def test_training_meets_the_rows_that_drafting_meets(tmp_path):
    """Row t of step j is the last of a path: the target's states up to t, the text's own tokens, and the head's states
    of the steps since."""
    made = make_eagle(tmp_path, SHAPE, scale=0.2)  # so that positions matter
    network = head_in(made).network
    tokens = [5, 90, 17, 1000, 44, 9, 300, 7, 8]
    taps = torch.randn(1, len(tokens), 768, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        steps = list(trained_states(network, taps, torch.tensor([tokens]), 4))
        for step, states in enumerate(steps):
            for row in range(len(tokens) - 1 - step):
                path = tokens[1 : row + 2 + step]
                expected = eagle_logits(made, SHAPE, taps[0, : row + 1], path, network.get_buffer("embedding"))[-1]
                torch.testing.assert_close(network.logits(states[0, row]), expected, atol=5e-3, rtol=1e-3)


def test_each_step_learns_what_the_target_says_behind_its_own_tokens(tmp_path, target):
    """Of each answer, the rows whose token and whose label are the target's own; rows of one text say nothing of
    another."""
    network = head_in(make_eagle(tmp_path, SHAPE, scale=0.2)).network
    token_ids = torch.randint(0, 4000, (3, 12), generator=torch.Generator().manual_seed(0))
    counted = torch.tensor([[0] * 5 + [1] * 6 + [0], [1] * 11 + [0], [0] * 12], dtype=torch.float32)
    output, scales = target.lm_head.weight[:50], torch.full((768,), 2.0)
    settings = SimpleNamespace(num_steps=4, hard_weight=0.5, autocast=lambda: torch.autocast("cpu", enabled=False))
    with torch.no_grad():
        own = RolloutBatch(token_ids, counted, counted.numpy())
        with Waits() as waits:
            found = step_losses(network, target, output, scales, own, settings)
        assert not waits.found
        taps, hidden = tapped_states(target, token_ids, SHAPE.layers)
        for step, states in enumerate(trained_states(network, taps / scales, token_ids, 4)):
            pairs = [(row, t) for row in range(2) for t in range(11 - step - 1) if counted[row, t]]
            said = torch.stack([network.logits(states[row, t]) for row, t in pairs])
            taught = torch.stack([hidden[row, t + step + 1] @ output.T for row, t in pairs])
            assert found[step].item() == pytest.approx(token_losses(said, taught, 0.5).mean().item(), abs=1e-4)


def test_scales_are_of_channels():
    """And never nothing: they are divided by."""
    scales = channel_scales(torch.tensor([[3.0, 0.0, 100.0], [-4.0, 0.0, 100.0]]))
    assert scales.tolist() == pytest.approx([12.5**0.5, LEAST_SCALE, 100.0])


def test_training_states_equal_the_states_of_the_engine(target):
    """The same layers, counted alike."""
    tokens = [5, 90, 17, 1000, 44, 9, 300]
    with torch.inference_mode():
        taps, _ = tapped_states(target, torch.tensor([tokens]), (1, 5, 8))
    engine = TorchEngine(TINY, device="cpu", kv_slots=64)
    engine.open(1, np.array(tokens, np.int32))
    step = SessionStep(1, 0, np.array(tokens, np.int32), SamplingParams())
    output = engine.step([step], Tap((1, 5, 8), frozenset([1])))
    torch.testing.assert_close(torch.as_tensor(output.hidden.of(0)).float(), taps[0].float(), atol=2e-2, rtol=2e-2)


IDS = np.array([4, 90, 1000], np.int32)


def shape_for_tiny(**changes):
    """The shape of a head for the bundled target that knows three tokens."""
    of_target = {"num_tokens": tiny_info().num_tokens, "tokenizer_hash": tiny_info().tokenizer_hash}
    return replace(eagle_shape_of(256, 4096, len(IDS), layers=(1, 5, 8)), **of_target, **changes)


def test_a_head_is_written_as_it_was_trained(tmp_path, target):
    """In bfloat16, without the target's embedding, which it reads."""
    shape = shape_for_tiny()
    network, scales = changed(build_eagle(shape, target, IDS)), torch.rand(3 * 256) * 100 + 0.1
    save_eagle(network, shape, IDS, scales, tmp_path)

    head = head_in(tmp_path)

    assert head.token_ids.tolist() == IDS.tolist()
    expected = network.state_dict() | {"fc.weight": network.fc.weight.detach() / scales}
    for name, value in expected.items():
        torch.testing.assert_close(head.network.state_dict()[name], value.bfloat16().float(), atol=0, rtol=0)
    assert torch.equal(head.network.get_buffer("embedding"), network.get_buffer("embedding"))


def test_training_goes_on_from_a_head_that_was_written(tmp_path, target):
    """It says what that says, read with other scales."""
    shape = shape_for_tiny(max_position_embeddings=77)
    written = changed(build_eagle(shape, target, IDS))
    save_eagle(written, shape, IDS, torch.rand(768) * 100 + 0.1, tmp_path)
    head = head_in(tmp_path)
    network, scales = build_eagle(shape, target, IDS), torch.rand(768) + 0.5

    start_eagle(network, head, scales, tmp_path)

    tokens, taps = torch.tensor([[5, 90, 17, 1000]]), torch.randn(1, 4, 768)
    with torch.inference_mode():
        ways = (trained_states(network, taps / scales, tokens, 2), trained_states(head.network, taps, tokens, 2))
        for ours, theirs in zip(*ways, strict=True):
            torch.testing.assert_close(network.logits(ours), head.network.logits(theirs), atol=1e-4, rtol=1e-4)
    wider = build_eagle(replace(shape, intermediate_size=64), target, IDS)
    with pytest.raises(ConfigError, match="another shape: intermediate_size is"):
        start_eagle(wider, head, scales, tmp_path)


@pytest.mark.usefixtures("output")
def test_a_run_starts_from_a_head_with_its_tokens(places, tmp_path):
    """Though the rollouts say others more often."""
    learn(run, tmp_path, f"--start={places['out']}", "--seconds=0.1", "head")
    assert head_in(tmp_path / "out").token_ids.tolist() == head_in(places["out"]).token_ids.tolist()


@each(("num_layers", "layers"), [(3, (0, 1, 2)), (6, (0, 2, 5)), (7, (1, 2, 3)), (32, (1, 15, 28))])
def test_shallow_targets_have_other_layers(num_layers, layers):
    assert layers_of(num_layers) == layers
    with pytest.raises(ConfigError, match="the target has 2 layers; an EAGLE-3 head reads 3"):
        layers_of(2)
