"""The group of suites, the one format of reports, and two reports side by side."""

import json

import click
import pytest
from click.testing import CliRunner

from bench.report import HEADER, Report, compare_reports, figure
from bench.suites import DEFAULT, SUITES, SUMMARIES
from specq.cli import main
from specq.protocol import ConfigError
from specq.runtime import resolve


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


# --- suites -------------------------------------------------------------------------------------------------------


def test_every_suite_has_a_summary():
    assert list(SUITES) == list(SUMMARIES)
    assert DEFAULT in SUITES


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("name", SUITES)
def test_numbers_are_finite(name, value):
    """NaN would pass a range check, and an infinite duration would never end."""
    command = resolve("suite", SUITES, name)
    options = [one for one in command.params if isinstance(one.type, click.FloatRange)]
    for option in options:
        with pytest.raises(click.BadParameter, match=f"{value} is not"):
            option.type.convert(value, option, None)


@pytest.mark.parametrize("name", SUITES)
def test_suites_are_commands_of_their_name(name):
    """Each has the options that all have, and says in its help what it measures."""
    command = resolve("suite", SUITES, name)
    assert command.name == name
    assert {"out", "commit"} <= {parameter.name for parameter in command.params}
    assert command.help


def test_help_lists_the_suites_without_importing_them():
    outcome = bench("--help")
    assert outcome.exit_code == 0
    assert all(name in outcome.stdout for name in (*SUITES, "--compare"))


@pytest.mark.parametrize("arguments", [(), ("--k", "3"), ("pair", "--k", "3")])
def test_options_without_a_suite_go_to_the_default_one(monkeypatch, arguments):
    from bench.suites import pair

    asked = []
    monkeypatch.setattr(pair, "run", lambda settings, names, tell, **_: asked.append(settings.k) or _nothing())
    outcome = bench(*arguments)
    assert outcome.exit_code == 0, outcome.output
    assert asked == [3 if arguments else 5]


def _nothing():
    agreement = {"num_compared": 0, "reference": None, "num_different": 0, "num_near_ties": 0, "differences": []}
    return {"settings": {}, "contestants": {}, "agreement": agreement}


def test_an_unknown_suite_is_refused():
    outcome = bench("nonsense")
    assert outcome.exit_code == 2
    assert "nonsense" in outcome.stderr


# --- reports ------------------------------------------------------------------------------------------------------


def test_a_report_is_written_after_each_part(tmp_path):
    """What is known is on disk at once, with where it comes from."""
    out = tmp_path / "report.json"
    report = Report("pair", out, commit="abc")
    report.update(settings={"repeats": 2})
    assert json.loads(out.read_text())["figures"] == {}
    report.update(figures={"x": figure("ms", [1.0, 3.0, 2.0])}, results={1: "any"})
    found = json.loads(out.read_text())
    assert (found["suite"], found["commit"], found["settings"]) == ("pair", "abc", {"repeats": 2})
    assert found["figures"] == {"x": {"unit": "ms", "median": 2.0, "repeats": [1.0, 3.0, 2.0]}}
    assert found["results"] == {"1": "any"}


# --- two reports --------------------------------------------------------------------------------------------------


def written(path, suite="pair", **figures):
    report = Report(suite, path, commit="same")
    report.update(figures={name: figure(unit, repeats) for name, (unit, repeats) in figures.items()})
    return path


def test_two_reports_are_compared_by_medians(tmp_path):
    """One row for each figure that both have, the median ratio of each unit, and what only one of them has."""
    a = written(tmp_path / "a.json", plain=("tokens/s", [10, 20, 30]), specq=("tokens/s", [40]), first=("ms", [0]))
    b = written(
        tmp_path / "b.json", plain=("tokens/s", [30]), specq=("tokens/s", [50, 54]), first=("ms", [3]), new=("ms", [1])
    )
    header, *rows = compare_reports(*(json.loads(path.read_text()) for path in (a, b)))[0]
    assert header == HEADER
    assert rows[0] == ("plain", "tokens/s", "20", "10..30", "30", "30..30", "1.500")
    assert [row[-1] for row in rows] == ["1.500", "1.300", "-"]
    outcome = bench("--compare", a, b)
    assert outcome.exit_code == 0, outcome.output
    assert "median ratio of 2 figures in tokens/s: 1.400" in outcome.stdout
    assert "only in B: new" in outcome.stdout


def test_other_circumstances_are_named(tmp_path):
    """A ratio of two commits or machines says so."""
    a, b = (json.loads(written(tmp_path / name, x=("ms", [1])).read_text()) for name in ("a.json", "b.json"))
    b["commit"], b["machine"] = "other", b["machine"] | {"cores": 512}
    notes = compare_reports(a, b)[1]
    assert "commit: same and other" in notes
    assert any(note.startswith("machine: cores ") and note.endswith(" and 512") for note in notes)


def test_what_cannot_be_compared_is_refused(tmp_path):
    """Different suites, no common results, other files, and a suite beside --compare."""
    a = written(tmp_path / "a.json", x=("ms", [1]))
    other = written(tmp_path / "b.json", "shapes", x=("ms", [1]))
    nothing = written(tmp_path / "c.json", y=("ms", [1]))
    none = tmp_path / "d.json"
    none.write_text("[]")
    for file, reason in ((other, "different suites"), (nothing, "no figure in common"), (none, "not a report")):
        outcome = bench("--compare", a, file)
        assert outcome.exit_code == 2
        assert reason in outcome.stderr
    assert "remove the suite name" in bench("--compare", a, a, "pair").stderr
    with pytest.raises(ConfigError, match="pair and shapes"):
        compare_reports(*(json.loads(path.read_text()) for path in (a, other)))


def test_a_report_is_not_begun_where_it_cannot_be_written(tmp_path):
    """The message names the directory that is not there, before anything is measured."""
    done = CliRunner().invoke(main, ["bench", "roundtrip", "--out", str(tmp_path / "none" / "report.json")])
    assert done.exit_code == 2
    assert f"{tmp_path / 'none'} is not a directory" in done.output
