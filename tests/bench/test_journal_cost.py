"""`specq bench journal` at its smallest."""

import json

import pytest
from click.testing import CliRunner

from specq.cli import main


def run(tmp_path, *options):
    out = tmp_path / "journal.json"
    outcome = CliRunner().invoke(main, ["bench", "journal", *options, "--directory", str(tmp_path), "--out", str(out)])
    assert outcome.exit_code == 0, outcome.output
    return outcome.stdout, json.loads(out.read_text())


def test_groups_are_timed_by_durability_and_size(tmp_path):
    """A line and three figures for each kind of group."""
    table, report = run(tmp_path, "--groups", "5")
    assert [(one["durability"], one["rows"]) for one in report["results"]["groups"]] == [
        (durability, rows) for durability in ("full", "process") for rows in (1, 16, 64)
    ]
    assert len(table.splitlines()) == 1 + 6
    assert report["figures"]["process, 16 rows, p50_us"]["median"] > 0
    assert report["results"]["roundtrip"] == {}


@pytest.mark.slow
def test_round_trips_with_a_journal_and_without(tmp_path):
    """All repetitions are kept; the ratio to no journal is printed."""
    table, report = run(tmp_path, "--groups", "2", "--roundtrip", "2", "--seconds", "0.1")
    assert {name: len(one["rates"]) for name, one in report["results"]["roundtrip"].items()} == {
        "none": 2, "full": 2, "process": 2,
    }  # fmt: skip
    assert len(report["figures"]["round trips, journal full"]["repeats"]) == 2
    assert "journal none: " in table
    assert "1.00 of those without" in table
