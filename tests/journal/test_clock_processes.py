"""Broker, verifier and gateway as processes, while somebody sets the machine's wall clock a month ahead and back."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from specq.client.detached import JobDesk
from specq.config import values
from specq.protocol import SamplingParams, Submit
from specq.testing import toy_text, wait_until
from tests.freezing import freeze_between_writes
from tests.gateway.test_process import is_up
from tests.journal.test_processes import BEATS, PATIENCE_S, PROMPT, said

pytestmark = pytest.mark.slow

Process = subprocess.Popen[bytes]
MONTH_S = 30 * 86400
ENDLESS = 1900
STEP_MS = "20"  # ENDLESS tokens take longer than the test looks at them


class Clocked:
    """A broker that keeps results for an hour, a verifier and a gateway; `set_clock` sets the clock of all three."""

    def __init__(self, spawn: Callable[..., Process], address: str, folder: Path) -> None:
        self.address, self.url = address, ""
        self.journal, self._ahead = folder / "broker.journal", folder / "ahead"
        self.set_clock(0)
        self.spawn = lambda *arguments: spawn(
            *arguments, program=(sys.executable, "-m", "tests.journal.set_clock", str(self._ahead))
        )
        self.broker = self.start_broker()
        self.spawn("tests.journal.toy_target", address, STEP_MS)
        self.desk = JobDesk(address, timeout_s=PATIENCE_S)

    def set_clock(self, ahead_s: int) -> None:
        """Put the wall clock so far ahead of the real one."""
        draft = self._ahead.with_suffix(".new")
        draft.write_text(str(ahead_s))
        draft.replace(self._ahead)

    def start_broker(self, *options: str, address: str = "") -> Process:
        arguments = ("--bind", address or self.address, "--journal", str(self.journal), "--keep-hours", "1", *BEATS)
        return self.spawn("specq", "broker", *arguments, *options)

    def restart(self, ahead_s: int) -> None:
        """Kill the broker, set the clock, and start the next."""
        self.broker.kill()
        self.broker.wait()
        self.set_clock(ahead_s)
        self.broker = self.start_broker()

    def serve(self, address: str) -> None:
        self.spawn("specq", "serve", "--broker", self.address, "--bind", address)
        self.url = address.replace("tcp", "http")
        wait_until(lambda: is_up(self.url))

    def post(self) -> dict[str, Any]:
        """Ask over HTTP, always under the same key."""
        body = {"prompt": "duck eggs", "max_tokens": 8, "temperature": 0}
        options = {"headers": {"Idempotency-Key": "k"}, "trust_env": False, "timeout": PATIENCE_S}
        return httpx2.post(f"{self.url}/v1/completions", json=body, **options).json()

    def submit(self, job_id: int, max_tokens: int = 8, deadline_ms: int = 0) -> None:
        """Submit a job and leave it."""
        params, prompt_ids = SamplingParams(max_tokens=max_tokens), np.array([*PROMPT, job_id], np.int32)
        job = Submit(job_id=job_id, params=params, prompt_ids=prompt_ids, deadline_ms=deadline_ms)
        assert dict(self.desk.submit([job])) == {job_id: None}

    def result(self, job_id: int) -> list[int]:
        (found,) = self.desk.fetch([job_id], wait=True)
        assert found.error is None
        return list(found.transcript.token_ids)

    def states(self) -> dict[int, str]:
        return {line["job_id"]: line["state"] for line in self.desk.list_jobs()}


@pytest.fixture
def clocked(spawn: Callable[..., Process], free_address: str, tmp_path: Path, own_cache: None) -> Iterator[Clocked]:
    started = Clocked(spawn, free_address, tmp_path)
    wait_until(lambda: "worker_registered" in said(started.broker))
    yield started
    started.desk.close()


def test_a_clock_that_is_set_a_month_ahead_and_back(clocked: Clocked) -> None:
    """While all run, and between brokers: jobs end with their texts, results stay, a key replays, deadlines hold."""
    clocked.serve(values.free_address())
    first = clocked.post()
    assert first["choices"][0]["finish_reason"] == "length"
    clocked.submit(1, ENDLESS, deadline_ms=3600 * 1000)
    steps = (clocked.set_clock, clocked.set_clock, clocked.set_clock, clocked.restart, clocked.restart, clocked.restart)
    job_ids = []
    for number, (step, ahead_s) in enumerate(zip(steps, (MONTH_S, 0, -MONTH_S) * 2, strict=True), start=2):
        clocked.submit(10 * number, ENDLESS, deadline_ms=1500)
        step(ahead_s)
        clocked.submit(number)
        job_ids.append(number)
        assert [clocked.result(i) for i in job_ids] == [toy_text([*PROMPT, i], 8) for i in job_ids]
        wait_until(lambda number=number: clocked.states().get(10 * number) == "failed")
        states = clocked.states()
        assert {i: states[i] for i in job_ids} == dict.fromkeys(job_ids, "finished")
        assert states[1] in ("running", "waiting")
        assert [i for i in states if i in job_ids] == job_ids[::-1], "the last that ended comes first"
        again = clocked.post()
        assert (again["id"], again["choices"]) == (first["id"], first["choices"])


def test_a_journal_has_one_owner_at_any_clock_setting(clocked: Clocked) -> None:
    """A living broker keeps it while the clock is set; one that hangs is taken over, and ends when it wakes."""
    other_address = values.free_address()
    for ahead_s in (MONTH_S, -MONTH_S):
        clocked.set_clock(ahead_s)
        second = clocked.start_broker(address=other_address)
        assert second.wait(PATIENCE_S) == 2
        assert "in use by another broker" in said(second)
    clocked.submit(1, ENDLESS)
    freeze_between_writes(clocked.broker, clocked.journal)
    clocked.set_clock(MONTH_S)
    third = clocked.start_broker("--take-over", address=other_address)
    with JobDesk(other_address, timeout_s=PATIENCE_S) as desk:
        assert [line["job_id"] for line in desk.list_jobs()] == [1]
    clocked.broker.send_signal(signal.SIGCONT)
    assert clocked.broker.wait(PATIENCE_S) == 1
    assert "now belongs to another broker" in said(clocked.broker)
    assert third.poll() is None
