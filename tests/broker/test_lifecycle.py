"""The states of a job: the table, its diagram, and what must hold of the broker's memory after each message."""

from __future__ import annotations

import pytest

from specq.broker import diagram
from specq.broker.state.job import TRANSITIONS, Durable, JobEvent, JobState, after
from specq.broker.validation import validate
from specq.testing import World


def reachable(state: JobState) -> set[JobState]:
    found, todo = {state}, [state]
    while todo:
        new = set(TRANSITIONS[todo.pop()].values()) - found
        found |= new
        todo += new
    return found


def test_every_state_is_reached_and_every_job_can_end():
    assert reachable(JobState.NEW) == set(JobState) == set(TRANSITIONS)
    for state in set(JobState) - {JobState.DROPPED}:
        assert JobState.ENDED in reachable(state), state


def test_only_events_change_a_state(world):
    job = world.broker.state.jobs.active[1]
    with pytest.raises(AttributeError):
        job.state = JobState.ENDED
    with pytest.raises(AssertionError, match="a job that is running cannot be read, ended"):
        job.note(JobEvent.READ_ENDED)
    assert job.state is JobState.RUNNING


def test_what_the_journal_has_it_keeps():
    """Records of a job after its end, or repeated ones, do not change it."""
    durable = Durable()
    for num_tokens, ended in ((2, False), (3, True), (1, False)):
        durable.note(num_tokens, ended=ended)
    assert durable == Durable(is_registered=True, num_tokens=3, has_ended=True)


def test_what_has_ended_stays_so():
    for state in (JobState.ENDED, JobState.DROPPED):
        assert reachable(state) == {state}


def test_every_event_happens_and_others_are_bugs():
    """An event that the table does not have raises."""
    assert {event for ways in TRANSITIONS.values() for event in ways} == set(JobEvent)
    for state, ways in TRANSITIONS.items():
        for event in set(JobEvent) - set(ways):
            with pytest.raises(AssertionError, match=f"a job that is {state} cannot be {event}"):
                after(state, event)


def test_the_diagram_has_each_transition():
    lines = diagram().splitlines()
    assert len(lines) == 1 + sum(map(len, TRANSITIONS.values()))
    assert "    running --> waiting: queued" in lines


# --- what must hold ---------------------------------------------------------------------------------------------------


@pytest.fixture
def world():
    """A job that runs, and one that waits for another model."""
    world = World()
    verifier = world.add_verifier(max_sessions=1)
    world.add_drafter()
    jobs = [world.submit(i, [5, 6, i], max_tokens=200) for i in (1, 2)]
    world.run_until(lambda: len(jobs[0].token_ids) > 3)
    assert verifier
    return world


def broken(world: World, change) -> str:
    """Return what is found after a change that no message makes."""
    state = world.broker.state
    validate(state)
    change(state)
    with pytest.raises(AssertionError) as found:
        validate(state)
    return str(found.value)


PLANTED = {
    "forgets the verifier": (lambda state, one, two: setattr(one.session, "verifier", b""), "its verifier is b''"),
    "forgets the job at the verifier": (
        lambda state, one, two: state.workers.get(one.session.verifier).job_ids.clear(),
        "runs at a verifier that does not have it",
    ),
    "leaves it in the queue": (lambda state, one, two: state.jobs.queue.add(one), "in the queue: True"),
    "takes it off the queue": (lambda state, one, two: state.jobs.queue.discard(two), "in the queue: False"),
    "ends it without retiring it": (
        lambda state, one, two: setattr(one.transcript, "finish", "stop"),
        "has ended: stop",
    ),
    "counts tokens wrongly": (lambda state, one, two: setattr(state.jobs, "num_tokens", 1), "tokens are counted"),
    "acknowledges too much": (lambda state, one, two: one.durable.note(10_000, ended=False), "the journal 10000"),
    "gives up and does not fail": (lambda state, one, two: state.jobs.give_up(one, "no"), "active and given up"),
    "keeps what has not ended": (lambda state, one, two: state.jobs.keep(two), "among the finished and waiting"),
    "ends it at its verifier": (lambda state, one, two: state.jobs.retire(one), "has ended and has a verifier"),
    "gives a job to a verifier twice": (
        lambda state, one, two: state.workers.get(one.session.verifier).job_ids.add(two.job_id),
        "has job 2, which is not there",
    ),
    "forgets a lane": (lambda state, one, two: one.drafters.clear(), "has job 1, which does not know of it"),
    "forgets a drafter": (lambda state, one, two: state.workers.remove(b"d0"), "a lane of the drafter b'd0'"),
    "counts jobs wrongly": (lambda state, one, two: state.jobs.held.update(["ann"]), "jobs by bucket are counted"),
    "settles what was not written": (lambda state, one, two: state.ledger.settle(9), "the journal has 9 of 0"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_does_not_fit_together_is_found(world, name):
    change, said = PLANTED[name]
    active = world.broker.state.jobs.active
    running = [job for job in active.values() if job.state is JobState.RUNNING]
    waiting = [job for job in active.values() if job.state is JobState.WAITING]
    assert (len(running), len(waiting)) == (1, 1)
    assert said in broken(world, lambda state: change(state, running[0], waiting[0]))


def test_the_broker_checks_itself_in_tests(world):
    """As in each test of this suite: see conftest.py."""
    assert world.broker.validates
    world.broker.state.jobs.num_tokens += 1
    with pytest.raises(AssertionError, match="tokens are counted"):
        world.run(1.0)
