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

from bench.calibrate import neighbours
from bench.calibrate.compare import since
from bench.calibrate.costs import Served, costs
from bench.calibrate.serving import Service
from bench.suites import calibrate
from specq.doctor import hardware
from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.runtime.usage import Usage, busy_s, cpu_s
from specq.simulate.scenarios import drafting, points, read_measured
from specq.simulate.settings import DrafterSettings, EngineSettings, HostSettings
from specq.simulate.stub_drafter import TimedProposer
from specq.simulate.stubs import StubGuesses, StubText, TimedEngine
from specq.testing.toy import toy_info

ROOT = Path(__file__).parents[2]
TEXT = StubText(seed=1)


@pytest.fixture
def stub_clock(monkeypatch):
    """Let the clock be a stub model's own time."""

    def use(model):
        monkeypatch.setattr(hardware.time, "perf_counter", lambda: model.busy_s)
        monkeypatch.setattr(hardware, "HOST_S", 0.0)
        return model

    return use


def here() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def nobody() -> TimedProposer:
    """A proposer whose times do not matter."""
    return TimedProposer(DrafterSettings(), StubGuesses(TEXT, (0.5,), (0.5,) * 20), toy_info())


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


def test_step_timing_ignores_cached_prefixes():
    """These begin alike, so that one may have all of another's, but for the last token."""
    engine = TorchEngine(resolve_model("tiny", "target"), device="cpu", kv_slots=4096)
    for num_sessions, rows in ((1, 1), (3, 2), (3, 2)):
        times = hardware.step_times(engine, num_sessions, rows, repeats=2, busy_s=0.0)
        assert len(times) == 2
        assert min(times) > 0
    assert engine.free_slots == 4096


def test_steps_are_timed_with_help_and_without(stub_clock):
    """The engine's two curves come back, with rows divided among sessions; it stays helped."""
    settings = EngineSettings(step_ms=((1, 3.0), (64, 66.0)), helped_ms=((1, 2.0), (64, 33.5)), session_us=250)
    engine = stub_clock(TimedEngine(settings, TEXT, toy_info()))
    models = hardware.Models(engine, nobody(), here(), here(), num_sessions=4)
    models.sweep(2)
    assert engine.is_helped
    rows = [rows for rows, _ in models.step_ms()]
    assert rows == [rows for rows in hardware.STEP_ROWS if rows in (1, 2) or rows % 4 == 0]
    assert [ms for _, ms in models.step_ms()] == pytest.approx([2.0 + count for count in rows])
    assert [ms for _, ms in models.step_ms(is_helped=True)] == pytest.approx([1.5 + count / 2 for count in rows])
    assert models.session_us() == pytest.approx(250)


def test_an_engine_without_helpers_has_no_helped_steps(stub_clock):
    engine = stub_clock(TimedEngine(EngineSettings(), TEXT, toy_info()))
    models = hardware.Models(engine, nobody(), here(), here())
    models.sweep(1)
    assert models.step_ms(is_helped=True) == []


def test_what_disturbs_some_times_spoils_no_others():
    """Half of the times of a size, and all of another's: the first is as it was, the second as the next larger."""
    assert hardware.typical([1.0, 9.0, 1.0, 30.0, 1.1, 50.0]) == pytest.approx(1.0, rel=0.1)
    points = [[1, 1.0], [2, 9.0], [4, 1.5], [8, 2.0]]
    assert calibrate._ascending(points) == [[1, 1.0], [2, 1.5], [4, 1.5], [8, 2.0]]


def test_passes_are_timed_by_rows(stub_clock):
    guesses = StubGuesses(TEXT, (0.5,), (0.5,) * 20)
    settings = DrafterSettings(pass_ms=((1, 1.0), (16, 16.0)))
    proposer = stub_clock(TimedProposer(settings, guesses, toy_info()))
    models = hardware.Models(TimedEngine(EngineSettings(), TEXT, toy_info()), proposer, here(), here())
    models.sweep(3)
    found = models.pass_ms()
    assert [ms for _, ms in found] == pytest.approx(list(hardware.PASS_ROWS))


def test_choices_tell_the_drafters_chances():
    """Along the target's own texts: claims and ranks of a stub drafter, whose chances come back."""
    proposer = TimedProposer(DrafterSettings(), StubGuesses(TEXT, (0.7,), (0.5, 0.5)), toy_info())
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
    found = neighbours.stretch(lambda: [1.0], "step", "tiny", here()[-1:], repeats=2)
    assert found == 1.0
    assert neighbours_left() == []


def neighbours_left() -> list[str]:
    """Return the command lines of processes that this one started and that compute as neighbours."""
    own = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    lines = [Path(f"/proc/{child}/cmdline").read_text() for child in own]
    return [line for line in lines if "neighbours" in line]


