"""Cells of the question whether the default is ever slower: the grid, paired ratios, what passes, and going on with a
report."""

import json

import pytest
from click.testing import CliRunner

from bench.deployments import Deployments
from bench.figures import paired
from bench.scenario import Completion, Pair, Settings
from bench.suites.never_slower import (
    LEAST_PROMPTS,
    Pace,
    ServedCell,
    cells,
    names_of,
    passes,
    size_of_turns,
    summary,
    take_turns,
)
from bench.turns import Turn
from specq.cli import main
from specq.samples import Prompt

REAL, RANDOM = Pair("tiny", "tiny", "tiny"), Pair("random", "tiny", "random")
PROMPT = Prompt("a", "0", (1,))


def turns(**rates: list[float]) -> list[Turn]:
    """Return a turn of 100 tokens for each rate."""
    return [
        Turn(name, repeat, (PROMPT,), [Completion([0] * 100, 1.0, {"rounds": 50})], 100 / rate)
        for name, own in rates.items()
        for repeat, rate in enumerate(own)
    ]


def test_the_grid() -> None:
    """All pairs. Without drafters, pairs that differ only in the draft model are the same cell."""
    names = [cell.name for cell in cells((REAL, RANDOM), ("none", "two"), (1, 16))]
    assert names == ["tiny/none/1", "tiny/none/16", "tiny/two/1", "tiny/two/16", "random/two/1", "random/two/16"]


def test_ratios_are_of_turns_beside_each_other() -> None:
    """A machine that becomes four times as slow changes none of them."""
    found = paired([100.0, 25.0, 50.0], [50.0, 12.5, 25.0])
    assert (found["median"], found["interval"], found["ratios"]) == (2.0, [2.0, 2.0], [2.0, 2.0, 2.0])


def test_an_interval_holds_the_median_and_not_the_outlier() -> None:
    """Nine ratios about 1, and one of 5."""
    ratios = [0.96, 0.97, 0.98, 0.99, 1.0, 1.01, 1.02, 1.03, 1.04, 5.0]
    low, high = paired(ratios, [1.0] * 10)["interval"]
    assert 0.96 <= low < 1.005 < high <= 1.04


def test_the_rival_is_the_better_of_plain_and_lookup() -> None:
    """By their medians; all of a cell's ratios are to that one."""
    found = summary(turns(plain=[10, 10, 40], lookup=[20, 20, 20], default=[19, 19, 19], forced=[30, 30, 30]))
    assert found["best"] == "lookup"
    assert (found["to_best"]["median"], found["forced_to_best"]["median"]) == (0.95, 1.5)
    assert found["to_forced"]["median"] == pytest.approx(0.6333, abs=1e-4)


@pytest.mark.parametrize(
    ("default", "forced", "is_ok"),
    [(98, 50, True), (97, 50, False), (98, 104, True), (100, 106, False), (103, 106, True), (100, None, True)],
)
def test_what_passes(default: float, forced: float | None, is_ok: bool) -> None:
    """At least 0.98 of the best, and 0.97 of forced drafts where these win by 5%: silence is not enough there."""
    rates = {"plain": [100.0], "lookup": [90.0], "default": [default]} | ({"forced": [forced]} if forced else {})
    assert passes(summary(turns(**rates))) is is_ok


class Recorder:
    """A contestant that takes no time, and knows what it was asked."""

    def __init__(self, name: str) -> None:
        self.name, self.asked, self.cpu_s, self.concurrency = name, [], {}, 0

    def run(self, prompts, settings):
        self.asked.append((tuple(prompts), settings.output_len))
        return [Completion([0] * settings.output_len, 1.0, {"rounds": 1}) for _ in prompts]


def test_all_do_the_same_jobs_and_know_the_prompts() -> None:
    """Each verifier has computed every prompt before a turn counts, and in a repetition all get the same prompts."""
    prompts = [Prompt("a", str(number), (number,)) for number in range(LEAST_PROMPTS)]
    contestants = [Recorder(name) for name in ("plain", "lookup", "default", "forced")]
    pace = Pace(turn_s=0.0, repeats=3, settle_s=0.0, output_len=5)
    found = take_turns(ServedCell(REAL, "one", 3), pace, contestants, prompts, Settings(output_len=5), lambda _: None)
    plain, *others = contestants
    for other in others:  # one of each verifier
        assert other.asked[0] == (tuple(prompts), 1)
    counted = [one.asked[-pace.repeats :] for one in contestants]
    assert all(asked == counted[0] for asked in counted)
    assert len({jobs for jobs, _ in counted[0]}) > 1, "repetitions differ"
    assert set(found["rates"]) == {"plain", "lookup", "default", "forced"}
    assert len(plain.asked) == 1 + pace.repeats


