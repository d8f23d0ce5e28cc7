"""Which verifier takes a job, and which jobs move: the pure rules."""

from __future__ import annotations

import numpy as np
import pytest

from specq.broker.state.job import BrokerJob, JobRequest
from specq.broker.state.registry import Worker, least_loaded
from specq.broker.workers.assignment import (
    AFFINITY_SLACK,
    FRESH_S,
    GROSS,
    MOVE_INTERVAL_S,
    MOVES_AT_ONCE,
    choose,
    moves,
    open_to,
)
from specq.protocol.messages import Heartbeat, Hello, Submit
from specq.protocol.params import SamplingParams
from specq.testing.toy import toy_info

LONG_AGO, NOW = -1000.0, 0.0


def worker(name: str, num_jobs: int = 0, *, joined_at: float = LONG_AGO, **fields: object) -> Worker:
    hello = Hello(role="target", name=name, incarnation=1, model=toy_info(), endpoint="toy", max_sessions=64)
    jobs = set(range(hash(name) % 1000 * 1000, hash(name) % 1000 * 1000 + num_jobs))
    return Worker(name.encode(), hello, NOW, joined_at=joined_at, job_ids=jobs, **({"free_slots": 10_000} | fields))


def job(job_id: int, prompt_len: int = 20, *, verifier: str = "", max_tokens: int = 100) -> BrokerJob:
    prompt = np.arange(1, prompt_len + 1, dtype=np.int32)
    submit = Submit(job_id=job_id, params=SamplingParams(max_tokens=max_tokens), prompt_ids=prompt)
    made = BrokerJob(JobRequest(submit))
    made.session.verifier = verifier.encode()
    return made


def jobs_of(holder: Worker) -> list[BrokerJob]:
    return [job(i, verifier=holder.name) for i in holder.job_ids]


# --- a place for a job ------------------------------------------------------------------------------------------------


def test_the_least_loaded_takes_a_job() -> None:
    assert choose([worker("a", 2), worker("b", 1), worker("c", 3)], 100, [7]).name == "b"


def test_equal_prompts_go_to_the_same_verifier_where_load_allows() -> None:
    """Completions of one prompt follow the first, until that verifier has too many more jobs than the others."""
    first, other = worker("a"), worker("b")
    keys = job(1).request.prefix_keys("")
    for number in range(AFFINITY_SLACK + 1):
        assert choose([first, other], 100, keys) is first
        first.job_ids.add(number)
        first.take(100, keys)
    assert choose([first, other], 100, keys) is other


def test_the_longer_common_prefix_wins() -> None:
    """Prompts are compared at several lengths. A different beginning gives no affinity."""
    short, long = worker("short"), worker("long")
    wanted = job(1, 300)
    short.take(0, job(2, 20).request.prefix_keys(""))
    short.take(0, job(3, 30).request.prefix_keys(""))
    long.take(0, job(4, 280).request.prefix_keys(""))
    assert len(set(wanted.request.prefix_keys("")) & set(job(4, 280).request.prefix_keys(""))) == 3
    assert choose([short, long], 100, wanted.request.prefix_keys("")) is long
    assert not set(wanted.request.prefix_keys("")) & {hash(b"x")}


def test_a_verifier_without_kv_room_comes_last() -> None:
    """Even if it has fewer jobs and knows the prompt. Without another verifier it is used."""
    full = worker("full", 0, free_slots=50)
    full.take(0, [7])
    assert choose([full, worker("roomy", 5)], 100, [7]).name == "roomy"
    assert choose([full], 100, [7]) is full


def test_kv_room_counts_what_was_placed_since_the_heartbeat() -> None:
    one = worker("a")
    one.take(9_000, [])
    assert one.free_slots == 1_000
    one.beat(Heartbeat(incarnation=1, state="ready", free_slots=4_000), NOW)
    assert one.free_slots == 4_000


