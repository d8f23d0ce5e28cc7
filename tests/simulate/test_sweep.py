"""TOML to scenarios: checks, sweeps, variants, overrides."""

import tomllib
from itertools import product

import pytest

from specq.protocol.errors import ConfigError
from specq.simulate.scenarios import apply_settings, points, read_tables, to_toml
from specq.simulate.settings import Scenario
from tests.each import each


def of(text: str):
    return points(tomllib.loads(text))


def test_an_empty_file_is_one_scenario_of_defaults():
    (point,) = of("")
    assert (point.labels, point.scenario) == ({}, Scenario())


def test_values_reach_their_keys():
    (point,) = of("""
        [engine]
        step_ms = [[1, 5], [8, 7.5]]
        [draft]
        acceptance = [0.9, 0.5]
        [network]
        rtt_ms = 20
        [speculation]
        mode = "sync"
        num_candidates = 3
    """)
    scenario = point.scenario
    assert scenario.engine.step_ms == ((1.0, 5.0), (8.0, 7.5))
    assert scenario.draft.acceptance == (0.9, 0.5)
    assert scenario.network.rtt_ms == 20.0
    assert (scenario.speculation.mode, scenario.speculation.num_candidates) == ("sync", 3)


def test_a_number_does_for_a_list_of_one():
    assert of("draft.acceptance = 0.7")[0].scenario.draft.acceptance == (0.7,)


def test_lists_of_what_a_key_takes_are_swept():
    """All combinations, the last named fastest; labels say which."""
    found = of("""
        [network]
        rtt_ms = [1, 20]
        [traffic]
        sessions = [1, 4, 16]
    """)
    assert [tuple(point.labels.values()) for point in found] == [(1, 1), (1, 4), (1, 16), (20, 1), (20, 4), (20, 16)]
    assert [(p.scenario.network.rtt_ms, p.scenario.traffic.sessions) for p in found][3] == (20.0, 4 - 3)
    assert list(found[0].labels) == ["network.rtt_ms", "traffic.sessions"]


def test_keys_that_take_lists_are_swept_by_lists_of_lists():
    found = of("draft.acceptance = [[0.9, 0.5], [0.8]]\nengine.step_ms = [[[1, 5]], [[1, 6]]]")
    combined = product(((0.9, 0.5), (0.8,)), (((1.0, 5.0),), ((1.0, 6.0),)))
    assert [(p.scenario.draft.acceptance, p.scenario.engine.step_ms) for p in found] == list(combined)
    trees = of("speculation.tree = [[[0], [0, 0]], [[0], [1]]]")
    assert [p.scenario.speculation.tree for p in trees] == [((0,), (0, 0)), ((0,), (1,))]


def test_variants_set_what_they_name():
    found = of("""
        network.rtt_ms = [1, 20]
        draft.width = 4
        [[variant]]
        name = "chain"
        draft.fan_out = 1
        [[variant]]
        name = "plain"
        speculation.mode = "plain"
        draft.width = 9
    """)
    told = [(p.labels["variant"], p.labels["network.rtt_ms"], p.scenario.draft.fan_out) for p in found]
    assert told == [("chain", 1, 1), ("chain", 20, 1), ("plain", 1, 3), ("plain", 20, 3)]
    assert [p.scenario.speculation.mode for p in found] == ["async", "async", "plain", "plain"]
    assert [p.scenario.draft.width for p in found] == [4, 4, 9, 9]


def test_settings_win_over_the_file():
    tables = apply_settings({"network": {"rtt_ms": 1}}, ["network.rtt_ms=[5, 6]", "speculation.mode=sync"])
    found = [(p.scenario.network.rtt_ms, p.scenario.speculation.mode) for p in points(tables)]
    assert found == [(5.0, "sync"), (6.0, "sync")]


@each(
    ("text", "message"),
    [
        ("[netwrok]", r"unknown section netwrok; did you mean 'network'\? known: engine, draft, network"),
        ("network.rtt = 5", r"unknown key network.rtt; did you mean 'rtt_ms'\? known: rtt_ms"),
        ("network.rtt_ms = -1", "network.rtt_ms is -1.0, but must be from 0"),
        ('network.rtt_ms = "fast"', "network.rtt_ms is 'fast', but must be a number"),
        ("traffic.sessions = 1.5", "traffic.sessions is 1.5, but must be a whole number"),
        ("draft.acceptance = 1.5", "draft.acceptance is 1.5, but must be from 0 to 1"),
        ("draft.acceptance = []", "draft.acceptance is empty"),
        ("engine.step_ms = [[5, 1], [5, 2]]", "engine.step_ms must be a list of .load, milliseconds. with loads that"),
        ("engine.step_ms = []", "engine.step_ms must be a list"),
        ("engine.step_ms = [[1, 0]]", "engine.step_ms has a time of 0"),
        ("engine.step_ms = [1, 2]", "engine.step_ms is .1, 2., but must be a list of .load, milliseconds."),
        ('speculation.mode = "fast"', "speculation: mode is 'fast', but must be one of async, sync, plain"),
        ("network = 5", "network is 5, but must be a section"),
        ("[[variant]]\ndraft.width = 1", "variants are tables with a name"),
        ('[[variant]]\nname = "a"\nwidth = 1', "variant sets width, which is not a section"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ConfigError, match=message):
        of(text)


@each("setting", ["rtt_ms=5", "network.rtt_ms", "network.=1"])
def test_settings_name_section_and_key(setting):
    with pytest.raises(ConfigError, match=r"is not of the form section\.key=value"):
        apply_settings({}, [setting])


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the scenario .*absent.toml"):
        read_tables(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("a = [")
    with pytest.raises(ConfigError, match=r"bad.toml is not valid TOML"):
        read_tables(tmp_path / "bad.toml")


def test_what_is_written_reads_the_same():
    text = """
        network.rtt_ms = [1, 20]
        draft.acceptance = [0.5, 1.0]
        [speculation]
        mode = "sync"
        [[variant]]
        name = "a \\"b\\""
        draft.fan_out = 1
        [[variant]]
        name = "plain"
        speculation.mode = "plain"
    """
    assert points(tomllib.loads(to_toml(tomllib.loads(text)))) == of(text)


@each("name", ["simulate", "simulate_load"])
def test_shipped_scenarios_are_valid(name, request):
    path = request.config.rootpath / "configs" / f"{name}.toml"
    assert len(points(read_tables(path))) > 3