@pytest.mark.parametrize(
    ("rate", "sessions", "jobs", "num_tokens"),
    [(1000, 1, 10, 96), (25, 1, 1, 25), (100, 16, 4, 24), (400, 4, 4, 25), (9000, 4, 23, 96)],
)
def test_turns_take_as_long_as_was_asked(rate, sessions, jobs, num_tokens):
    """Fast models run many jobs; several sessions run several each, and shorter ones, even if a turn takes longer
    then."""
    assert size_of_turns(rate, sessions, Pace(1.0, 3, 0.0, 96)) == (jobs, num_tokens)


class Group:
    """A group that writes down what becomes of it."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def __enter__(self):
        self.events.append(f"{self.name} starts")
        return self

    def __exit__(self, *_):
        self.events.append(f"{self.name} ends")

    def wait_ready(self, timeout_s):
        self.events.append(f"{self.name} is ready")
        if self.name == "broken":
            raise RuntimeError("not ready")


def test_groups_stay_for_the_next_cell_and_start_one_by_one():
    events: list[str] = []
    starters = {name: lambda name=name: Group(name, events) for name in ("alone", "a", "b", "broken")}

    def serve(*names):
        return deployments.serve({name: starters[name] for name in names})

    with Deployments() as deployments:
        assert set(serve("alone", "a")) == {"alone", "a"}
        assert events == ["alone starts", "alone is ready", "a starts", "a is ready"]
        serve("alone", "a")
        assert len(events) == 4
        serve("alone", "b")
        assert events[4:] == ["a ends", "b starts", "b is ready"]
        with pytest.raises(RuntimeError):
            serve("alone", "broken")
        assert events[7:] == ["b ends", "broken starts", "broken is ready", "broken ends"]
        serve("alone")
    assert events[11:] == ["alone ends"]


def test_cells_share_what_does_not_depend_on_them():
    """The sessions change no process; those without drafters serve all cells of a target."""
    one, more, other = (names_of(ServedCell(*of)) for of in ((REAL, "one", 1), (REAL, "one", 16), (RANDOM, "two", 1)))
    assert one == more
    assert one["alone"] == other["alone"]
    assert len({*one.values(), *other.values()}) == 5
    assert set(names_of(ServedCell(REAL, "none", 1))) == {"alone", "default"}


# --- the command --------------------------------------------------------------------------------------------------


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", "never-slower", *map(str, arguments)])


@pytest.fixture
def measured(monkeypatch):
    """The cells that were measured, each with made-up figures."""
    found = []

    def measure_cell(cell, pace, deployments, tell):
        found.append(cell.name)
        rates = {"plain": [100.0], "lookup": [90.0], "default": [101.0], "forced": [80.0]}
        return summary(turns(**rates)) | {"cpu_share_of_default": {"draft-1": 0.01}}

    monkeypatch.setattr("bench.suites.never_slower.measure_cell", measure_cell)
    return found


def test_a_report_is_gone_on_with_cell_by_cell(tmp_path, measured):
    """With --resume what is there stays and is not measured again."""
    out = tmp_path / "report.json"
    for name in ("tiny/one/1", "tiny/two/4", "tiny/one/1"):
        outcome = bench("--only", name, "--resume", "--out", out)
        assert outcome.exit_code == 0, outcome.output
    assert measured == ["tiny/one/1", "tiny/two/4"]
    report = json.loads(out.read_text())
    assert list(report["results"]) == measured
    assert report["figures"]["tiny/two/4 to_best"]["median"] == pytest.approx(1.01)
    assert outcome.stdout.count(" ok") == 2


def test_a_cell_that_failed_is_measured_again(tmp_path, measured):
    out = tmp_path / "report.json"
    bench("--only", "tiny/one/1", "--out", out)
    report = json.loads(out.read_text())
    report["results"]["tiny/one/1"] = {"error": "EngineError: not ready"}
    out.write_text(json.dumps(report))
    bench("--only", "tiny/one/1", "--resume", "--out", out)
    assert measured == ["tiny/one/1"] * 2
    assert "error" not in json.loads(out.read_text())["results"]["tiny/one/1"]


def test_only_reports_of_this_suite_are_gone_on_with(tmp_path, measured):
    out = tmp_path / "report.json"
    out.write_text(json.dumps({"suite": "pair", "figures": {}, "results": {}}))
    outcome = bench("--only", "tiny/one/1", "--resume", "--out", out)
    assert outcome.exit_code != 0
    assert "suite pair" in str(outcome.stderr) + str(outcome.exception)
    assert not measured


def test_a_cell_that_is_not_there_is_refused(measured):
    outcome = bench("--only", "tiny/three/1")
    assert outcome.exit_code != 0
    assert "tiny/three/1" in str(outcome.stderr) + str(outcome.exception)
    assert not measured