def test_costs_are_what_is_left_of_known_ones():
    """A verdict takes a verifier 0.3 ms, a draft 0.1, a node looked up 0.02; the broker 0.05 for either message; a
    client 0.2; a drafter 0.4 for a pass of 2 rows, of which its model takes 0.25."""
    plain = Served(verdicts=100, host_s=0.030, broker_s=0.005, client_s=0.020)
    looked_up = Served(verdicts=60, looked_up=100, host_s=0.020, broker_s=0.003, client_s=0.012)
    drafted = Served(
        *(50, 200, 80, 100, 450), host_s=0.015 + 0.004 + 0.008, broker_s=0.0065, drafter_s=0.040, client_s=0.010
    )
    found = costs(plain, looked_up, drafted, [[1, 0.2], [3, 0.3]])
    HostSettings(**found)
    known = {
        "verdict_us": 300,
        "lookup_us": 20,
        "draft_us": 100,
        "broker_us": 50,
        "client_us": 200,
        "pass_us": 150,
    }
    assert {name: us for name, us in found.items() if us} == pytest.approx(known)


def test_steps_between_two_states_are_their_differences():
    """Sums of histograms go by the step; lists may lack what is 0 at their ends; sources that came later began at
    nothing."""
    before = {
        "steps": 10, "step_us": {"forward": [5000, 10], "host": [1000]}, "step_rows": [20], "sent": {"remote": 3},
        "judged": {"remote": [5]}, "choices": {"suffix": [1, 5.0]},
    }  # fmt: skip
    after = {
        "steps": 14, "step_us": {"forward": [13_000, 10, 4], "judge": [400, 4], "host": [2200, 4]}, "step_rows": [32,
        14],
        "sent": {"remote": 7, "lookup": 2}, "judged": {"remote": [9, 2]},
        "choices": {"suffix": [0, 5.1], "remote": [1, 6.0]},
    }  # fmt: skip
    found = since(before, after)
    assert (found["num_steps"], found["step_ms"], found["host_ms"], found["rows"]) == (4, 2.1, 0.3, 3.0)
    assert found["sent"] == {"remote": 4, "lookup": 2}
    assert found["judged"] == {"remote": [4, 2]}
    assert found["used"] == "remote"


def test_foreign_cpu_load_excludes_own_processes():
    found = Usage(12.0, {"client": 1.5, "target": 3.0}, 30.0).since(Usage(10.0, {"client": 1.0, "target": 2.0}, 28.0))
    assert found.to_dict() == {"client": 0.25, "target": 0.5, "others": 0.25}


def test_what_a_process_computes_is_read_from_the_system():
    own, all_cores = cpu_s(os.getpid()), busy_s()
    sum(range(3_000_000))
    assert cpu_s(os.getpid()) > own
    assert busy_s() >= all_cores


class Reports:
    """A client of a broker whose workers were heard just now."""

    def __init__(self, *workers: dict[str, object]) -> None:
        self.workers = [{"heard_s_ago": -1.0, **worker} for worker in workers]

    def status(self) -> dict[str, object]:
        return {"workers": self.workers}


def test_what_draft_workers_count_is_added_but_for_what_the_broker_counts_by_verifier():
    drafters = [
        {"role": "draft", "steps": steps, "metrics": {"drafts": 3, "accepted_for": {"target-1": 2}}} for steps in (5, 7)
    ]
    verifier = {"role": "target", "steps": 9, "metrics": {"step_us": {"wait": 1}}}
    found = Service(Reports(verifier, *drafters), {}).counts()
    assert found == ({"step_us": {"wait": 1}, "steps": 9}, {"drafts": 6, "passes": 12})


@pytest.mark.slow
@pytest.mark.timeout(560)
def test_the_whole_calibration_ends_with_ratios(tmp_path):
    """Real processes, a simulation of them, and a file that `specq simulate --calibrate` takes. No word on how good."""
    out = tmp_path / "calibration.json"
    options = ["--rtt", "5", "--mode", "plain", "--mode", "async", "--num-prompts", "2", "--output-len", "24"]
    options += ["--model", "tiny", "--draft-model", "tiny"]
    done = subprocess.run(
        [sys.executable, "-m", "specq", "bench", "calibrate", *options, "--repeats", "1", "--out", str(out)],
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
        timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "PREDICTED" in done.stdout
    record = json.loads(out.read_text())["results"]
    assert [(run["rtt_ms"], run["mode"]) for run in record["runs"]] == [(5.0, "plain"), (5.0, "async")]
    assert all(run["ratio"]["tokens_per_second"] > 0 for run in record["runs"])
    assert len(record["measured"]["choices"]) == 48
    assert min(record["measured"]["machine"].values()) >= 1
    host = record["measured"]["host"]
    assert min(host[name] for name in ("verdict_us", "broker_us", "client_us")) > 0
    for run in record["runs"]:
        assert run["measured"]["steps"]["num_steps"] > 0
        assert 0 <= run["measured"]["load"]["others"] < os.cpu_count()
    (point,) = points(read_measured(out).applied_to({}))
    assert len(point.scenario.draft.acceptance) == 48
