"""`specq jobs`, `specq results`, `specq cancel`, against a real broker that dies in between; `specq submit` that was
killed goes on when it is run again, and `--detach` leaves its jobs to the broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from specq import Client
from specq.cli import main
from specq.client.detached import JobDesk
from specq.client.parameters import id_of, label_of
from specq.client.request import ServedModel, read_request
from specq.client.results_file import SUFFIX
from specq.protocol import JobError, SamplingParams, Submit
from specq.testing import toy_text, wait_until
from specq.testing.fake_broker import CODEC, INFO
from tests.each import each
from tests.journal.test_processes import BEATS, PATIENCE_S, TOY, Process

ENDLESS = 1900
PROMPT = [5, 6, 7]


class Deployment:
    """A broker with a journal, a toy verifier, and the command line."""

    def __init__(self, spawn: Callable[..., Process], address: str, journal: Path) -> None:
        self.address = address
        self._start = lambda: spawn("broker", "--bind", address, "--journal", str(journal), *BEATS)
        self.broker = self._start()
        self.target = spawn(address, "20", program=TOY)
        with Client(address, timeout_s=30) as client:
            client.wait_until_ready()
        self.desk = JobDesk(address, timeout_s=30)

    def restart(self) -> None:
        """Kill the broker and start the next."""
        self.broker.kill()
        self.broker.wait()
        self.broker = self._start()

    def submit(self, *job_ids: int, max_tokens: int = 8, **fields: Any) -> None:
        """Submit jobs and leave them."""
        params = SamplingParams(max_tokens=max_tokens)
        jobs = [
            Submit(
                job_id=i, params=params, label=label_of(f"q{i}"), prompt_ids=np.array([*PROMPT, i], np.int32), **fields
            )
            for i in job_ids
        ]
        assert dict(self.desk.submit(jobs)) == dict.fromkeys(job_ids)

    def states(self) -> dict[int, str]:
        return {line["job_id"]: line["state"] for line in self.desk.list_jobs()}

    def run(self, *arguments: object) -> Any:
        """Run a command of specq."""
        return CliRunner().invoke(main, [*map(str, arguments), "--broker", self.address, "--timeout-s", "30"])


@pytest.fixture
def deployment(
    spawn: Callable[..., Process], free_address: str, tmp_path: Path, own_cache: None
) -> Iterator[Deployment]:
    started = Deployment(spawn, free_address, tmp_path / "broker.journal")
    yield started
    started.desk.close()


@pytest.mark.slow
def test_jobs_are_listed_fetched_and_stopped(deployment: Deployment) -> None:
    """By their ids, from another process than the one that submitted them, also after the broker died."""
    deployment.submit(11, 12)
    deployment.submit(13, max_tokens=ENDLESS, priority=3)
    wait_until(lambda: list(deployment.states().values()).count("finished") == 2)
    deployment.restart()

    shown = deployment.run("jobs").stdout.splitlines()
    assert shown[0].split() == ["JOB", "ID", "STATE", "TOKENS", "AGE", "PRIORITY", "MODEL"]
    rows = {line.split()[0]: line.split() for line in shown[1:]}
    assert rows["11"][1:4] == ["q11", "finished", "8"]
    assert rows["13"][2] in ("waiting", "running")
    assert rows["13"][-2:] == ["3", "toy"]
    assert next(iter(deployment.states())) == 13

    early = deployment.run("results", 13, 12, 12)
    (line,) = map(json.loads, early.stdout.splitlines())
    assert (early.exit_code, line["id"], line["error"]) == (1, "q12", None)
    assert "job 13 is still running" in early.stderr
    assert line["token_ids"] == toy_text([*PROMPT, 12], 8)
    assert line["text"] == CODEC.decode(line["token_ids"])
    assert line["prompt"] == CODEC.decode([*PROMPT, 12], skip_special=False)
    assert line["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "cached_tokens": 0}
    assert line["stats"]["rounds"] == 8
    assert 0 < line["stats"]["tokens_per_second"] < 1000

    stopped = deployment.run("cancel", 13, 11, 99)
    assert stopped.exit_code == 1
    assert "there is no job 99" in stopped.stderr
    assert "11 ended earlier, with 8 tokens (length)" in stopped.stdout
    assert "13 cancelled with" in stopped.stdout
    assert deployment.states() == {13: "cancelled", 12: "finished", 11: "finished"}

    every = deployment.run("results", "--all", "--no-text")
    lines = [json.loads(line) for line in every.stdout.splitlines()]
    assert (every.exit_code, {line["id"] for line in lines}) == (0, {"q11", "q12", "q13"})
    (cut,) = [line for line in lines if line["id"] == "q13"]
    assert cut["finish_reason"] == "cancelled"
    assert cut["token_ids"] == toy_text([*PROMPT, 13], len(cut["token_ids"]))
    assert cut["text"] == ""


@pytest.mark.slow
def test_waiting_for_results(deployment: Deployment) -> None:
    """With --wait the broker may even die meanwhile."""
    deployment.submit(5, max_tokens=60)
    deployment.restart()
    done = deployment.run("results", 5, "--wait")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["token_ids"] == toy_text([*PROMPT, 5], 60)


def test_a_job_that_misses_its_deadline_fails(deployment: Deployment) -> None:
    """With what it has by then, and the reason; the deadline holds across a restart."""
    early = deployment.run("results")
    assert (early.exit_code, early.stdout) == (2, "")
    assert "no job has finished yet" in early.stderr
    deployment.submit(7, max_tokens=ENDLESS, deadline_ms=1500)
    deployment.restart()
    (found,) = deployment.desk.fetch([7], wait=True)
    assert isinstance(found.error, JobError)
    assert found.error.code == "deadline"
    assert "the deadline passed with" in str(found.error)
    assert deployment.states() == {7: "failed"}
    told = deployment.run("results", 7)
    assert told.exit_code == 1
    assert "the deadline passed with" in json.loads(told.stdout)["error"]
    assert deployment.run("results").stdout == told.stdout, "the last job that ended"


@each(
    ("arguments", "said"),
    [
        (["results", "3", "--all"], "JOB and --all exclude each other"),
        (["results", "none"], "'none' is not a job number"),
        (["cancel"], "Missing argument 'JOB...'"),
        (["cancel", "-1"], "No such option"),
    ],
)
def test_mistakes_are_said(arguments: list[str], said: str) -> None:
    """With status 2."""
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 2
    assert said in outcome.stderr


NUM_LINES = 12
LENGTH = 40


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of prompts, of which some ask for several completions, and none for a seed."""
    path = tmp_path / "prompts.jsonl"
    lines: list[dict[str, Any]] = [{"token_ids": [5, i], "id": f"q{i}"} for i in range(1, NUM_LINES + 1)]
    lines[3] |= {"n": 3}
    lines[-1] = {"prompt": ""}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def command(deployment: Deployment, prompts: Path, out: Path, *options: str) -> list[str]:
    arguments = ["submit", prompts, "--out", out, "--broker", deployment.address, "--concurrency", "3", *options]
    arguments += ["--max-tokens", LENGTH, "--temperature", "0.8", "--ignore-eos"]
    arguments += [] if "--timeout-s" in options else ["--timeout-s", PATIENCE_S]
    return [sys.executable, "-m", "specq", *map(str, arguments)]


