"""Contestants of `specq bench gpu` one after the other: those that fail, those that were measured before, the table."""

import json
from types import SimpleNamespace

import pytest

from bench.end_to_end import contest, table, vllm
from bench.end_to_end.contest import ContestPart
from bench.end_to_end.workload import Workload
from bench.report import Report
from specq.protocol import ConfigError, EngineError

WORK = Workload("pair", "cpu", [1, 8], 4, 2, [[5, 6], [7, 8]])
RATES = {"tokens_per_second": 8.0, "rates": [7.0, 9.0], "sessions": 1, "temperature": 0.0}


def fail(_work):
    raise EngineError("out of memory")


def test_one_that_fails_is_reported_and_the_others_go_on(tmp_path, capsys):
    """Its error stands in the report, and it has no row."""
    report = Report("gpu", tmp_path / "gpu.json")
    good = {"plain": {"1": RATES}}
    assert contest.run(report, WORK, [ContestPart("own", fail), ContestPart("one", lambda _: good)]) == ["own"]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["results"] == {"own": {"error": "EngineError: out of memory"}, "one": good}
    assert found["figures"] == {"one plain S=1": {"unit": "tokens/s", "median": 8.0, "repeats": [7.0, 9.0]}}
    printed = capsys.readouterr()
    assert "out of memory" in printed.err
    assert len(printed.out.splitlines()) == 2


def test_a_delay_that_fails_is_named(tmp_path):
    found = {"plain 1 ms": {"1": RATES}, "error 20 ms": "EngineError: out of memory"}
    assert contest.run(Report("gpu", tmp_path / "gpu.json"), WORK, [ContestPart("far", lambda _: found)]) == [
        "far 20 ms"
    ]


def test_variants_of_one_contestant_are_put_together_and_what_is_there_is_not_measured_again(tmp_path):
    """A variant that failed before is; so is a contestant that failed."""
    out, measured = tmp_path / "gpu.json", []
    report = Report("gpu", out)

    def part(name, variant=""):
        def measure(_work):
            measured.append(name + variant)
            return {variant or "plain": {"1": RATES}}

        return ContestPart(name, measure, variant)

    parts = [ContestPart("own", fail), part("vllm-spec", "K=2"), ContestPart("vllm-spec", fail, "K=3")]
    assert contest.run(report, WORK, parts) == ["own", "vllm-spec K=3"]
    again = Report("gpu", out)
    again.resume()
    assert contest.run(again, WORK, [part("own"), part("vllm-spec", "K=2"), part("vllm-spec", "K=3")]) == []
    assert measured == ["vllm-specK=2", "own", "vllm-specK=3"]
    results = json.loads(out.read_text())["results"]
    assert {"K=2", "K=3"} <= set(results["vllm-spec"])
    assert set(results["own"]) == {"plain"}


def test_rates_have_rows_and_figures():
    """Failures and entries without a rate have no row. Columns without information are left out."""
    found = {"K=3": {"1": {"error": "no room"}}, "engine plain": {"max_num_seqs": 128}}
    assert table.table("vllm", found) == []
    assert table.figures("vllm", found) == {}
    rates = {"plain": {"1": RATES}, "sync": {"1": RATES | {"tokens_per_second": 12.0, "step_ms": 9.0}}}
    assert table.notes("vllm", found) == ["vllm, engine plain: max_num_seqs 128"]
    header, plain, sync = table.table("own", rates)
    assert header == ("CONTESTANT", "T", "SESSIONS", "TOKENS/S", "STEP MS", "TO PLAIN")
    assert plain == ("own plain", 0.0, 1, 8.0, "", "")
    assert sync == ("own sync", 0.0, 1, 12.0, 9.0, 1.5)


def rated(value):
    return {"tokens_per_second": value, "rates": [value]}


def test_others_are_compared_with_vllm_plain_and_with_the_best_of_vllms():
    """At each load another depth may be best; a load that failed or that vLLM was not measured with is left out."""
    results = {
        "vllm": {"plain": {"1": rated(100.0), "8": rated(800.0)}, "engine plain": {"max_num_seqs": 128}},
        "vllm-spec": {"K=2": {"1": rated(150.0), "8": rated(700.0)}, "K=5": {"1": rated(200.0), "8": {"error": "..."}}},
        "vllm-ngram": {"K=3": {"1": rated(160.0), "8": rated(750.0)}},
        "own": {"plain": {"1": rated(110.0), "8": rated(840.0)}, "async": {"1": rated(300.0), "64": rated(9.0)}},
    }
    header, one, eight = table.summary(results)
    assert header == ("SESSIONS", "VLLM", "ITS DRAFTS", "BEST", "own plain TO BOTH", "own async TO BOTH")
    assert one == ("1", 100.0, 200.0, "draft model K=5", "1.10 0.55", "3.00 1.50")
    assert eight == ("8", 800.0, 750.0, "n-grams K=3", "1.05 1.05", "")
    assert table.summary({"own": results["own"]}) == []


def test_a_pair_that_is_not_there_is_made(tmp_path, monkeypatch):
    """In the shapes asked for; one that is there is left alone."""
    commands = []
    status = [0]
    run = lambda command, check: commands.append(command) or SimpleNamespace(returncode=status[0])  # noqa: E731
    monkeypatch.setattr(contest, "subprocess", SimpleNamespace(run=run))
    shapes = {"target": "big", "draft": "small", "draft_shape": "vocab=9"}
    contest._build(tmp_path / "pair", "cpu", shapes)
    (command,) = commands
    assert command[2:5] == ["specq", "models", "inflate"]
    assert command[-6:] == ["--target", "big", "--draft", "small", "--draft-shape", "vocab=9"]
    contest._build(tmp_path / "other", "cpu", {"model": "smollm2", "parallel": "", "heads": ("a", "b")})
    assert commands.pop()[-6:] == ["--model", "smollm2", "--heads", "a", "--heads", "b"]
    (tmp_path / "pair" / "draft").mkdir(parents=True)
    (tmp_path / "pair" / "draft" / "config.json").touch()
    contest._build(tmp_path / "pair", "cpu", shapes)
    assert len(commands) == 1
    status[0] = 2
    with pytest.raises(ConfigError, match="unfit could not be made"):
        contest._build(tmp_path / "unfit", "cpu", shapes)


def test_a_child_that_fails_is_an_error_with_what_it_said():
    with pytest.raises(EngineError, match=r"(?s)vllm ended with status 1.*TypeError"):
        vllm.measure_in_child(WORK, colour="red")


def test_a_child_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(vllm, "PATIENCE_S", 0.01)
    with pytest.raises(EngineError, match=r"no result within 0\.01 s"):
        vllm.measure_in_child(WORK)
