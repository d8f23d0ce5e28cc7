"""The order of placing jobs: priorities, fair shares, and no client that blocks another."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from specq.broker.state.job import AGED_S, BrokerJob, JobRequest, Requirements
from specq.broker.state.table import FairQueue
from specq.protocol.messages import Submit
from specq.protocol.params import SamplingParams


def job(
    job_id: int, owner: str = "a", *, tokens: int = 10, priority: int = 0, model: str = "m", at: float = 0.0
) -> BrokerJob:
    """Return a job that costs `tokens` tokens, one of them the prompt's, and was submitted at that time."""
    params = SamplingParams(max_tokens=tokens - 1)
    prompt = np.ones(1, np.int32)
    submit = Submit(job_id=job_id, params=params, model=model, priority=priority, prompt_ids=prompt)
    return BrokerJob(JobRequest(submit, owner, at))


def filled(*jobs: BrokerJob) -> FairQueue:
    queue = FairQueue()
    for one in jobs:
        queue.add(one)
    return queue


def taken(queue: FairQueue, most: int = 1000, models: str = "m") -> list[BrokerJob]:
    """Take jobs while there are any that can be placed with these models."""
    found = []
    while len(found) < most and (
        entry := queue.take(lambda requirements: requirements.model if requirements.model in models else None)
    ):
        assert entry[1] == entry[0].request.model
        found.append(entry[0])
    return found


def test_clients_take_turns() -> None:
    """One with many jobs does not keep another waiting; each gets its own in order."""
    queue = filled(*[job(i, "greedy") for i in range(100)], *[job(i, "modest") for i in (500, 501, 502)])
    first = taken(queue, 6)
    assert Counter(one.request.owner for one in first) == {"greedy": 3, "modest": 3}
    assert [one.job_id for one in first if one.request.owner == "modest"] == [500, 501, 502]
    assert [one.job_id for one in taken(queue)] == list(range(3, 100))
    assert len(queue) == 0


def test_a_latecomer_has_no_claims() -> None:
    """A client without waiting jobs saves no credit and owes none."""
    queue = filled(*[job(i, "early") for i in range(50)])
    taken(queue, 30)
    for i in range(100, 150):
        queue.add(job(i, "late"))
    assert Counter(one.request.owner for one in taken(queue, 10)) == {"early": 5, "late": 5}


@pytest.mark.parametrize("seed", range(5))
def test_shares_are_of_tokens(seed: int) -> None:
    """However large their jobs: while all have some waiting, no two differ by more than two of the largest."""
    rng = random.Random(seed)
    jobs = [job(i, rng.choice("abc"), tokens=rng.choice([2, 20, 300])) for i in range(600)]
    queue, used = filled(*jobs), Counter[str]()
    for one in taken(queue, 250):
        used[one.request.owner] += one.request.max_length
    assert max(used.values()) - min(used.values()) <= 2 * 300


def test_higher_priorities_go_first() -> None:
    queue = filled(job(1), job(2, priority=-1), job(3, "b", priority=7), job(4))
    assert [one.job_id for one in taken(queue)] == [3, 1, 4, 2]


def test_an_unplaceable_job_blocks_no_other_job() -> None:
    """A job for a model without room waits; those behind it, of the same client or others, do not."""
    queue = filled(job(1, model="x", priority=5), job(2, model="x"), job(3), job(4, "b"), job(5, model="x"))
    assert sorted(one.job_id for one in taken(queue)) == [3, 4]
    assert queue.take(lambda requirements: None) is None
    assert [one.job_id for one in taken(queue, models="xm")] == [1, 2, 5]


def test_a_returning_job_goes_first_without_a_second_charge() -> None:
    """A job that was placed before does not queue up again."""
    back = job(9, "a")
    back.session.was_placed = True
    queue = filled(job(1, "a"), job(2, "b"), back)
    assert [one.job_id for one in taken(queue)] == [9, 1, 2]


def test_adding_and_discarding_twice_is_harmless() -> None:
    one = job(1)
    queue = filled(one, one)
    assert len(queue) == 1
    queue.discard(one)
    queue.discard(one)
    assert (len(queue), taken(queue)) == (0, [])


def test_a_job_with_tokens_wants_the_weights_that_they_came_from() -> None:
    one = job(1)
    one.session.weights = "w"
    assert one.requirements == Requirements("m", "")
    one.transcript.token_ids.append(5)
    assert one.requirements == Requirements("m", "w")


def serve(queue: FairQueue, now: float, model: str = "m") -> BrokerJob:
    entry = queue.take(lambda requirements: requirements.model if requirements.model == model else None, now)
    assert entry is not None
    return entry[0]


def test_a_flood_of_high_priorities_starves_no_job() -> None:
    """A job a second is placed while two a second of the highest priority come: one of the lowest is placed in its
    time."""
    queue, served = filled(job(1, "modest", priority=-1000)), dict[int, int]()
    for second in range(int(AGED_S) + 10):
        for i in range(2):
            queue.add(job(1000 + 2 * second + i, "greedy", priority=1000, at=float(second)))
        served[serve(queue, float(second)).job_id] = second
    assert AGED_S < served[1] <= AGED_S + 2


def test_priorities_keep_half_of_the_places() -> None:
    """However many jobs are aged: every second one that is placed is the highest, the others are the eldest."""
    old = [job(i, priority=-1, at=float(i)) for i in range(20)]
    queue = filled(*old, *[job(100 + i, "b", priority=5, at=AGED_S) for i in range(10)])
    found = [serve(queue, AGED_S + 10.0) for _ in range(20)]
    assert [one.request.priority for one in found] == [-1, 5] * 10
    ages = [one.request.submitted for one in found if one.request.priority == -1]
    assert ages == sorted(ages)


def test_before_its_time_a_job_waits_for_higher_ones() -> None:
    """To the second; and an aged one that cannot be placed holds up none."""
    queue = filled(job(1, at=0.0), *[job(10 + i, "b", priority=1, at=1.0) for i in range(9)])
    assert serve(queue, AGED_S).job_id == 10
    assert serve(queue, AGED_S + 0.5).job_id == 1
    queue.add(job(2, model="x", at=0.0))
    assert [serve(queue, 2 * AGED_S).job_id for _ in range(3)] == [11, 12, 13]


def test_what_waits_is_known_by_what_it_wants() -> None:
    queue = filled(job(1), job(2), job(3, model="x"))
    assert sorted(requirements.model for requirements in queue.requirements()) == ["m", "x"]
    taken(queue)
    assert [requirements.model for requirements in queue.requirements()] == ["x"]
