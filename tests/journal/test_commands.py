"""`specq jobs`, `specq results`, `specq cancel`, against a real broker that dies in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from specq import Client
from specq.cli import main
from specq.client.detached import JobDesk
from specq.client.parameters import label_of
from specq.protocol.errors import JobError
from specq.protocol.messages import Submit
from specq.protocol.params import SamplingParams
from specq.testing import wait_until
from specq.testing.tokenizer import tokenizer_files
from specq.testing.toy import toy_text
from specq.text.codec import TextCodec
from tests.each import each
from tests.journal.test_processes import BEATS, TOY, Process

CODEC = TextCodec(tokenizer_files())
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
    assert "job 13 still runs" in early.stderr
    assert line["token_ids"] == toy_text([*PROMPT, 12], 8)
    assert line["text"] == CODEC.decode(line["token_ids"])
    assert line["prompt"] == CODEC.decode([*PROMPT, 12], skip_special=False)
    assert line["usage"] == {"prompt_tokens": 4, "completion_tokens": 8, "cached_tokens": 0}
    assert line["stats"]["rounds"] == 8
    assert 0 < line["stats"]["tokens_per_second"] < 1000

    stopped = deployment.run("cancel", 13, 11, 99)
    assert stopped.exit_code == 1
    assert "there is no job 99" in stopped.stderr
    assert "11 had ended before, with 8 tokens (length)" in stopped.stdout
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
    assert "no job has ended yet" in early.stderr
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
        (["results", "3", "--all"], "give the ids of jobs, or --all"),
        (["results", "none"], "'none' is not the number of a job"),
        (["cancel"], "Missing argument 'JOB...'"),
        (["cancel", "-1"], "No such option"),
    ],
)
def test_mistakes_are_said(arguments: list[str], said: str) -> None:
    """With status 2."""
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 2
    assert said in outcome.stderr
