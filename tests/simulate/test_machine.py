"""Processes that share a machine: they slow each other as said, and nobody's work is lost or done twice."""

import random
from dataclasses import replace

import pytest

from specq.protocol.params import Speculation
from specq.simulate import Scenario, simulate
from specq.simulate.machine import Machine, Tenant
from specq.simulate.run import Simulation
from specq.simulate.settings import DraftSettings, EngineSettings, HostSettings, MachineSettings, TrafficSettings


def busy_for(machine: Machine, tenants: dict[Tenant, float], seconds: float) -> dict[Tenant, float]:
    """Let processes begin their next work (of so many seconds alone) whenever they are done; return what each got done."""
    done = dict.fromkeys(tenants, 0.0)
    while (tenant := min(tenants, key=lambda t: t.busy_until)).busy_until < seconds:
        machine.compute(tenant, tenant.busy_until, tenants[tenant])
        done[tenant] += tenants[tenant]
    return done


def on(machine: Machine, *tenants: Tenant) -> tuple[Tenant, ...]:
    return tuple(machine.add(tenant) for tenant in tenants)


def test_alone_work_takes_its_time():
    machine = Machine()
    (one,) = on(machine, Tenant(0, stretch=3.0))
    assert machine.compute(one, 5.0, 2.0) == 7.0


def test_two_that_stream_from_memory_take_longer_beside_each_other():
    """Both use all bandwidth: two cores get done what one does."""
    machine = Machine()
    one, two = on(machine, Tenant(0, stretch=2.0), Tenant(1, stretch=2.0))
    done = busy_for(machine, {one: 0.003, two: 0.0007}, 30.0)
    assert done[one] == pytest.approx(15.0, rel=0.001)
    assert done[two] == pytest.approx(15.0, rel=0.001)


def test_on_two_machines_they_do_not():
    one, two = Tenant(0, stretch=2.0), Tenant(1, stretch=2.0)
    for tenant in (one, two):
        machine = Machine()
        on(machine, tenant)
        assert busy_for(machine, {tenant: 0.003}, 30.0)[tenant] == pytest.approx(30.0, rel=0.001)


@pytest.mark.parametrize("stretches", [(1.2, 1.5), (1.0, 2.0), (3.0, 1.1)])
def test_each_is_slowed_by_its_own_stretch(stretches):
    machine = Machine()
    tenants = on(machine, *(Tenant(core, stretch) for core, stretch in enumerate(stretches)))
    done = busy_for(machine, dict(zip(tenants, (0.002, 0.0005), strict=True)), 20.0)
    assert [20.0 / done[tenant] for tenant in tenants] == pytest.approx(stretches, rel=0.002)


def test_three_cores_slow_each_other_more():
    machine = Machine()
    tenants = on(machine, *(Tenant(core, 1.5) for core in range(3)))
    done = busy_for(machine, dict(zip(tenants, (0.002, 0.001, 0.0007), strict=True)), 20.0)
    assert [20.0 / done[tenant] for tenant in tenants] == pytest.approx([2.0] * 3, rel=0.005)


def test_what_begins_later_takes_from_what_computes_and_owes_it():
    """A second of work; half-way another begins half a second of its own, at half the pace of each: 0.25 are owed."""
    machine = Machine()
    first, second = on(machine, Tenant(0, stretch=2.0), Tenant(1, stretch=2.0))
    assert machine.compute(first, 0.0, 1.0) == 1.0
    assert machine.compute(second, 0.5, 0.5) == pytest.approx(1.25)  # half of it until 1.0, the rest alone
    assert first.owed_s == pytest.approx(0.25)
    assert machine.compute(first, 1.25, 1.0) == pytest.approx(2.5)
    assert first.owed_s == 0.0


def test_processes_of_one_core_take_turns():
    machine = Machine()
    one, two = on(machine, Tenant(0, stretch=9.0), Tenant(0, stretch=9.0))  # nobody is on another core
    done = busy_for(machine, {one: 0.003, two: 0.001}, 20.0)
    assert list(done.values()) == pytest.approx([10.0, 10.0], rel=0.002)


def test_who_gives_way_stands_still_meanwhile():
    """The broker computes at once; the drafter on its core gets what is left, whoever began first."""
    machine = Machine()
    broker, drafter = on(machine, Tenant(0, has_model=False), Tenant(0, gives_way=True))
    assert machine.compute(drafter, 0.0, 1.0) == 1.0
    assert machine.compute(broker, 0.5, 0.2) == pytest.approx(0.7)
    assert drafter.owed_s == pytest.approx(0.2)
    assert machine.compute(broker, 1.0, 0.2) == pytest.approx(1.2)
    assert machine.compute(drafter, 1.0, 1.0) == pytest.approx(1.0 + 0.2 + 0.2 + 1.0)


