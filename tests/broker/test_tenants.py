"""Tenants: a gateway's jobs have the turns and the room of those for whom it submits them."""

import numpy as np
import pytest

from specq.broker.jobs.intake import overload
from specq.broker.state.job import BrokerJob, JobRequest
from specq.broker.state.rights import Roles
from specq.broker.state.table import FairQueue
from specq.protocol import SamplingParams, Submit
from specq.testing.world import ReceivedText, World
from specq.transport import Grant


def submit(job_id: int, tenant: str, label: str = "") -> Submit:
    params = SamplingParams(max_tokens=10)
    return Submit(job_id=job_id, params=params, tenant=tenant, label=label, prompt_ids=np.array([1, 2], np.int32))


def test_tenants_of_one_connection_take_turns():
    """One tenant's second job waits for the other's first, though it came earlier."""
    queue = FairQueue()
    for job_id, tenant in [(1, "ann"), (2, "ann"), (3, "ann"), (4, "ben")]:
        queue.add(BrokerJob(JobRequest(submit(job_id, tenant), owner="gateway")))
    order = []
    while (taken := queue.take(lambda _: True)) is not None:
        order.append(taken[0].job_id)
    assert order.index(4) < 2


def test_a_tenant_leaves_room_for_others():
    """One tenant may have as many jobs as there is room left for the others; without keys too."""
    world = World(max_jobs=10)
    world.add_verifier(max_sessions=1)
    world.run(0.1)
    for job_id in range(1, 9):
        world.received[job_id] = ReceivedText()
        world.send(submit(job_id, "ann"))
    world.received[20] = ReceivedText()
    world.send(submit(20, "ben"))
    world.run(0.005)
    refused = [job_id for job_id in range(1, 9) if world.received[job_id].failed]
    assert refused == [6, 7, 8]
    assert "of one key" in world.received[6].failed.reason
    assert world.received[20].failed is None
    assert overload(world.broker.state, None) == ""


@pytest.mark.parametrize(("tenants", "refused"), [(True, False), (False, True)])
def test_with_keys_it_takes_a_right(tenants, refused):
    roles = Roles({"web": Grant("web", b"web", ("client",), tenants=tenants)})
    assert not roles.refusal(b"socket", "web", Submit)
    assert bool(roles.refused_tenant(b"socket", "ann")) is refused
    assert not roles.refused_tenant(b"socket", "")


def test_a_label_is_part_of_a_job():
    """The same id under another label is another job: a gateway's label says what was asked for."""
    request = JobRequest(submit(1, "ann", label="a"))
    assert request.has_content(submit(1, "ann", label="a"))
    assert not request.has_content(submit(1, "ann", label="b"))


@pytest.mark.parametrize("tenant", ["", "ann"])
def test_a_verifier_knows_whose_a_job_is(tenant):
    """So that it drafts from no text that its owner may not see. Without keys everyone sees everything but what tenants
    say."""
    world = World()
    verifier = world.add_verifier()
    world.received[1] = ReceivedText()
    world.send(submit(1, tenant))
    world.run(0.005)
    assert [session.owner for session in verifier.sessions.values()] == [f"/{tenant}" if tenant else ""]


def test_with_keys_a_job_is_its_key_s():
    assert Roles({}).seen_by("ann") == "ann"
    assert Roles().seen_by("ann") == ""
