"""Measured figures to scenarios."""

import json
import random

import pytest

from specq.protocol.errors import ConfigError
from specq.simulate.scenarios import Measured, drafting, points, read_measured
from specq.simulate.settings import HostSettings


def test_measured_figures_replace_what_stood_there():
    measured = Measured(
        step_ms=[[1, 7.0]], helped_ms=[[1, 6.0]], pass_ms=[[1, 1.5]], acceptance=0.6, host={"graft_us": 9.0}
    )
    tables = {"engine": {"step_ms": [[1, 5]], "session_us": 3}, "network": {"rtt_ms": [1, 20]}}
    scenario = points(measured.applied_to(tables))[1].scenario
    engine = scenario.engine
    assert (engine.step_ms, engine.helped_ms, engine.session_us) == (((1.0, 7.0),), ((1.0, 6.0),), 3.0)
    assert (scenario.draft.pass_ms, scenario.draft.acceptance) == (((1.0, 1.5),), (0.6,))
    assert scenario.host == HostSettings(graft_us=9.0)
    assert scenario.network.rtt_ms == 20.0


def test_choices_become_acceptance_and_ranks():
    """From draws of a known drafter, its chances come back: calibrated by claim, in order, ranks given those before."""
    draw = random.Random(0)
    choices, truth = [], []
    for _ in range(20_000):
        claim, right = draw.choice([(0.95, 0.7), (0.3, 0.1)])  # over-confident
        rank = 0 if draw.random() < right else 1 if draw.random() < 0.5 else 2 if draw.random() < 0.25 else 8
        choices.append([claim, rank])
        truth.append(right)
    found = drafting(choices)
    assert found["acceptance"] == pytest.approx(truth, abs=0.02)
    assert found["ranks"][:2] == pytest.approx([0.5, 0.25], abs=0.02)
    assert found["ranks"][2:] == [0.0] * 5


def test_a_drafter_that_is_always_right_has_no_ranks():
    assert drafting([[1.0, 0], [0.9, 0]]) == {"acceptance": [1.0, 1.0], "ranks": []}


def test_files_are_read_and_checked(tmp_path):
    path = tmp_path / "measured.json"
    measured = {"runs": [], "measured": {"acceptance": 0.5}}
    for values in ({"acceptance": 0.5}, measured, {"suite": "calibrate", "results": measured}):
        path.write_text(json.dumps(values))
        assert read_measured(path) == Measured(acceptance=0.5)
    for text, message in (
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ('{"step": 1}', r"measured.json: unknown key measured.step; did you mean 'step_ms'\? known: step_ms"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_measured(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_measured(tmp_path / "absent.json")
