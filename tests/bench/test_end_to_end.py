"""`specq bench gpu`: contestants, tables, failures, and the suite on the CPU at its smallest."""

import json
import shutil
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from specq.bench.end_to_end import children, contest, table
from specq.bench.end_to_end.workload import Workload
from specq.bench.report import Report
from specq.cli import main
from specq.models import resolve_model
from specq.protocol import EngineError

WORK = Workload("pair", "cpu", [1, 8], 4, 2, [[5, 6], [7, 8]])


@pytest.fixture
def pair(tmp_path):
    """The bundled pair as it is, where the suite would make an inflated one."""
    folder = tmp_path / "pair"
    for role in ("target", "draft"):
        shutil.copytree(resolve_model("tiny", role), folder / role)
    return folder


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


# --- the workload -------------------------------------------------------------------------------------------------


def test_a_workload_outlives_its_process(tmp_path):
    path = tmp_path / "workload.json"
    WORK.save(path)
    assert Workload.load(path) == WORK


def test_everybody_gets_at_least_eight_jobs_and_three_for_each_session():
    assert [len(WORK.prompts_for(sessions)) for sessions in WORK.sessions] == [8, 24]


def test_rates_of_all_repetitions_are_kept():
    """The first time is not counted; each later one has a rate."""
    calls = []
    found = WORK.timed(1, lambda prompts: calls.append(len(prompts)) or [[1, 2, 3]] * len(prompts))
    assert calls == [8, 8, 8]
    assert len(found["rates"]) == 2
    assert found["texts"] == [[1, 2, 3]] * 4


# --- contestants --------------------------------------------------------------------------------------------------


def test_one_that_fails_is_reported_and_the_others_go_on(tmp_path, capsys):
    """Its error stands in the report, and it has no row."""

    def fail(_):
        raise EngineError("out of memory")

    report = Report("gpu", tmp_path / "gpu.json")
    good = {"plain": {"1": {"tokens_per_second": 8.0, "rates": [7.0, 9.0]}}}
    contest.run(report, WORK, [("own", fail), ("one", lambda _: good)])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["results"] == {"own": {"error": "EngineError: out of memory"}, "one": good}
    assert found["figures"] == {"one plain S=1": {"unit": "tokens/s", "median": 8.0, "repeats": [7.0, 9.0]}}
    printed = capsys.readouterr()
    assert "out of memory" in printed.err
    assert len(printed.out.splitlines()) == 2


def test_rates_have_rows_and_steps_have_figures():
    """Models by themselves have step times, and no tokens a second."""
    found = {"verify": {"greedy S=1 K=0": {"step_ms": 2.5}}}
    assert table.rows("alone", found) == []
    assert table.figures("alone", found)["alone verify greedy S=1 K=0"]["median"] == 2.5
    rates = {"sync": {"8": {"tokens_per_second": 80.0, "rates": [80.0], "mean_accepted_length": 2.0}}}
    assert table.rows("own", rates) == [("own", "sync", "8", 80.0, 10.0, 2.0, "")]


def test_a_pair_that_is_not_there_is_made(tmp_path, monkeypatch):
    """In the shapes asked for; one that is there is left alone."""
    commands = []
    monkeypatch.setattr(contest, "subprocess", SimpleNamespace(run=lambda command, check: commands.append(command)))
    shapes = {"target": "big", "draft": "small", "draft_shape": "vocab=9"}
    contest._build(tmp_path / "pair", "cpu", shapes)
    (command,) = commands
    assert command[2:5] == ["specq", "models", "inflate"]
    assert command[-6:] == ["--target", "big", "--draft", "small", "--draft-shape", "vocab=9"]
    (tmp_path / "pair" / "draft").mkdir(parents=True)
    (tmp_path / "pair" / "draft" / "config.json").touch()
    contest._build(tmp_path / "pair", "cpu", shapes)
    assert len(commands) == 1


def test_a_child_that_fails_is_an_error_with_what_it_said():
    with pytest.raises(EngineError, match=r"(?s)nobody ended with status 1.*KeyError"):
        children.measure_in_child("nobody", WORK)


def test_a_child_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(children, "PATIENCE_S", 0.01)
    with pytest.raises(EngineError, match=r"no result within 0\.01 s"):
        children.measure_in_child("alone", WORK)


# --- the suites on the CPU ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_deployment_on_the_cpu(tmp_path, pair):
    """A drafter in a process of its own, both modes, one session; `two` is left out where there is one GPU."""
    out = tmp_path / "gpu.json"
    options = ["--device", "cpu", "--pair", pair, "--sessions", 1, "--output-len", 4, "--repeats", 1, "--out", out]
    outcome = bench("gpu", "--only", "one", "--only", "two", *options)
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(out.read_text())
    assert list(found["figures"]) == ["one sync S=1", "one async S=1"], found["results"]
    assert found["settings"]["output_len"] == 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rivals_on_the_cpu(tmp_path, pair):
    """transformers and the models by themselves, each in its own process."""
    out = tmp_path / "rivals.json"
    options = ["--device", "cpu", "--pair", pair, "--sessions", 1, "--output-len", 4, "--repeats", 1, "--out", out]
    outcome = bench("gpu", "--only", "transformers", "--only", "alone", *options)
    assert outcome.exit_code == 0, outcome.output
    found = json.loads(out.read_text())
    assert {"transformers generate S=1", "transformers assisted S=1", "alone draft 1"} <= set(found["figures"]), found
    assert "alone verify greedy S=1 K=6" in found["figures"]
