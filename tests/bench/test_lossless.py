"""`specq bench lossless`: what counts as passed, and the suite at its smallest."""

import json

import pytest
from click.testing import CliRunner

from bench import lossless
from bench.lossless import GREEDY, SAMPLED, Variant, passed
from specq.cli import main

NEAR, WIDE = {"near_tie": True}, {"near_tie": False}


def test_only_near_ties_are_excused():
    plain = Variant("plain", 0, 1, mode="plain")
    assert passed(plain, {"differing": [NEAR]})
    assert not passed(plain, {"differing": [NEAR, WIDE]})


@pytest.mark.parametrize(("accepted", "wanted"), [(0, False), (3, True), (8, False)])
def test_drafters_must_be_right_and_wrong(accepted, wanted):
    """Where all or none is accepted, equal texts show nothing; with random weights that is expected."""
    found = {"differing": [], "draft_tokens": 8, "accepted_tokens": accepted}
    assert passed(Variant("drafters", 1, 1), found) == wanted
    assert passed(Variant("random", 1, 1, random_draft=True), found)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_suite_on_two_prompts(tmp_path, monkeypatch):
    """transformers, plain decoding and a drafter say the same."""
    monkeypatch.setattr(lossless, "GREEDY", GREEDY[:1])
    monkeypatch.setattr(lossless, "SAMPLED", SAMPLED[:1])
    out = tmp_path / "lossless.json"
    outcome = CliRunner().invoke(main, ["bench", "lossless", "--limit", "2", "--max-tokens", "24", "--out", str(out)])
    assert outcome.exit_code == 0, outcome.output
    report = json.loads(out.read_text())
    assert {name: (one["texts"], one["passed"]) for name, one in report["results"].items()} == {
        GREEDY[0].name: (2, True),
        SAMPLED[0].name: (2, True),
    }
    assert [line.split()[-1] for line in outcome.stdout.splitlines()] == ["PASSED", "ok", "ok"]
