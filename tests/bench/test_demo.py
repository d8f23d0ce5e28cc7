"""`specq demo` runs through, and shows what it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from specq.bench import demo
from specq.client import Result
from specq.config import Config, TargetConfig, UpConfig

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "what_drafts"),
    [(("--drafters", "1"), "1 draft worker:"), ((), "draft model in the verifier")],  # with more cores, workers too
)
def test_demo(arguments, what_drafts):
    """Drafts are accepted and corrected, and by lookup alone, or without any speculation, the texts are the same."""
    command = [sys.executable, "-m", "specq", "demo", "--max-tokens", "48", "--repeats", "2", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)

    assert done.returncode == 0, done.stderr
    assert f"\nspecq, {what_drafts}" in done.stdout
    starting = done.stdout.partition("\nspecq, ")[0].splitlines()
    assert "target-1: measuring steps" in starting
    assert sum(line.startswith("target-1: ready after ") for line in starting) == 2
    assert "checked drafts accepted" in done.stdout
    assert "«corrected by the target»" in done.stdout
    assert done.stdout.count("«") > 1, "the target's corrections are marked"
    assert "the same texts: in all 6 runs of each prompt" in done.stdout
    assert "times plain decoding" in done.stdout


class Recorder:
    """A client that notes the modes it is asked for."""

    def __init__(self):
        self.modes = []

    def generate(self, **asked):
        self.modes.append(asked["mode"])


def test_plain_is_no_speculation_and_lookup_alone_a_way_of_its_own():
    full, alone = Recorder(), Recorder()
    ways = demo.ways(full, alone, 8)
    asked = {}
    for name, complete in ways.items():
        complete("a prompt")
        asked[name] = (full.modes, alone.modes)
        full.modes, alone.modes = [], []
    assert asked == {"plain": ([], ["plain"]), "lookup": ([], ["async"]), "specq": (["async"], [])}


def test_it_says_so_if_drafting_gains_nothing_over_the_lookup():
    first, second = demo.verdict(400.0, 600.0, 580.0)
    assert first == "specq: 580 tokens/s, 1.45 times plain decoding (400), 0.97 times lookup alone (600)"
    assert second == "here drafting gains nothing over the lookup alone"
    assert len(demo.verdict(400.0, 600.0, 610.0)) == 1


def result(token_ids: list[int], tokens_per_second: float) -> Result:
    stats = {"mean_accepted_length": 2.0, "acceptance_rate": 0.5, "time_to_first_token_ms": 9.0}
    return Result("q", "p", token_ids=token_ids, stats=stats | {"tokens_per_second": tokens_per_second})


def test_the_report_compares_medians_and_texts(capsys):
    """A text that differs in one run of one way is told, also in the result."""
    runs = {
        way: [result([1, 2], rate), result([1, 2], rate)] for way, rate in zip(demo.WAYS, (10, 20, 30), strict=True)
    }
    assert demo.report([("a", ""), ("b", "")], [runs, runs], 2, "2 draft workers")
    shown = capsys.readouterr().out
    assert re.search(r"^a +2 +10 +20 +30 +3.00x +1.50x +2.00 +50% +9 +[0-9a-f]{8}$", shown, re.MULTILINE)
    assert re.search(r"^all +4 +10 +20 +30 +3.00x +1.50x$", shown, re.MULTILINE)
    assert "specq: 2 draft workers" in shown
    assert "in all 6 runs of each prompt the token ids are the same" in shown

    other = runs | {"lookup": [result([1, 2], 20), result([1, 3], 20)]}
    assert not demo.report([("a", ""), ("b", "")], [runs, other], 2, "")
    shown = capsys.readouterr().out
    assert "NOT the same text" in shown
    assert re.search(r"^b .* [0-9a-f]{8} != [0-9a-f]{8}$", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("drafters", "draft_model", "said"),
    [
        (0, "tiny", "draft model in the verifier"),
        (1, "", "1 draft worker"),
        (2, "", "2 draft workers"),
        (2, "tiny", "draft model in the verifier and 2 draft workers"),
        (0, "", "nothing but lookups"),
    ],
)
def test_it_says_what_drafts(drafters, draft_model, said):
    """And the servers for comparison have none of it."""
    target = TargetConfig(model="tiny", draft_model=draft_model)
    config = Config(target=target, up=UpConfig(drafters=drafters))
    assert demo.drafting(config) == said
    assert demo.drafting(demo.undrafted(config)) == "nothing but lookups"
