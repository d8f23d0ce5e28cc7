"""`specq bench calibrate` measures what it says, and comes to an end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from specq.bench.calibrate import hardware, neighbours, sockets
from specq.simulate.calibration import drafting, read_measured
from specq.simulate.engine import TimedEngine
from specq.simulate.proposer import TimedProposer
from specq.simulate.settings import DraftSettings, EngineSettings
from specq.simulate.stub_text import StubGuesses, StubText
from specq.simulate.sweep import points
from specq.testing.toy import toy_info

ROOT = Path(__file__).parents[2]
TEXT = StubText(seed=1)


@pytest.fixture
def stub_clock(monkeypatch):
    """Let the clock be a stub model's own time."""

    def use(model):
        monkeypatch.setattr(hardware.time, "perf_counter", lambda: model.busy_s)
        return model

    return use


def here() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def nobody() -> TimedProposer:
    """A proposer whose times do not matter."""
    return TimedProposer(DraftSettings(), StubGuesses(TEXT, (0.5,), (0.5,) * 20), toy_info())


def test_steps_are_timed_by_rows_and_sessions(stub_clock):
    """A stub engine of known times gives them back: no session is counted twice."""
    settings = EngineSettings(step_ms=((1, 3.0), (64, 66.0)), session_us=500)
    engine = stub_clock(TimedEngine(settings, TEXT, toy_info()))
    models = hardware.Models(engine, nobody(), here(), here())
    models.sweep(3)
    found = models.step_ms()
    assert [rows for rows, _ in found] == list(hardware.STEP_ROWS)
    assert [ms for _, ms in found] == pytest.approx([2.0 + rows for rows in hardware.STEP_ROWS])
    assert models.session_us() == pytest.approx(500)
    assert engine.free_slots == engine.info.kv_slots


def test_passes_are_timed_by_rows(stub_clock):
    guesses = StubGuesses(TEXT, (0.5,), (0.5,) * 20)
    settings = DraftSettings(pass_ms=((1, 1.0), (16, 16.0)))
    proposer = stub_clock(TimedProposer(settings, guesses, toy_info()))
    models = hardware.Models(TimedEngine(EngineSettings(), TEXT, toy_info()), proposer, here(), here())
    models.sweep(3)
    found = models.pass_ms()
    assert [ms for _, ms in found] == pytest.approx(list(hardware.PASS_ROWS))


def test_choices_tell_the_drafters_chances():
    """Along the target's own texts: claims and ranks of a stub drafter, whose chances come back."""
    proposer = TimedProposer(DraftSettings(), StubGuesses(TEXT, (0.7,), (0.5, 0.5)), toy_info())
    texts = []
    for _ in range(10):  # session 0 is the one that is opened
        prompt, tokens = TEXT.prompt(0, 4 + len(texts)).tolist(), []
        for position in range(len(prompt), len(prompt) + 300):
            tokens.append(TEXT.token(0, position, (tokens or prompt)[-1]))
        texts.append((prompt, tokens))
    found = hardware.choices(proposer, texts)
    assert len(found) == 3000
    assert {claim for claim, _ in found} == {0.7}
    chances = drafting(found)
    assert chances["acceptance"][0] == pytest.approx(0.7, abs=0.03)
    assert chances["ranks"][:2] == pytest.approx([0.5, 0.5], abs=0.06)


class StoppedProcess:
    """A neighbour that computes while it is not stopped."""

    def __init__(self) -> None:
        self.computes = True

    def send_signal(self, number: int) -> None:
        self.computes = number == signal.SIGCONT


@pytest.mark.parametrize(("beside", "found"), [(13.0, 1.3), (9.0, 1.0)])
def test_a_stretch_is_the_time_beside_a_neighbour_to_that_alone(monkeypatch, beside, found):
    """And never less than 1, which noise would make it."""
    process = StoppedProcess()

    @contextmanager
    def neighbour(kind, model, cores):
        assert (kind, model, cores) == ("pass", "tiny", [1])
        yield process

    monkeypatch.setattr(neighbours, "_neighbour", neighbour)
    times = lambda: [beside if process.computes else 10.0] * 3 + [99.0]  # noqa: E731
    assert neighbours.stretch(times, "pass", "tiny", [1], repeats=3) == found


@pytest.mark.slow
def test_a_real_neighbour_computes_and_is_gone_afterwards():
    """Its times are some of a real model's; it is stopped, let go on, and reaped."""
    found = neighbours.stretch(lambda: [1.0], "pass", "tiny", here()[-1:], repeats=2)
    assert found == 1.0
    assert neighbours_left() == []


def neighbours_left() -> list[str]:
    """Return the command lines of processes that this one started and that compute as neighbours."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    lines = [Path(f"/proc/{child}/cmdline").read_text() for child in own]
    return [line for line in lines if "neighbours" in line]


def test_an_end_of_a_message_takes_some_microseconds():
    with hardware.pinned(here()[:1]):
        assert 0 < sockets.end_us(50) < 1e5


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_the_whole_calibration_ends_with_ratios(tmp_path):
    """Real processes, a simulation of them, and a file that `specq simulate --calibrate` takes. No word on how good."""
    out = tmp_path / "calibration.json"
    options = ["--rtt", "5", "--mode", "plain", "--mode", "async", "--num-prompts", "2", "--output-len", "24"]
    options += ["--model", "tiny", "--draft-model", "tiny"]
    done = subprocess.run(
        [sys.executable, "-m", "specq", "bench", "calibrate", *options, "--repeats", "2", "--out", str(out)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
        timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PREDICTED" in done.stdout
    record = json.loads(out.read_text())["results"]
    assert [(run["rtt_ms"], run["mode"]) for run in record["runs"]] == [(5.0, "plain"), (5.0, "async")]
    assert all(run["ratio"]["tokens_per_second"] > 0 for run in record["runs"])
    assert record["runs"][1]["measured"]["accepted_tokens"] > 0
    assert len(record["measured"]["choices"]) == 48
    assert min(record["measured"]["machine"].values()) >= 1
    (point,) = points(read_measured(out).applied_to({}))
    assert len(point.scenario.draft.acceptance) == 48
