"""`specq bench steps` on the CPU at its smallest, and its figures with a toy engine."""

import json

import pytest
from click.testing import CliRunner

from bench.engine_steps import WARM_UP, greedy_steps, measure, measure_prompts
from specq.cli import main
from specq.testing.toy import ToyEngine


def test_every_kind_of_step_is_timed():
    """Greedy and sampled, by sessions and drafts. Warm-up steps are not counted, and no session stays open."""
    engine = ToyEngine()
    found = dict(measure(engine, (1, 2), (0, 3), 8, 5))
    assert list(found) == [f"{kind} S={s} K={k} step" for kind in ("greedy", "sampled") for s in (1, 2) for k in (0, 3)]
    assert {len(times) for times in found.values()} == {5}
    assert all(milliseconds > 0 for times in found.values() for milliseconds in times)
    assert engine.free_slots == engine.info.kv_slots


def test_steps_with_prompts_compute_them_whole():
    engine = ToyEngine()
    found = dict(measure_prompts(engine, (5, 9), (1, 3), 2))
    assert list(found) == [f"prompts S={s} N={n} step" for s in (1, 3) for n in (5, 9)]
    assert {len(times) for times in found.values()} == {2}
    per_kind = WARM_UP + 2
    assert engine.num_rows == [s * n for s in (1, 3) for n in (5, 9) for _ in range(per_kind)]
    assert engine.free_slots == engine.info.kv_slots


def test_greedy_steps_run_where_they_are_looked_at():
    """Each kind of step with the sessions and drafts that it is named after."""
    engine, rows = ToyEngine(), {}
    for kind, run in greedy_steps(engine, (1, 2), (0, 3), 8):
        run()
        rows[kind] = engine.num_rows[-1]
    assert rows == {f"greedy S={s} K={k} step": s * (1 + k) for s in (1, 2) for k in (0, 3)}
    assert engine.free_slots == engine.info.kv_slots


def test_kernels_need_a_device(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    outcome = CliRunner().invoke(main, ["bench", "steps", "--model", "tiny", "--kernels"])
    assert outcome.exit_code != 0
    assert "CUDA device" in outcome.output


@pytest.mark.slow
def test_the_suite_on_the_cpu(tmp_path):
    out = tmp_path / "steps.json"
    options = ["--device", "cpu", "--sessions", "2", "--drafts", "0", "--drafts", "4", "--context", "16"]
    options += ["--model", "tiny", "--prompt", "30"]
    arguments = ["bench", "steps", *options, "--repeats", "2", "--out", str(out)]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(out.read_text())
    kinds = [f"{kind} S=2 K={k} step" for kind in ("greedy", "sampled") for k in (0, 4)]
    assert list(report["figures"]) == [*kinds, "prompts S=2 N=30 step"]
    assert all(len(one["repeats"]) == 2 for one in report["figures"].values())