def test_what_has_no_model_slows_no_other_core():
    machine = Machine()
    broker, verifier = on(machine, Tenant(0, has_model=False), Tenant(1, stretch=2.0))
    machine.compute(broker, 0.0, 1.0)
    assert machine.compute(verifier, 0.0, 1.0) == 1.0


def test_work_is_conserved_whatever_comes_when():
    """Processes of all kinds at random times: a core gives no more than a second of work a second, and nobody is done earlier
    than alone; what they lose to each other on one core without a stretch is exactly the others' work."""
    draw = random.Random(3)
    machine = Machine()
    tenants = on(machine, Tenant(0), Tenant(0, gives_way=True), Tenant(0, gives_way=True))
    done, now = dict.fromkeys(tenants, 0.0), 0.0
    while now < 50.0:
        now += draw.expovariate(20.0)
        tenant = draw.choice(tenants)
        work, start = draw.expovariate(10.0), max(now, tenant.busy_until)
        assert machine.compute(tenant, start, work) >= start + work
        done[tenant] += work
    end = max(tenant.busy_until for tenant in tenants)
    assert sum(done.values()) - sum(tenant.owed_s for tenant in tenants) <= end
    assert sum(done.values()) > 0.9 * end


def test_a_process_that_is_gone_slows_nobody():
    machine = Machine()
    one, two = on(machine, Tenant(0, stretch=2.0), Tenant(1, stretch=2.0))
    machine.compute(two, 0.0, 9.0)
    machine.remove(two)
    assert machine.compute(one, 0.0, 1.0) == 1.0


# --- whole scenarios ----------------------------------------------------------------------------------------------

HOST = HostSettings(broker_us=0, draft_us=0, graft_us=0, verdict_us=0, plan_us=0, hear_us=0, send_us=0)
SHARED = MachineSettings(draft_cores=1, step_stretch=1.5, pass_stretch=2.0)
BUSY = Scenario(
    engine=EngineSettings(step_ms=((1, 10.0), (64, 10.0)), session_us=0),
    draft=DraftSettings(pass_ms=((1, 3.0), (64, 3.0)), acceptance=(0.9,), max_ahead=1024),
    host=HOST,
    traffic=TrafficSettings(prompt_tokens=1, output_tokens=400, warm_s=1, seconds=6),
)


def test_a_shared_machine_slows_drafting_but_not_plain_decoding():
    """Without drafts nothing computes beside the verifier. With them its rounds take longer, and fewer passes are made."""
    plain, plain_shared, alone, shared = (
        simulate(replace(BUSY, speculation=Speculation(mode=mode), machine=machine))
        for mode in ("plain", "async")
        for machine in (MachineSettings(), SHARED)
    )
    assert plain_shared == plain
    assert 1.2 < alone.rounds / shared.rounds < 1.5  # 1.5 where a drafter always computes
    assert alone.goodput > 1.2 * shared.goodput


def test_the_verifier_feels_what_computes_beside_it():
    """The steps that it times, in its verdicts, are the longer ones."""
    simulation = Simulation(replace(BUSY, machine=SHARED))
    simulation.run(drain=True)
    stats = simulation.users.finished[-1].stats
    assert 11_000 < stats["forward_us"] / stats["rounds"] <= 15_000


def test_two_drafters_on_one_core_make_as_many_passes_as_one():
    """Of two models, both draft for the session; on cores of their own they make twice as many."""
    draft = replace(BUSY.draft, models=2)
    passes = {}
    for drafters, machine in ((1, SHARED), (2, SHARED), (2, replace(SHARED, draft_cores=2)), (2, MachineSettings())):
        one = replace(BUSY, draft=replace(draft, drafters=drafters), machine=replace(machine, pass_stretch=1.0))
        simulation = Simulation(one)
        simulation.run(drain=False)
        passes[drafters, machine.draft_cores] = simulation.counts().passes
    assert passes[2, 1] == pytest.approx(passes[1, 1], rel=0.1)
    assert passes[2, 2] > 1.6 * passes[2, 1]
    assert passes[2, 0] > 1.6 * passes[2, 1]
