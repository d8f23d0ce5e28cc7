"""The parts of `specq bench gpu` on the CPU, with the bundled pair in its own shapes; most of its figures need a GPU."""

import json

import pytest
import torch
from click.testing import CliRunner

from bench import chain_steps
from bench.gpu import chains, colocated, heads, parts, rounds, steps, text
from bench.gpu.models import Pair
from bench.gpu.parts import PARTS, Found, Task, measure_part, measure_parts
from bench.report import Report
from specq.cli import main
from specq.drafting.eagle3.source import usual_sizes
from specq.models import resolve_model
from specq.models.inflate import AutoConfig, shape_of
from specq.protocol import ConfigError


@pytest.fixture(scope="module")
def pair():
    """The bundled pair in its own shapes."""
    configs = {role: AutoConfig.from_pretrained(resolve_model("tiny", role)) for role in ("target", "draft")}
    return Pair({role: shape_of(config) for role, config in configs.items()}, "cpu")


@pytest.fixture
def task(pair):
    return Task(pair, (1, 2), 1, 4)


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "gpu", *map(str, arguments)])


# --- all parts ----------------------------------------------------------------------------------------------------


def test_every_part_is_in_the_help_and_can_be_asked_for():
    """The help needs no GPU."""
    outcome = bench("--help")
    assert outcome.exit_code == 0
    assert all(name in outcome.stdout for name in PARTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("only", ["steps", "own"])
def test_without_a_gpu_the_message_says_so(tmp_path, only):
    """Whatever is asked for, before anything is made or started."""
    outcome = bench("--only", only, "--pair", tmp_path / "pair")
    assert outcome.exit_code == 2
    assert "no device cuda is here" in outcome.stderr
    assert not (tmp_path / "pair").exists()


@pytest.mark.parametrize("only", ["steps", "own"])
def test_a_device_that_is_none_is_refused(tmp_path, only):
    """A part that fails is reported and its suite goes on, which is of no use here."""
    outcome = bench("--device", "nope", "--only", only, "--pair", tmp_path / "pair")
    assert outcome.exit_code == 2
    assert "device is 'nope'; torch has here" in outcome.stderr


def test_a_part_that_needs_a_gpu_says_so(task):
    with pytest.raises(ConfigError, match="GPU"):
        measure_part("profile", task)


def test_kernels_are_measured_only_where_the_fused_decoder_runs(pair):
    with pytest.raises(ConfigError, match="NVIDIA GPU and Triton"):
        _ = pair.target.decoder


def test_a_part_that_fails_does_not_hide_the_others(monkeypatch, tmp_path, capsys, task):
    """Its error stands in the report; the figures of each part have its name."""
    monkeypatch.setattr(parts, "PARTS", {"text": f"{__name__}:fail", "chains": f"{__name__}:succeed"})
    out = tmp_path / "gpu.json"
    measure_parts(Report("gpu", out), ("text", "chains"), Task(task.pair, (1,), 1, 4))
    written = json.loads(out.read_text())
    assert written["results"] == {"text": {"error": "RuntimeError: no room"}}
    assert written["figures"] == {"chains step": {"unit": "ms", "median": 2.0, "repeats": [1.0, 3.0]}}
    printed = capsys.readouterr()
    assert "RuntimeError: no room" in printed.err
    assert "chains step" in printed.out


def fail(_task):
    raise RuntimeError("no room")


def succeed(_task):
    return Found({"step": {"unit": "ms", "median": 2.0, "repeats": [1.0, 3.0]}})


@pytest.mark.slow
def test_a_part_from_the_command_line(tmp_path):
    """Shapes, settings and figures are in the report; the pair is made in memory."""
    out = tmp_path / "gpu.json"
    shapes = ["--target", "cpu-draft", "--draft", "cpu-draft", "--draft-shape", "hidden=896,heads=14,kv_heads=2"]
    options = ["--device", "cpu", "--sessions", 1, "--out", out, "--pair", tmp_path / "pair"]
    outcome = bench("--only", "chains", *shapes, *options)
    assert outcome.exit_code == 0, outcome.output
    written = json.loads(out.read_text())
    assert "chains S=1 T=0.0 F=1, step" in written["figures"]
    assert written["settings"]["draft_model"]["hidden"] == 896
    assert not (tmp_path / "pair").exists()


# --- the parts ----------------------------------------------------------------------------------------------------


def test_steps_are_timed_whole_and_in_parts(pair):
    """A chain and a tree; no session is left, and nothing stands in for the engine's own work."""
    engine = pair.engine
    free = engine.free_slots
    for case in (steps.Case(2, 3, context=8), steps.Case(1, 5, context=8, shape="tree", temperature=0.8)):
        found = steps.step_times(engine, case, repeats=2)
        assert {name: len(times) for name, times in found.items()} == dict.fromkeys(
            ("step", "host plan", "host forward", "host commit"), 2
        )
        assert all(host < whole for host, whole in zip(found["host plan"], found["step"], strict=True))
    assert engine.free_slots == free
    assert engine._plan.__name__ == "_plan"


def test_every_kind_of_step_is_timed(monkeypatch, task):
    """All sessions with all numbers of nodes, long contexts, a tree, and sampling."""
    monkeypatch.setattr(steps, "step_times", lambda engine, case: {"step": [float(case.sessions)]})
    found = steps.measure(task).figures
    assert "S=2 K=4 chain context=256 T=0.0, step" in found
    assert {"S=1 K=14 tree context=256 T=0.0, step", "S=2 K=8 chain context=256 T=0.8, step"} <= set(found)
    assert len(found) == 2 * 3 + 4


def test_chains_are_timed(pair):
    """A step in a chain is what deeper chains take more, for each level."""
    found = chain_steps.times(pair.drafter, 2, context=8, width=2)
    assert list(found) == ["chain of 2", "chain of 10", "one pass", "step"]
    assert {len(times) for times in found.values()} == {chain_steps.REPEATS}
    both = chain_steps.measure(pair.drafter, 1, context=8)
    assert both["step_ms"] == pytest.approx((both["chain_ms"][10] - both["chain_ms"][2]) / 8, abs=2e-3)


def test_chains_of_every_kind_are_measured(monkeypatch, task):
    """Sessions in number; of one also sampled, and with several children at each level."""
    monkeypatch.setattr(chains.chain_steps, "times", lambda *_, **__: {"step": [1.0]})
    found = chains.measure(task).figures
    assert list(found) == [
        f"S={s} T={t} F={f}, step" for s, t, f in ((1, 0.0, 1), (1, 0.8, 1), (1, 0.0, 3), (2, 0.0, 1))
    ]


def test_rounds_of_a_colocated_drafter_are_timed(monkeypatch, task):
    """Drafts are accepted, all sessions are gone afterwards, and the draft model's memory is free."""
    monkeypatch.setattr(colocated, "STEPS", 5)
    monkeypatch.setattr(colocated, "ROUNDS", 2)
    free = task.pair.engine.free_slots
    found = colocated.measure(task).figures
    whats = "round", "tokens/s", "tokens a round", "node price"
    assert {name for name in found if "S=2" in name} == {
        f"S=2 {way}, {what}" for way in colocated.WAYS for what in whats
    }
    assert all(len(one["repeats"]) == 2 for one in found.values())
    assert min(found["S=2 read, tokens a round"]["repeats"]) > 1.3
    assert task.pair.engine.free_slots == free


def test_rounds_of_heads_are_timed(monkeypatch, task):
    """Of both kinds, by sessions; without a GPU there is one time alone."""
    monkeypatch.setattr(heads, "CONTEXT", 20)
    monkeypatch.setattr(heads, "ROUNDS", 2)
    found = heads.measure(task).figures
    trees = [f"tree of {sum(sizes)} {said}" for sizes in usual_sizes(heads.DEPTH)(2) for said in heads.PARAMS]
    timed = {f"S=2 eagle3 {what}, whole" for what in ("rows", *trees)} | {
        f"S=2 medusa {said}, whole" for said in heads.PARAMS
    }
    assert {name for name in found if "S=2" in name and "whole" in name} == timed
    assert all(len(found[name]["repeats"]) in (1, 2) for name in timed)
    assert min(found["S=1 eagle3 tree of 4 T=0, whole"]["repeats"]) > 0


def test_rounds_of_a_verifier_with_a_head_are_timed(monkeypatch, task):
    """Steps with prompts apart, by sessions; all tokens of a wave are made, whatever the target says."""
    monkeypatch.setattr(rounds, "WAVES", 2)
    monkeypatch.setattr(rounds, "OUTPUT", 8)
    found = rounds.measure(task).figures
    stages = {f"{kind}, {stage}" for kind in ("prompts", "steady") for stage in ("to drafts", "drafts", "to step")}
    assert {name for name in found if "S=2" in name} == {f"S=2 {name}" for name in (*stages, "recorded")}
    assert all(min(one["repeats"]) >= 0 for one in found.values())


def test_text_does_not_depend_on_the_shape_nor_on_speculation(task):
    """The pair in its own shapes says what the bundled one says, and has figures by depth."""
    found = text.measure(task)
    assert found.figures["texts that differ from the small target's"]["median"] == 0.0
    assert (found.results["texts"], found.results["tokens"]) == (2, 8)
    for depth in text.DEPTHS:
        assert len(found.figures[f"chain of {depth}, rate"]["repeats"]) == 2
    assert found.figures["chain of 0, mean accepted length"]["repeats"] == [1.0, 1.0]


def test_speculation_finds_the_targets_own_text(pair):
    """With a drafter, rounds bring more than a token each, and the text is that of plain decoding."""
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12]]
    plain, drafted = (text.speculate(pair.engine, pair.drafter, prompts, 16, depth) for depth in (0, 3))
    assert plain.lengths == [1.0]
    assert drafted.lengths[0] > 1.0
    assert len(drafted.draft_ms) == len(drafted.verify_ms) < len(plain.verify_ms)
