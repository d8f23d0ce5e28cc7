"""`specq demo` runs through, and shows what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specq.bench import demo

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demo():
    """Drafts are accepted and corrected, and without drafters, or any speculation, the texts are the same."""
    command = [sys.executable, "-m", "specq", "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)

    assert done.returncode == 0, done.stderr
    assert "checked drafts accepted" in done.stdout
    assert "«" in done.stdout, "the target's own tokens are marked"
    assert "the same texts: with drafters, by lookup alone, plain" in done.stdout
    assert "plain decoding (no speculation at all)" in done.stdout
    assert "times lookup alone" in done.stdout


class Recorder:
    """A client that notes the modes it is asked for."""

    def __init__(self):
        self.modes = []

    def generate(self, **asked):
        self.modes.append(asked["mode"])


def test_plain_is_no_speculation_and_lookup_alone_a_way_of_its_own():
    with_drafters, alone = Recorder(), Recorder()
    ways = demo.ways(with_drafters, alone, 8)
    asked = {}
    for name, complete in ways.items():
        complete("a prompt")
        asked[name] = (with_drafters.modes, alone.modes)
        with_drafters.modes, alone.modes = [], []
    assert asked == {"with drafters": (["async"], []), "by lookup alone": ([], ["async"]), "plain": ([], ["plain"])}


def test_it_says_so_if_drafters_gain_nothing_over_the_lookup():
    rates = {"with drafters": 580.0, "by lookup alone": 600.0, "plain": 400.0}
    *_, drafters, verdict = demo.summaries(rates)
    assert "580 tokens/s, 1.45 times plain decoding, 0.97 times lookup alone" in drafters
    assert verdict == "here the drafters gain nothing over the lookup alone"
    assert "gain nothing" not in "".join(demo.summaries(rates | {"with drafters": 610.0}))
