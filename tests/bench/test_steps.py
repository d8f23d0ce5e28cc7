"""`specq bench steps` on the CPU at its smallest, and its figures with a toy engine."""

import json

import pytest
from click.testing import CliRunner

from bench.engine_steps import greedy_steps, measure
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
    options += ["--model", "tiny"]
    arguments = ["bench", "steps", *options, "--repeats", "2", "--out", str(out)]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(out.read_text())
    assert list(report["figures"]) == [f"{kind} S=2 K={k} step" for kind in ("greedy", "sampled") for k in (0, 4)]
    assert all(len(one["repeats"]) == 2 for one in report["figures"].values())