def check(lines: list[dict[str, Any]]) -> None:
    """Check that there are all results, in order, each what its seed makes of it."""
    assert [(line["id"], line.get("index")) for line in lines[:7]] == [
        ("q1", None), ("q2", None), ("q3", None), ("q4", 0), ("q4", 1), ("q4", 2), ("q5", None),
    ]  # fmt: skip
    assert [line["id"] for line in lines[7:]] == [*[f"q{i}" for i in range(6, NUM_LINES)], NUM_LINES]
    assert "empty" in lines[-1]["error"]
    for line in lines[:-1]:
        prompt = [5, int(line["id"][1:])]
        assert line["token_ids"] == toy_text(prompt, LENGTH, line["stats"]["seed"])


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_submit_is_gone_on_with(
    deployment: Deployment,
    prompts: Path,
    tmp_path: Path,
    how: signal.Signals,
) -> None:
    """Nothing that was done is done again: of a killed run not even the jobs that were under way."""
    out = tmp_path / "results.jsonl"
    first = subprocess.Popen(command(deployment, prompts, out), stderr=subprocess.DEVNULL)
    wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 4)
    deployment.target.send_signal(signal.SIGSTOP)  # or all might be done before the signal arrives
    first.send_signal(how)
    first.wait(PATIENCE_S)
    deployment.target.send_signal(signal.SIGCONT)
    before = out.read_bytes()
    assert before.count(b"\n") < NUM_LINES
    out.write_bytes(before + b'{"id": "torn')

    refused = subprocess.run(
        command(deployment, prompts, out, "--top-k", "5"), capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2
    assert "top_k was 'not given', and is 5 now" in refused.stderr

    again = subprocess.run(command(deployment, prompts, out), capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)  # the empty prompt
    assert out.read_bytes().startswith(before[: before.rfind(b"\n") + 1])  # the kill may have torn a line itself
    check([json.loads(line) for line in out.read_bytes().splitlines()])
    assert not Path(f"{out}{SUFFIX}").exists()

    num_jobs = len(deployment.states())
    num_needed = NUM_LINES - 1 + 2
    # Ctrl-C cancels what is under way, which is begun again; all of it may have ended just before.
    assert num_jobs == num_needed if how is signal.SIGKILL else num_jobs >= num_needed


@pytest.mark.slow
def test_a_submit_that_lost_its_broker_is_gone_on_with(
    deployment: Deployment,
    prompts: Path,
    tmp_path: Path,
) -> None:
    """It says so and ends; run again, when there is a broker again, it does what is left, and no job twice."""
    out = tmp_path / "results.jsonl"
    impatient = command(deployment, prompts, out, "--timeout-s", "2")
    first = subprocess.Popen(impatient, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: out.exists() and out.read_bytes().count(b"\n") >= 2)
    deployment.broker.kill()
    said = first.communicate(timeout=PATIENCE_S)[1]
    assert first.returncode == 1
    assert "has been silent for 2 s; run the same command again" in said
    before = out.read_bytes()
    assert b'"error": "' not in before
    deployment.restart()
    again = subprocess.run(command(deployment, prompts, out), capture_output=True, text=True, check=False)
    assert again.returncode == 1, again.stderr  # the empty prompt
    assert out.read_bytes().startswith(before)
    check([json.loads(line) for line in out.read_bytes().splitlines()])
    assert len(deployment.states()) == NUM_LINES - 1 + 2


@pytest.mark.slow
def test_detached_jobs_are_fetched_later(deployment: Deployment, prompts: Path) -> None:
    """The ids that are printed are those to ask for; a line that is wrong is said, and harms no other."""
    arguments = ("--detach", "--max-tokens", LENGTH, "--priority", "2", "--deadline", "60")
    left = deployment.run("submit", prompts, *arguments)
    assert left.exit_code == 1
    assert "specq: 1 lines failed: line 12: the prompt is empty" in left.stderr
    job_ids = left.stdout.split()
    assert len(job_ids) == NUM_LINES - 1 + 2
    deployment.restart()
    fetched = deployment.run("results", "--wait", *job_ids)
    assert fetched.exit_code == 0
    lines = [json.loads(line) for line in fetched.stdout.splitlines()]
    assert sorted(line["id"] for line in lines) == sorted([*[f"q{i}" for i in range(1, NUM_LINES)], "q4", "q4"])
    assert {line["finish_reason"] for line in lines} == {"length"}
    assert {line["priority"] for line in deployment.desk.list_jobs()} == {2}


@each(
    ("options", "said"),
    [
        (["--detach", "--out", "x.jsonl"], "--detach excludes --out and --stream"),
        (["--deadline", "0"], "deadline is 0.0, but must be a number of seconds above 0"),
        (["--priority", "1001"], "priority is 1001, but must be a whole number from -1000 to 1000"),
    ],
)
def test_job_options_that_cannot_be(tmp_path: Path, options: list[str], said: str) -> None:
    """They are said before anything is sent, with status 2."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    done = CliRunner().invoke(main, ["submit", str(prompts), *options])
    assert done.exit_code == 2
    assert said in done.stderr


def submitted(**values: Any) -> Submit:
    (submit,) = read_request({"token_ids": [5], **values}, ServedModel(INFO, CODEC)).submits
    return submit


def test_job_options() -> None:
    """They reach the job; a key gives the job id, and the seed where one is drawn, the same each time."""
    first = submitted(top_p=0.5, priority=3, deadline=0.0015, job_key="k", temperature=1)
    again, other = submitted(temperature=1, job_key="k"), submitted(temperature=1, job_key="l")
    assert (first.priority, first.deadline_ms) == (3, 1)
    assert first.params.to_dict().keys() == {"top_p", "temperature", "max_tokens", "seed"}
    assert (first.params.seed, first.job_id) == (again.params.seed, again.job_id)
    assert other.params.seed != again.params.seed
    assert other.job_id != again.job_id
    assert submitted(temperature=0, job_key="k").params.seed == 0
    assert submitted(temperature=1, job_key="k", seed=5).params.seed == 5
    for bad in ({"deadline": -1}, {"deadline": float("nan")}, {"deadline": "soon"}, {"priority": 1.5}):
        with pytest.raises(JobError):
            submitted(**bad)


@each("request_id", ["q", 7, None, [1, {"a": "ü"}], "x" * 5000])
def test_labels_carry_ids(request_id: Any) -> None:
    label = label_of(request_id)
    assert len(label) <= 1000
    assert id_of(label, 3) == (request_id if len(str(request_id)) < 1000 else "x" * 125)
    assert id_of("", 3) == 3
