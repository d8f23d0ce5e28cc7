"""What the tests of the client's core have in common: a core with a job, and what it says."""

from typing import Any

import numpy as np

from specq.client.core import ClientCore
from specq.client.events import NewTokens
from specq.protocol import Cancel, SamplingParams, Submit

TEXT = list(range(10, 30))


def make_core(timeout_s: float = 10.0) -> tuple[ClientCore, Submit]:
    """Return a core that has submitted job 7 at time 0."""
    core, job = ClientCore("tcp://somewhere:1", timeout_s), job_of(7)
    core.submit(job, 0.0)
    return core, job


def job_of(job_id: int, **fields: Any) -> Submit:
    prompt_ids = np.array([1, 2], np.int32)
    return Submit(job_id=job_id, params=SamplingParams(max_tokens=20), prompt_ids=prompt_ids, **fields)


def new_ids(events: list) -> list[int]:
    return [token for event in events if isinstance(event, NewTokens) for token in event.token_ids]


def cancels(core: ClientCore, start: float, end: float) -> list[float]:
    """Let time pass in steps of 50 ms; return when `Cancel` of job 7 was sent."""
    times = []
    for step in range(1, round((end - start) / 0.05) + 1):
        now = start + step * 0.05
        core.tick(now)
        times += [now] * core.take_outbox().count(Cancel(job_id=7))
    return times
