"""`specq bench journal` at its smallest."""

import json

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
