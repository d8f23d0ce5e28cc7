"""`specq simulate`: the table, the JSON, the plots, and what is said where something is missing."""

import json
import sys
import tomllib
from dataclasses import replace

import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.simulate.report import numeric_axes, run_points, series, table, to_json, vs_plain
from specq.simulate.scenarios import points

QUICK = """
    [network]
    rtt_ms = [1, 30]
    [traffic]
    warm_s = 0.5
    seconds = 1.5
    [speculation]
    mode = ["plain", "async"]
"""
NO_MATPLOTLIB = {"matplotlib": None, "matplotlib.figure": None}


@pytest.fixture(scope="module")
def outcomes():
    return run_points(points(tomllib.loads(QUICK)), lambda _: None)


def test_all_points_are_simulated_in_order(outcomes):
    told: list[str] = []
    again = run_points(points(tomllib.loads(QUICK)), told.append, processes=2)
    assert [o.labels for o in again] == [o.labels for o in outcomes]
    assert [o.figures for o in again] == [o.figures for o in outcomes]
    assert told[-1].startswith("4/4 network.rtt_ms 30, speculation.mode async: ")


def test_ratios_are_to_plain_decoding_on_the_same_hardware(outcomes):
    """At any round trip: plain decoding has none."""
    assert vs_plain(outcomes[0], outcomes) == 1.0
    plain, ahead = outcomes[2], outcomes[3]
    assert vs_plain(ahead, outcomes) == pytest.approx(ahead.figures.goodput / plain.figures.goodput, rel=1e-3)
    assert vs_plain(ahead, [ahead]) is None
    busier = replace(plain.scenario, traffic=replace(plain.scenario.traffic, sessions=2))
    assert vs_plain(ahead, [ahead, replace(plain, scenario=busier)]) is None


def test_the_table_has_a_row_a_scenario(outcomes):
    header, *found = table(outcomes)
    assert header[:4] == ("RTT_MS", "MODE", "TOKENS/S", "VS PLAIN")
    assert [row[:2] for row in found] == [(1, "plain"), (1, "async"), (30, "plain"), (30, "async")]
    assert {len(row) for row in found} == {len(header)}


def test_the_json_has_everything(outcomes):
    found = json.loads(json.dumps(to_json(outcomes)))["points"]
    assert [point["labels"] for point in found] == [o.labels for o in outcomes]
    assert found[3]["figures"]["goodput"] == outcomes[3].figures.goodput
    assert found[3]["figures"]["token_ms"]["p95"] > 0
    assert found[3]["scenario"]["network"]["rtt_ms"] == 30
    assert found[3]["simulator"]["num_events"] > 0


def test_series_run_along_an_axis(outcomes):
    assert numeric_axes(outcomes) == ["network.rtt_ms"]
    lines = series(outcomes, "network.rtt_ms").items()
    found = {name: [o.labels["network.rtt_ms"] for o in own] for name, own in lines}
    assert found == {"plain": [1, 30], "async": [1, 30]}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "quick.toml"
    path.write_text(QUICK)
    return path


def invoke(*arguments: object):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def test_the_command_prints_a_table_and_writes_json(config, tmp_path, monkeypatch):
    """Without matplotlib too, which it says."""
    for name in NO_MATPLOTLIB:
        monkeypatch.setitem(sys.modules, name, None)
    result = invoke(config, "--set", "speculation.mode=plain", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "TOKENS/S" in result.stdout
    assert "pip install -e '.[plots]'" in result.stderr
    record = json.loads((tmp_path / "out" / "simulate.json").read_text())
    assert [point["labels"] for point in record["points"]] == [{"network.rtt_ms": 1}, {"network.rtt_ms": 30}]
    assert record["commit"] is not None
    again = points(tomllib.loads((tmp_path / "out" / "scenario.toml").read_text()))
    assert [point.labels for point in again] == [point["labels"] for point in record["points"]]
    assert not list((tmp_path / "out").glob("*.png"))


@pytest.mark.slow
def test_the_command_draws(config, tmp_path):
    pytest.importorskip("matplotlib")
    result = invoke(config, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    (plot,) = (tmp_path / "out").glob("*.png")
    assert plot.name == "against_rtt_ms.png"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_measured_figures_win(config, tmp_path):
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps({"step_ms": [[1, 100]]}))
    result = invoke(config, "--set", "network.rtt_ms=1", "--calibrate", measured, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    plain = json.loads((tmp_path / "out" / "simulate.json").read_text())["points"][0]
    assert plain["labels"] == {"speculation.mode": "plain"}
    assert plain["figures"]["goodput"] == pytest.approx(10, rel=0.1)


def test_what_is_wrong_is_one_line_and_status_2(config):
    result = invoke(config, "--set", "network.rtt=5")
    assert result.exit_code == 2
    assert result.stderr.startswith("specq: unknown key network.rtt; did you mean 'rtt_ms'? known: rtt_ms")
