"""`specq demo` runs through, and shows what it promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specq import demo
from specq.client import Result
from specq.config import Config, TargetConfig, UpConfig
from specq.demo.figures import Speed, conclusion
from specq.processes.deployment import absent_sources
from specq.runtime.usage import Usage, busy_s, others_cores
from specq.testing.checkpoints import make_checkpoint
from specq.testing.checkpoints_mtp import QWEN, add_mtp
from tests.each import each

ROOT = Path(__file__).parents[2]
QUIET = "the turns vary by more than the effect of drafts"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("arguments", "what_drafts"), [(("--drafters", "1"), "1 draft worker:"), ((), "draft model in the verifier")]
)
def test_demo(arguments, what_drafts):
    """Drafts are accepted and corrected, and by lookup alone, or without any speculation, the texts are the same."""
    command = [sys.executable, "-m", "specq", "demo", "--max-tokens", "48", "--repeats", "2", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)

    assert done.returncode == 0, done.stderr
    assert f"\nspecq, drafts from {what_drafts}" in done.stdout
    starting = done.stdout.partition("\nspecq, ")[0].splitlines()
    assert "target-1: preparing steps" in starting
    assert sum(line.startswith("target-1: ready after ") for line in starting) >= 1
    assert "checked drafts accepted" in done.stdout
    assert "«corrected by the target»" in done.stdout
    assert done.stdout.count("«") > 1, "the target's corrections are marked"
    assert "all 6 runs of each prompt have the same token ids" in done.stdout
    assert "times plain decoding" in done.stdout
    shown, following = done.stdout.splitlines()[-2:]
    assert shown.startswith("result: the same text as plain decoding")
    assert following.startswith("next: specq up --serve ")


class Recorder:
    """A client that notes the modes it is asked for."""

    def __init__(self):
        self.modes = []

    def generate(self, **asked):
        self.modes.append(asked["mode"])


def test_plain_disables_speculation_and_lookup_is_a_separate_method():
    full, alone = Recorder(), Recorder()
    ways = demo.ways(full, alone, 8)
    asked = {}
    for name, complete in ways.items():
        complete("a prompt")
        asked[name] = (full.modes, alone.modes)
        full.modes, alone.modes = [], []
    assert asked == {"plain": ([], ["plain"]), "lookup": ([], ["async"]), "specq": (["async"], [])}


def result(token_ids: list[int], tokens_per_second: float) -> Result:
    stats = {"mean_accepted_length": 2.0, "acceptance_rate": 0.5, "time_to_first_token_ms": 9.0}
    return Result("q", "p", token_ids=token_ids, stats=stats | {"tokens_per_second": tokens_per_second})


def test_the_report_shows_the_range_of_the_turns_and_compares_texts(capsys):
    """A text that differs in one run of one way is reported, also in the result."""
    rates = {"plain": (10, 10), "lookup": (20, 20), "specq": (30, 32)}
    runs = {way: [result([1, 2], rate) for rate in rates[way]] for way in demo.WAYS}
    assert demo.report([("a", ""), ("b", "")], [runs, runs], "2 draft workers", None)
    shown = capsys.readouterr().out
    assert re.search(r"^a +2 +10 +20 +31 +3.00 to 3.20 +1.50 to 1.60 +2.00 +50% +9 +[0-9a-f]{8}$", shown, re.MULTILINE)
    assert re.search(r"^all +4 +10 +20 +31 +3.00 to 3.20 +1.50 to 1.60$", shown, re.MULTILINE)
    assert "specq: drafts from 2 draft workers" in shown
    assert "all 6 runs of each prompt have the same token ids" in shown
    assert shown.splitlines()[-3:] == [
        "specq: 31 tokens/s, 3.00 to 3.20 times plain decoding (10), 1.50 to 1.60 times lookup only (20)",
        "result: the same text as plain decoding, token for token. Speedup: 3.00 to 3.20",
        demo.NEXT,
    ]

    other = runs | {"lookup": [result([1, 2], 20), result([1, 3], 20)]}
    assert not demo.report([("a", ""), ("b", "")], [runs, other], "", None)
    shown = capsys.readouterr().out
    assert "NOT the same text" in shown
    assert re.search(r"^b .* [0-9a-f]{8} != [0-9a-f]{8}$", shown, re.MULTILINE)


@each(("plain", "lookup", "specq", "said"), [
        ((80, 80, 80), (90, 90, 90), (120, 128, 124), ". Speedup: 1.50 to 1.60"),
        ((80, 80, 80), (90, 90, 90), (60, 64, 62), ". Speedup: 0.75 to 0.80 (slower here)"),
        (
            (40, 40, 40), (90, 90, 90), (60, 64, 62),
            ". Speedup: 1.50 to 1.60. Lookup only is faster: other drafts bring no speedup here",
        ),
        ((81, 81, 81), (60, 60, 60), (54, 90, 60), "{}"),  # sometimes slower, sometimes faster
        ((40, 81, 60), (60, 60, 60), (60, 122, 90), "{}"),  # plain decoding itself varied by more
        ((60, 60, 30), (60, 60, 30), (54, 54, 27), "{}"),  # likewise, where specq was slower
    ])  # fmt: skip
def test_there_is_a_verdict_only_where_the_turns_agree(plain, lookup, specq, said):
    speed = Speed({"plain": [*plain], "lookup": [*lookup], "specq": [*specq]})
    text = "result: the same text as plain decoding, token for token"
    unclear = ". The speedup is unclear: {}. Run it again (specq demo)"
    busy = "this machine is too busy (other processes used 1.3 of its 2 cores during the turns)"
    for others, why in ((1.31, busy), (0.05, QUIET), (None, QUIET)):
        assert conclusion(speed, True, others, 2) == text + said.format(unclear.format(why))


def test_a_busy_machine_gives_no_verdict_on_drafts():
    """What others take hides what drafts bring; a machine that is nearly quiet is believed."""
    speed = Speed({"plain": [80, 80, 80], "lookup": [90, 90, 90], "specq": [79, 81, 83]})
    for others in (0.3, None):
        assert conclusion(speed, True, others, 2).endswith(
            "token for token, at the same speed. Drafts bring no speedup here"
        )
    assert "The speedup is unclear: this machine is too busy" in conclusion(speed, True, 1.31, 2)


def test_what_others_used_is_all_that_was_busy_but_ours():
    before, after = Usage(10.0, {"1": 2.0, "client": 1.0}, 20.0), Usage(14.0, {"1": 5.0, "client": 2.0}, 30.0)
    assert others_cores(before, after) == 1.5
    assert others_cores(None, after) is None


def test_busy_are_the_cores_that_we_may_use(tmp_path):
    """A container sees the whole machine's."""
    ticks = os.sysconf("SC_CLK_TCK")
    lines = [f"cpu{number} {ticks * busy} 0 0 777 88 0 {ticks} 0 5 5" for number, busy in ((0, 1), (1, 2), (2, 40))]
    file = tmp_path / "stat"
    file.write_text(
        "\n".join([f"cpu {ticks * 43} 0 0 2331 264 0 {3 * ticks} 0 15 15", *lines, "intr 1 2", "", "ctxt 7"])
    )
    assert busy_s((0, 1), file) == 1 + 2 + 2
    assert busy_s(path=file) == 46


