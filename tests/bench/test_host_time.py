"""`specq bench host-time` at its smallest."""

import json

import pytest
from click.testing import CliRunner

from bench.host_time import PHASES, measure
from specq.cli import main


@pytest.mark.parametrize(("num_drafts", "num_tokens"), [(0, 1), (3, 3)])
def test_all_phases_are_timed_and_all_drafts_but_the_wrong_ones_accepted(num_drafts, num_tokens):
    ((num_sessions, depth, times, found),) = measure([2], [num_drafts], 5)
    assert (num_sessions, depth, found) == (2, num_drafts, num_tokens)
    assert list(times) == [*PHASES, "in all"]
    assert {len(ms) for ms in times.values()} == {5}
    assert all(all_ms == pytest.approx(sum(parts)) for *parts, all_ms in zip(*times.values(), strict=True))


def test_the_suite(tmp_path):
    out = tmp_path / "host-time.json"
    asked = ["--sessions", "1", "--sessions", "3", "--drafts", "0", "--repeats", "2", "--out", str(out)]
    outcome = CliRunner().invoke(main, ["bench", "host-time", *asked])
    assert outcome.exit_code == 0, outcome.output
    assert len(json.loads(out.read_text())["figures"]) == 2 * (len(PHASES) + 1)
