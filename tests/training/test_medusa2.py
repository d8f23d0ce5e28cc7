"""`specq train medusa2` makes another target for `tiny`, with heads, which is served as any other; the original stays as it is."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specq.engines.checkpoint import describe
from specq.engines.torch import load_heads, load_network
from specq.models import resolve_model
from specq.proposers.medusa import Medusa
from specq.protocol import ConfigError, SamplingParams, Speculation
from specq.testing.checkpoints import VOCAB, load_reference, make_checkpoint, reference_logits
from specq.text import load_tokenizer_files
from specq.training import MEDUSA2_STAGES, medusa_joint
from specq.training.architecture import hidden_states
from specq.training.distil import Batch
from specq.training.drift import drift_along
from specq.training.low_rank import Adapters
from specq.training.medusa_joint import JointNetwork, joint_losses, save_target
from specq.training.medusa_network import HeadsNetwork
from specq.training.rollouts import save_rollouts
from specq.verifier.sources.medusa import MedusaDrafter
from tests.training.stages import USELESS, empty_places, make_places, places_with_bench, refusal, run_on, runner
from tests.verifier.test_medusa import _open, texts

SMALL = [
    *("--device=cpu", "--rollout-rows=3", "--rollout-tokens=12", "--rollout-seconds=60", "--batch-tokens=128"),
    *("--bench-prompts=2", "--bench-tokens=8", "--num-heads=2", "--warm-up-seconds=1.5", "--seconds=1.5", "--rank=4"),
]
pytestmark = pytest.mark.timeout(240)
TARGET = Path(resolve_model("tiny", "target"))
run = runner("medusa2", SMALL)


def info(target: Path):
    return describe(target, engine="torch", name="x", dtype="float32", vocab_size=4096, max_length=2048, kv_slots=64)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return make_places(tmp_path_factory.mktemp("train_medusa2"))


@pytest.fixture(scope="module")
def output(places):
    before = digests(TARGET)
    result = run(places, "--backbone-lr=0.01", "all", step_s=0.15)
    assert result.exit_code == 0, result.output
    assert digests(TARGET) == before
    return result.output


# --- all stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_stages_make_another_target_with_heads_that_fit_it(places, output):
    new = places["out"] / "target"
    heads = load_heads(str(places["out"] / "heads"), str(new), info(new), "cpu")
    assert heads.num_heads == 2
    assert json.loads((new / "config.json").read_text())["_name_or_path"] == "tiny-medusa2"
    assert load_tokenizer_files(new) == load_tokenizer_files(TARGET)
    assert info(new).fingerprint != info(TARGET).fingerprint
    assert (info(new).eos_ids, info(new).tokenizer_hash) == (info(TARGET).eos_ids, info(TARGET).tokenizer_hash)
    assert "loss by part (target, heads)" in output
    assert f"specq up --model {new} --heads {places['out'] / 'heads'}" in output


@pytest.mark.slow
@pytest.mark.usefixtures("output")
def test_its_heads_are_refused_for_the_original(places):
    with pytest.raises(ConfigError, match=r"trained together with another target \(fingerprint"):
        load_heads(str(places["out"] / "heads"), str(TARGET), info(TARGET), "cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("output")
def test_the_report_says_what_was_foreseen_and_how_far_the_target_went(places):
    report = json.loads((places["work"] / "results.json").read_text())
    assert report["name"] == "tiny-medusa2"
    for temperature in ("T=0", "T=0.8"):
        found = report["acceptance"]["figs"][temperature]
        assert 1 <= found["chain"]["mean_accepted_length"] <= found["tree"]["mean_accepted_length"] <= 3
        drift = report["drift"]["figs"][temperature]
        assert drift["mean_kl"] > 0
        assert 0 <= drift["equal_first"] <= 1
        assert 0 < drift["num_tokens"] <= 2 * 8


@pytest.mark.slow
@pytest.mark.usefixtures("output")
def test_it_is_served_losslessly(places):
    """With its heads the new target says what it says alone; sync and async, greedy and sampled, with drafts in all."""
    new = str(places["out"] / "target")
    ways = [
        (SamplingParams(max_tokens=20, temperature=temperature, seed=3, ignore_eos=True), Speculation(mode=mode))
        for temperature, mode in itertools.product((0.0, 0.8), ("async", "sync"))
    ]
    jobs = [_open(i, params, way, [5 + i, 90, 17, 1000, 44]) for i, (params, way) in enumerate(ways)]
    plain = texts(new, lambda _: [], [replace(job, speculation=Speculation(mode="plain")) for job in jobs])
    nodes = []

    def heads(engine):
        source = MedusaDrafter(Medusa(load_heads(str(places["out"] / "heads"), new, engine.info, "cpu"), 4096))
        collect = source.collect

        def counted(*asked):
            batches = collect(*asked)
            nodes.extend(len(batch.token_ids) for batch in batches)
            return batches

        source.collect = counted
        return [source]

    assert texts(new, heads, jobs) == plain
    assert sum(nodes) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("output")
def test_a_run_that_was_cut_off_goes_on(places):
    """Both trainings, with the same command; other settings begin anew; a broken file is named."""
    assert "goes on after step" in run(places, "--backbone-lr=0.01", "heads").output
    assert "goes on after step" in run(places, "--backbone-lr=0.01", "joint").output
    longer = run(places, "--backbone-lr=0.01", "--seconds=2.5", "joint")
    assert "step " in longer.output.split("goes on after step")[1]
    assert "goes on" not in run(places, "--backbone-lr=0.02", "joint").output
    state = places["work"] / "joint.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert "joint.pt cannot be read; delete it to begin anew" in refusal(run(places, "joint"))
    state.unlink()


# --- the training step ----------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up(tmp_path):
    """A random target of 99 tokens, what is trained with it, and a batch of its own greedy words."""
    torch.manual_seed(0)
    path = make_checkpoint("llama", tmp_path / "made-up")
    target = load_network(path, torch.device("cpu"))
    target.requires_grad_(requires_grad=False)
    output = target.lm_head.weight
    network = JointNetwork(HeadsNetwork(2, 1, output, own_output=False), Adapters(target, 4))
    token_ids = torch.tensor([[5, 6, 7, *range(20, 30)], [8, 9, 1, *range(40, 50)]])
    counted = torch.ones(2, 13)
    counted[:, :2] = counted[:, -1] = 0
    return SimpleNamespace(
        path=path, target=target, output=output, network=network, batch=Batch(token_ids, counted, counted.numpy())
    )


SETTINGS = SimpleNamespace(hard_weight=0.5, autocast=lambda: torch.autocast("cpu", enabled=False))


def test_the_loss_falls_and_only_the_new_target_moves(made_up):
    """Its own matrices stay; left out, the changes change nothing."""
    token_ids = made_up.batch.token_ids
    before = hidden_states(made_up.target, token_ids)
    weights = {name: value.clone() for name, value in made_up.target.state_dict().items()}
    optimizer = torch.optim.AdamW(made_up.network.parameters(), lr=0.01, weight_decay=0.0)
    sums = []
    for _ in range(30):
        losses = joint_losses(made_up.network, made_up.target, made_up.output, made_up.batch, SETTINGS)
        assert losses.shape == (3,)
        if not sums:
            assert losses[0].item() == pytest.approx(0, abs=1e-5)  # nothing is changed yet
        total = losses[0] + losses[1:].sum()
        sums.append(total.item())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert sums[-1] < 0.8 * sums[0]
    assert all(torch.equal(weights[name], value) for name, value in made_up.target.state_dict().items())
    assert (hidden_states(made_up.target, token_ids) - before).abs().max() > 0.01
    with made_up.network.adapters.off():
        assert torch.equal(hidden_states(made_up.target, token_ids), before)


def test_the_divergence_is_that_from_the_original(made_up):
    """KL(original || new) by plain arithmetic, over the places that count."""
    for change in made_up.network.adapters:
        torch.nn.init.normal_(change.up, std=0.05)
    found = joint_losses(made_up.network, made_up.target, made_up.output, made_up.batch, SETTINGS)[0].item()
    original = load_reference(made_up.path)
    expected = []
    for row, counted in zip(made_up.batch.token_ids.tolist(), made_up.batch.counted.tolist(), strict=True):
        for place in range(len(row)):
            if counted[place]:
                old = reference_logits(original, row[: place + 1]).log_softmax(-1)
                text = torch.tensor([row[: place + 1]])
                new = made_up.target.lm_head(hidden_states(made_up.target, text)[0, -1]).log_softmax(-1)
                expected.append((old.exp() * (old - new)).sum().item())
    assert found == pytest.approx(np.mean(expected), rel=1e-3)
    assert found > 0.01


def test_what_is_written_is_what_was_trained(made_up, tmp_path):
    """The changes are part of the written matrices, but for bfloat16; how far it went is measured against the original."""
    for change in made_up.network.adapters:
        torch.nn.init.normal_(change.up, std=0.05)
    token_ids = made_up.batch.token_ids
    trained = made_up.target.lm_head(hidden_states(made_up.target, token_ids)).detach()
    made_up.network.adapters.merge()
    merged = made_up.target.lm_head(hidden_states(made_up.target, token_ids)).detach()
    torch.testing.assert_close(merged, trained, atol=1e-3, rtol=1e-3)

    save_target(made_up.target, made_up.path, "another", tmp_path / "new")

    assert not (tmp_path / "new.part").exists()
    new, original = (load_network(path, torch.device("cpu")) for path in (tmp_path / "new", made_up.path))
    written = new.lm_head(hidden_states(new, token_ids)).detach()
    assert (written - trained).abs().max() < 0.05 * trained.abs().max()
    prompts, answers = [[5, 6, 7]], [list(range(20, 30))]
    assert drift_along(original, original, prompts, answers) == {"mean_kl": 0, "equal_first": 1, "num_tokens": 10}
    assert drift_along(original, new, prompts, answers)["mean_kl"] > 0.01


@pytest.mark.slow
def test_target_and_heads_learn_together(tmp_path):
    """Of one rollout that repeats itself, in so many steps, whatever the clock says; the heads end lower than where they were warm."""
    save_rollouts(tmp_path / "a.npz", [([5, 6, 7], [40, 41, 42, 43] * 20)] * 4)
    places = {name: tmp_path / name for name in ("work", "out")}
    options = [f"--rollouts={tmp_path / 'a.npz'}", "--warm-up-seconds=4", "--seconds=8", "--batch-tokens=256"]
    ends = []
    for stage, mark in (("heads", "by head"), ("joint", "by part (target, heads)")):
        result = run(places, *options, stage, step_s=0.4)
        assert result.exit_code == 0, result.output
        line = [line for line in result.output.splitlines() if mark in line][-1]
        ends.append([float(loss) for loss in line.split(mark)[1].split(",")[0].split()])
    assert len(ends[1]) == 3
    assert ends[1][1] < ends[0][0]
    assert ends[1][0] < 0.5


# --- refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pairs", "match"), USELESS)
def test_rollouts_of_no_use_are_refused(tmp_path, pairs, match):
    assert re.search(match.format(who="2 heads", least=3), refusal(run_on(run, tmp_path, pairs, "joint")))


@pytest.mark.parametrize(
    ("stage", "missing"),
    [
        ("rollouts", "a corpus is a directory of *.jsonl.gz, *.jsonl, *.txt files, or one such file; there is no"),
        ("heads", "run the stage 'rollouts'"),
        ("joint", "run the stage 'rollouts'"),
        ("evaluate", "run the stage 'joint' first, with the same --out"),
    ],
)
def test_what_a_stage_lacks_is_named(stage, missing, tmp_path):
    assert missing in refusal(run(places_with_bench(tmp_path), stage))
    assert stage in MEDUSA2_STAGES


def test_without_warm_heads_nothing_is_trained_together(tmp_path):
    said = refusal(run_on(run, tmp_path, [([5, 6, 7], [40, 41, 42, 43])] * 4, "joint"))
    assert "there are no heads of these settings and rollouts in" in said
    assert "run the stage 'heads' first" in said


@pytest.mark.parametrize("stage", ["heads", "joint"])
def test_the_original_is_never_written_over(tmp_path, stage, monkeypatch):
    """`--out` of a pair that lies as NAME/target and NAME/draft."""
    monkeypatch.setattr(medusa_joint, "load_target", lambda settings: pytest.fail("it was loaded"))
    (tmp_path / "a.npz").touch()
    given = f"--target={TARGET}", f"--out={TARGET.parent}", f"--rollouts={tmp_path / 'a.npz'}"
    said = refusal(run(empty_places(tmp_path), *given, stage))
    assert "would be written over the original one" in said


def test_a_rank_beyond_the_matrices_is_refused(tmp_path):
    target = load_network(make_checkpoint("llama", tmp_path), torch.device("cpu"))
    with pytest.raises(ConfigError, match="--rank is 33; the target's smallest matrix is of rank 32 at most"):
        Adapters(target, 33)
    assert VOCAB > 33