@each("are_built", [True, False])
def test_kernels_are_spoken_of_only_where_they_are_compiled(monkeypatch, capsys, tmp_path, are_built):
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path))
    if are_built:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "0.so").touch()
    demo.start(Ready(), Ready(), "nothing")
    assert ("compiles its kernels" in capsys.readouterr().out) is not are_built


class Ready:
    """Processes that are there."""

    def wait_ready(self, tell):
        pass

    def table(self):
        return ""


@each(
    ("drafters", "draft_model", "said"),
    [
        (0, "tiny", "draft model in the verifier"),
        (1, "", "1 draft worker"),
        (2, "", "2 draft workers"),
        (2, "tiny", "draft model in the verifier and 2 draft workers"),
        (0, "", "lookup only"),
    ],
)
def test_it_says_what_drafts(drafters, draft_model, said):
    """And the servers for comparison have none of it."""
    target = TargetConfig(model="tiny", draft_model=draft_model)
    config = Config(target=target, up=UpConfig(drafters=drafters))
    assert demo.drafting(config) == said
    assert demo.drafting(demo.undrafted(config)) == "lookup only"
    assert ("draft worker" in absent_sources(config)) is (drafters == 0)
    assert ("colocated" in absent_sources(config)) is (not draft_model)
    assert "lookahead" in absent_sources(config)


def test_servers_for_comparison_have_no_mtp_layer(tmp_path):
    config = Config(target=TargetConfig(model=str(add_mtp(make_checkpoint("llama", tmp_path), QWEN))))
    assert demo.drafting(config) == "heads of the target"
    assert demo.drafting(demo.undrafted(config)) == "lookup only"
