"""`specq submit` that was killed goes on when it is run again, and `--detach` leaves its jobs to the broker."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specq.client.parameters import id_of, label_of
from specq.client.request import ServedModel, read_request
from specq.client.results_file import SUFFIX
from specq.protocol.errors import JobError
from specq.protocol.messages import Submit
from specq.testing import wait_until
from specq.testing.fake_broker import CODEC, INFO
from specq.testing.toy import toy_text
from tests.journal.test_commands import Deployment, deployment  # noqa: F401 - a fixture
from tests.journal.test_processes import PATIENCE_S

pytestmark = pytest.mark.slow

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


def command(deployment: Deployment, prompts: Path, out: Path, *options: str) -> list[str]:  # noqa: F811
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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_submit_is_gone_on_with(
    deployment: Deployment,  # noqa: F811
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


def test_a_submit_that_lost_its_broker_is_gone_on_with(
    deployment: Deployment,  # noqa: F811
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


def test_detached_jobs_are_fetched_later(deployment: Deployment, prompts: Path) -> None:  # noqa: F811
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--detach", "--out", "x.jsonl"], "--detach prints ids"),
        (["--deadline", "0"], "deadline is 0.0; it must be a number of seconds above 0"),
        (["--priority", "1001"], "priority is 1001; it must be a whole number from -1000 to 1000"),
    ],
)
def test_job_options_that_cannot_be(tmp_path: Path, options: list[str], said: str) -> None:
    """They are said before anything is sent, with status 2."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("{}\n")
    arguments = [sys.executable, "-m", "specq", "submit", str(prompts), *options]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 2
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


@pytest.mark.parametrize("request_id", ["q", 7, None, [1, {"a": "ü"}], "x" * 5000])
def test_labels_carry_ids(request_id: Any) -> None:
    label = label_of(request_id)
    assert len(label) <= 1000
    assert id_of(label, 3) == (request_id if len(str(request_id)) < 1000 else "x" * 125)
    assert id_of("", 3) == 3