def test_a_verifier_is_kept_free_for_a_job_in_quarantine() -> None:
    """The one with the fewest jobs takes no others while such a job waits and none runs."""
    able = [worker("a", 2), worker("b", 1), worker("c", 3)]
    for isolated, expected in ((set(), "ac"), ({b"a"}, "bc")):
        free = open_to(able, isolated, alone=False, wanted={worker.identity for worker in able})
        assert "".join(one.name for one in free) == expected
    assert open_to(able, set(), alone=True, wanted={worker.identity for worker in able}) == []


def test_sessions_of_other_brokers_count_where_a_job_goes() -> None:
    """A broker's own jobs count whole, so that all brokers together do not overshoot."""
    first, second = worker("first"), worker("second")
    first.beat(Heartbeat(incarnation=1, state="ready", load=6), NOW, num_brokers=4)
    second.beat(Heartbeat(incarnation=1, state="ready", load=5), NOW, num_brokers=4)
    assert least_loaded([first, second]) is choose([first, second], 0, []) is second
    second.job_ids.add(1)
    assert least_loaded([first, second]) is choose([first, second], 0, []) is first
    second.beat(Heartbeat(incarnation=1, state="ready", load=50), NOW)
    assert second.num_sessions == 1, "a broker that is alone counts its own jobs"


def test_equal_workers_have_another_order_at_each_broker() -> None:
    """Else all brokers would begin with the same one. The identities of a worker differ from broker to broker."""
    names = "abcdefgh"
    chosen = set()
    for broker in names:
        able = [worker(broker * (place + 1)) for place in range(4)]
        for one in able:
            one.beat(Heartbeat(incarnation=1, state="ready", free_slots=1), NOW, num_brokers=2)
        assert least_loaded(able) is choose(able, 0, [])
        chosen.add(len(choose(able, 0, []).name))
    assert len(chosen) > 1


def test_each_broker_may_fill_its_part_of_a_verifier() -> None:
    """Else a broker that fills each place at once would leave none to the others."""
    one = worker("a", 15)  # of at most 64
    one.beat(Heartbeat(incarnation=1, state="ready", load=64), NOW, num_brokers=4)
    assert one.has_room
    one.job_ids.add(1)
    assert not one.has_room
    one.beat(Heartbeat(incarnation=1, state="ready", load=40), NOW, num_brokers=4)
    assert one.has_room


# --- moving -----------------------------------------------------------------------------------------------------------


def test_a_verifier_that_joins_gets_its_share() -> None:
    """A few jobs at a time, and no more than make both equal."""
    old, new = worker("old", 40), worker("new", joined_at=NOW)
    jobs = jobs_of(old)
    rounds = []
    while found := moves([old, new], jobs, NOW):
        rounds.append(len(found))
        for moved, to in found:
            assert to is new
            old.job_ids.discard(moved.job_id)
            new.job_ids.add(moved.job_id)
            moved.session.verifier, moved.session.moved_at = new.identity, NOW
    assert max(rounds) == MOVES_AT_ONCE
    assert (len(old.job_ids), len(new.job_ids)) == (20, 20)


@pytest.mark.parametrize(("difference", "expected"), [(GROSS - 1, 0), (GROSS, 1)])
def test_later_only_a_gross_difference_moves_jobs(difference: int, expected: int) -> None:
    old, other = worker("old", difference), worker("other", joined_at=NOW - FRESH_S)
    assert len(moves([old, other], jobs_of(old), NOW)) == expected


def test_the_cheapest_jobs_move_and_rest_then() -> None:
    """Short contexts first; not what is about to end, nor what has moved a moment ago."""
    old, new = worker("old", 4), worker("new", joined_at=NOW)
    long, short, ending, moved = (job(1, 200), job(2, 20), job(3, 5, max_tokens=10), job(4, 5))
    moved.session.moved_at = NOW - MOVE_INTERVAL_S / 2
    for one in (long, short, ending, moved):
        one.session.verifier = old.identity
    assert [m.job for m in moves([old, new], [long, short, ending, moved], NOW)] == [short, long]


def test_no_job_moves_to_a_verifier_that_is_full_or_leaves() -> None:
    old = worker("old", 40)
    leaving = worker("leaving", joined_at=NOW, state="draining")
    assert moves([old, leaving], jobs_of(old), NOW) == []
