"""`specq bench pair`, of all data sets: right answers beside speed, a plot of each, and the run at Weights & Biases."""

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner

from bench import scenario
from bench.suites import pair
from specq.cli import main
from specq.client import Client
from specq.protocol import Accepted, Submit
from specq.testing.fake_broker import CODEC, FakeBroker, answer, tokens

STUB = """
class Error(Exception): pass
class Image(str): pass
class Run:
    def __init__(self, given): self.given, self.logged, self.summary, self.ended = given, [], {}, False
    def __enter__(self): return self
    def __exit__(self, *_): self.ended = True
    def log(self, values): self.logged.append(values)
runs = []
def init(**given):
    if given["group"] == "nobody's": raise Error("No API key configured.")
    runs.append(Run(given))
    return runs[-1]
"""
DATASETS = ("gsm8k", "humaneval", "mt_bench")


class FakeDeployments:
    """Instead of processes: brokers that always say the same, one of them to `plain`."""

    said: ClassVar = {"alone": "So it is $5.", "specq": "So it is $5."}

    def __enter__(self):
        self.running = {}
        return self

    def serve(self, wanted):
        for name in wanted:
            ids = CODEC.encode(self.said[name])
            broker = FakeBroker(lambda message, ids=ids: _answer(message, ids)).__enter__()
            self.running[name] = SimpleNamespace(client=Client(broker.address), broker=broker)
        return self.running

    def __exit__(self, *_):
        for one in self.running.values():
            one.client.close()
            one.broker.__exit__()


def _answer(message, ids):
    if isinstance(message, Submit):
        return [Accepted(job_id=message.job_id), tokens(message.job_id, 0, ids, "stop")]
    return answer(message)


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Run the suite with these options on three data sets of two prompts, of which one has no right answers."""
    monkeypatch.setattr(pair, "Deployments", FakeDeployments)
    monkeypatch.setattr(scenario, "codec_of", lambda _: CODEC)
    paths = [tmp_path / f"{name}.jsonl" for name in DATASETS]
    for path, reference in zip(paths, ({"answer": "#### 5"}, {"answer": "6"}, {}), strict=True):
        path.write_text("".join(json.dumps({"token_ids": [5, n], **reference}) + "\n" for n in (6, 7)))
    monkeypatch.setattr(pair, "shipped_and_chats", lambda: tuple(map(str, paths)))
    out = tmp_path / "out.json"

    def run(*options):
        given = ("--only", "plain", "--only", "specq", "--repeats", "2", "--out", str(out), *options)
        outcome = CliRunner().invoke(main, ["bench", "pair", *given])
        report = json.loads(out.read_text()) if out.exists() else {}
        return outcome, report

    return run


@pytest.fixture
def canvas(monkeypatch):
    """What stands for all of matplotlib's figures and panels: it keeps what it is asked for, and draws nothing."""
    canvas = MagicMock()
    canvas.subplots.side_effect = lambda rows, columns, squeeze: [[canvas] * columns]
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=lambda **_: canvas))
    monkeypatch.setattr("bench.figures.find_spec", lambda name: name == "matplotlib")
    return canvas


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A stub of the package, imported as the real one would be, that keeps what it is called with."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "wandb.py").write_text(STUB)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.syspath_prepend(tmp_path / "stub")
    return lambda: sys.modules["wandb"].runs


def test_all_data_sets_with_a_plot_each(bench, canvas):
    """Each has its speed, also with several sessions, and as many right answers with drafts as without."""
    outcome, report = bench("--all", "--accuracy", "--concurrency", "2")
    assert outcome.exit_code == 0, outcome.output
    rows = [line.split() for line in outcome.stdout.splitlines()]
    assert [row[:2] for row in rows if row[0] in DATASETS] == [
        [name, who] for name in DATASETS for who in ("plain", "specq")
    ]
    shares = {(row[0], row[-1]) for row in rows if row[0] in DATASETS}
    assert shares == {("gsm8k", "100.0%"), ("humaneval", "0.0%"), ("mt_bench", "-")}
    assert outcome.stdout.splitlines()[-1] == "as many right answers with drafts as without"
    assert report["figures"]["gsm8k specq right"] == {"unit": "share", "median": 1.0, "repeats": [1.0, 1.0]}
    assert "mt_bench plain right" not in report["figures"]
    assert [call.args[0].name for call in canvas.savefig.call_args_list] == [f"out_{name}.png" for name in DATASETS]
    titles = [call.kwargs["title"] for call in canvas.set.call_args_list]
    assert titles == ["tokens/s", "right"] * 2 + ["tokens/s"], "nobody can be right on the last one"
    assert canvas.bar.call_args_list[1].args == (["plain", "specq"], [1.0, 1.0])
    rates = report["figures"]["mt_bench specq tokens/s"]["repeats"]
    assert canvas.plot.call_args_list[-1].args[:2] == (["specq"] * 2, rates)


def test_without_matplotlib_there_is_all_but_plots(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    outcome, report = bench("--all")
    assert outcome.exit_code == 0, outcome.output
    assert "no plots: this needs matplotlib, which is not installed" in outcome.stderr
    assert "mt_bench plain tokens/s" in report["figures"]
    assert not list(tmp_path.glob("*.png"))


def test_other_answers_with_drafts_are_said(bench, monkeypatch):
    monkeypatch.setattr(FakeDeployments, "said", {"alone": "It is 5", "specq": "It is 6"})
    outcome, _ = bench("--all", "--accuracy")
    assert "NOT as many right answers with drafts as without: gsm8k, humaneval" in outcome.stdout
    assert "24 completions compared with plain: 6 differ" in outcome.stdout


def test_a_run_at_weights_and_biases(bench, canvas, wandb):
    """Settings and machine as its configuration, a step a repetition, medians as its summary, and the plots."""
    outcome, report = bench("--all", "--wandb", "--group", "nightly")
    assert outcome.exit_code == 0, outcome.output
    (run,) = wandb()
    assert (run.given["project"], run.given["group"], run.given["job_type"]) == ("specq", "nightly", "pair")
    assert run.given["config"]["settings"]["repeats"] == 2
    assert run.given["config"]["machine"] == report["machine"]
    first, second, *plots = run.logged
    rates = report["figures"]["specq tokens/s"]
    assert [first["specq tokens per s"], second["specq tokens per s"]] == rates["repeats"]
    assert run.summary["specq tokens per s"] == rates["median"]
    assert [name for one in plots for name in one] == [f"out_{name}" for name in DATASETS]
    assert run.ended


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--group", "x"], "give --wandb, too"),
        (["--wandb", "--group", "nobody's"], "specq: Weights & Biases: No API key configured."),
        (["--accuracy", "--only", "plain", "--dataset", "no-such"], "no-such"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_measured(bench, wandb, monkeypatch, options, reason):
    monkeypatch.setattr(pair, "Deployments", lambda: pytest.fail("processes were started"))
    outcome, report = bench(*options)
    assert (outcome.exit_code, report) == (2, {})
    assert reason in outcome.stderr


def test_a_missing_package_is_named_before_anything_is_measured(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(pair, "Deployments", lambda: pytest.fail("processes were started"))
    outcome, _ = bench("--wandb")
    assert outcome.exit_code == 2
    assert outcome.stderr == (
        "specq: this needs wandb, which is not installed; in a clone of specq: .venv/bin/pip install -e '.[wandb]'\n"
    )
