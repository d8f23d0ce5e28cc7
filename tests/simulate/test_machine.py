"""Processes that share a machine: they slow each other as said, and nobody's work is lost or done twice."""

import random
from dataclasses import replace

import pytest

from specq.protocol.params import Speculation
from specq.simulate import Scenario, simulate
from specq.simulate.machine import SimulatedMachine, Tenant
from specq.simulate.run import Simulation
from specq.simulate.settings import DrafterSettings, EngineSettings, HostSettings, MachineSettings, TrafficSettings


def busy_for(machine: SimulatedMachine, tenants: dict[Tenant, float], seconds: float) -> dict[Tenant, float]:
    """Let processes begin their next work (of so many seconds alone) whenever they are done; return what each got
    done."""
    done = dict.fromkeys(tenants, 0.0)
    while (tenant := min(tenants, key=lambda t: t.busy_until)).busy_until < seconds:
        machine.compute(tenant, tenant.busy_until, tenants[tenant])
        done[tenant] += tenants[tenant]
    return done


def on(machine: SimulatedMachine, *tenants: Tenant) -> tuple[Tenant, ...]:
    return tuple(machine.add(tenant) for tenant in tenants)


def test_alone_work_takes_its_time():
    machine = SimulatedMachine()
    (one,) = on(machine, Tenant(0, stretch=3.0))
    assert machine.compute(one, 5.0, 2.0) == 7.0


def test_two_that_stream_from_memory_take_longer_beside_each_other():
    """Both use all bandwidth: two cores get done what one does."""
    machine = SimulatedMachine()
    one, two = on(machine, Tenant(0, stretch=2.0), Tenant(1, stretch=2.0))
    done = busy_for(machine, {one: 0.003, two: 0.0007}, 30.0)
    assert done[one] == pytest.approx(15.0, rel=0.001)
    assert done[two] == pytest.approx(15.0, rel=0.001)


def test_on_two_machines_they_do_not():
    one, two = Tenant(0, stretch=2.0), Tenant(1, stretch=2.0)
    for tenant in (one, two):
        machine = SimulatedMachine()
        on(machine, tenant)
        assert busy_for(machine, {tenant: 0.003}, 30.0)[tenant] == pytest.approx(30.0, rel=0.001)


@pytest.mark.parametrize("stretches", [(1.2, 1.5), (1.0, 2.0), (3.0, 1.1)])
def test_each_is_slowed_by_its_own_stretch(stretches):
    machine = SimulatedMachine()
    tenants = on(machine, *(Tenant(core, stretch) for core, stretch in enumerate(stretches)))
    done = busy_for(machine, dict(zip(tenants, (0.002, 0.0005), strict=True)), 20.0)
    assert [20.0 / done[tenant] for tenant in tenants] == pytest.approx(stretches, rel=0.002)


def test_three_cores_slow_each_other_more():
    machine = SimulatedMachine()
    tenants = on(machine, *(Tenant(core, 1.5) for core in range(3)))
    done = busy_for(machine, dict(zip(tenants, (0.002, 0.001, 0.0007), strict=True)), 20.0)
    assert [20.0 / done[tenant] for tenant in tenants] == pytest.approx([2.0] * 3, rel=0.005)


def test_what_begins_later_takes_from_what_computes_and_owes_it():
    """A second of work; half-way another begins half a second of its own, at half the pace of each: 0.25 are owed."""
    machine = SimulatedMachine()
    first, second = on(machine, Tenant(0, stretch=2.0), Tenant(1, stretch=2.0))
    assert machine.compute(first, 0.0, 1.0) == 1.0
    assert machine.compute(second, 0.5, 0.5) == pytest.approx(1.25)  # half of it until 1.0, the rest alone
    assert first.owed_s == pytest.approx(0.25)
    assert machine.compute(first, 1.25, 1.0) == pytest.approx(2.5)
    assert first.owed_s == 0.0


def test_processes_of_one_core_take_turns():
    machine = SimulatedMachine()
    one, two = on(machine, Tenant(0, stretch=9.0), Tenant(0, stretch=9.0))  # nobody is on another core
    done = busy_for(machine, {one: 0.003, two: 0.001}, 20.0)
    assert list(done.values()) == pytest.approx([10.0, 10.0], rel=0.002)


def test_who_gives_way_stands_still_meanwhile():
    """The broker computes at once; the drafter on its core gets what is left, whoever began first."""
    machine = SimulatedMachine()
    broker, drafter = on(machine, Tenant(0, has_model=False), Tenant(0, gives_way=True))
    assert machine.compute(drafter, 0.0, 1.0) == 1.0
    assert machine.compute(broker, 0.5, 0.2) == pytest.approx(0.7)
    assert drafter.owed_s == pytest.approx(0.2)
    assert machine.compute(broker, 1.0, 0.2) == pytest.approx(1.2)
    assert machine.compute(drafter, 1.0, 1.0) == pytest.approx(1.0 + 0.2 + 0.2 + 1.0)


def test_what_has_no_model_slows_no_other_core():
    machine = SimulatedMachine()
    broker, verifier = on(machine, Tenant(0, has_model=False), Tenant(1, stretch=2.0))
    machine.compute(broker, 0.0, 1.0)
    assert machine.compute(verifier, 0.0, 1.0) == 1.0


def test_work_is_conserved_whatever_comes_when():
    """Processes of all kinds at random times: a core gives no more than a second of work a second, and nobody is done
    earlier than alone; what they lose to each other on one core without a stretch is exactly the others' work."""
    draw = random.Random(3)
    machine = SimulatedMachine()
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


def helped_verifier(helped_stretch: float = 1.0, stretch: float = 1.0) -> Tenant:
    return Tenant(1, stretch, helper=Tenant(0, stretch), helped_stretch=helped_stretch)


@pytest.mark.parametrize("stretch", [1.0, 2.0])
def test_a_helper_takes_turns_with_the_broker_on_its_core(stretch):
    """A step of a second, half of it by the helper; the broker's tenth takes two there, and the step is owed half of
    the other. That others would slow it is no matter: a step is not slowed by its own helper."""
    machine = SimulatedMachine()
    broker, verifier = on(machine, Tenant(0, has_model=False), helped_verifier(stretch=stretch))
    assert machine.compute(verifier, 0.0, 1.0, help_part=0.5) == 1.0
    assert machine.compute(broker, 0.5, 0.1) == pytest.approx(0.7)
    assert machine.compute(verifier, 1.0, 1.0, help_part=0.5) == pytest.approx(2.05)


def test_a_step_does_not_wait_for_its_helper():
    """While the broker computes, the helper does half of its half: three quarters of the pace."""
    machine = SimulatedMachine()
    broker, verifier = on(machine, Tenant(0, has_model=False), helped_verifier())
    machine.compute(broker, 0.0, 0.5)
    assert machine.compute(verifier, 0.0, 1.0, help_part=0.5) == pytest.approx(0.5 + (1 - 0.375))


def test_a_step_without_help_leaves_the_other_core_alone():
    machine = SimulatedMachine()
    broker, drafter, verifier = on(machine, Tenant(0, has_model=False), Tenant(0, gives_way=True), helped_verifier(9.0))
    assert machine.compute(verifier, 0.0, 1.0) == 1.0
    assert machine.compute(broker, 0.0, 0.25) == 0.25
    assert machine.compute(drafter, 0.25, 0.5) == 0.75
    assert machine.compute(verifier, 1.0, 1.0) == 2.0


def test_a_drafter_gives_way_to_a_helper():
    machine = SimulatedMachine()
    drafter, verifier = on(machine, Tenant(0, gives_way=True), helped_verifier())
    machine.compute(verifier, 0.0, 1.0, help_part=0.5)
    assert machine.compute(drafter, 0.5, 0.25) == pytest.approx(1.25)


def test_who_would_compute_where_a_thread_helps_disturbs_it():
    machine = SimulatedMachine()
    drafter, verifier = on(machine, Tenant(0, gives_way=True), helped_verifier(1.25))
    assert machine.compute(drafter, 0.0, 9.0) == 9.0
    assert machine.compute(verifier, 0.0, 1.0, help_part=0.5) == pytest.approx(1.25)


def test_work_with_help_is_conserved():
    """The helper's core is shared half and half where the broker never rests, so the step goes on at 0.75 of its
    pace."""
    machine = SimulatedMachine()
    broker, verifier = on(machine, Tenant(0, has_model=False), helped_verifier())
    done = {broker: 0.0, verifier: 0.0}
    while (tenant := min(done, key=lambda t: t.busy_until)).busy_until < 30.0:
        work, part = (0.001, 0.0) if tenant is broker else (0.007, 0.5)
        machine.compute(tenant, tenant.busy_until, work, help_part=part)
        done[tenant] += work
    assert list(done.values()) == pytest.approx([15.0, 22.5], rel=0.005)


def test_a_process_that_is_gone_slows_nobody():
    machine = SimulatedMachine()
    one, two = on(machine, Tenant(0, stretch=2.0), Tenant(1, stretch=2.0))
    machine.compute(two, 0.0, 9.0)
    machine.remove(two)
    assert machine.compute(one, 0.0, 1.0) == 1.0


# --- whole scenarios ----------------------------------------------------------------------------------------------

HOST = HostSettings(broker_us=0, draft_us=0, graft_us=0, verdict_us=0, plan_us=0, hear_us=0, send_us=0)
SHARED = MachineSettings(draft_cores=1, step_stretch=1.5, pass_stretch=2.0)
BUSY = Scenario(
    engine=EngineSettings(step_ms=((1, 10.0), (64, 10.0)), session_us=0),
    draft=DrafterSettings(pass_ms=((1, 3.0), (64, 3.0)), acceptance=(0.9,), max_ahead=1024),
    host=HOST,
    traffic=TrafficSettings(prompt_tokens=1, output_tokens=400, warm_s=1, seconds=6),
)


@pytest.mark.slow
def test_a_shared_machine_slows_drafting_but_not_plain_decoding():
    """Without drafts nothing computes beside the verifier. With them its rounds take longer, and fewer passes are
    made."""
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


@pytest.mark.slow
def test_two_drafters_on_one_core_make_as_many_passes_as_one():
    """Of two models, both draft for the session; on cores of their own they make twice as many."""
    draft = replace(BUSY.draft, models=2)
    passes = {}
    for drafters, machine in ((1, SHARED), (2, SHARED), (2, replace(SHARED, draft_cores=2)), (2, MachineSettings())):
        one = replace(BUSY, draft=replace(draft, drafters=drafters), machine=replace(machine, pass_stretch=1.0))
        simulation = Simulation(one)
        simulation.run(drain=False)
        passes[drafters, machine.draft_cores] = simulation.counts().passes
    assert passes[2, 1] == pytest.approx(passes[1, 1], rel=0.15)
    assert passes[2, 2] > 1.6 * passes[2, 1]
    assert passes[2, 0] > 1.6 * passes[2, 1]


HELPED = EngineSettings(step_ms=((1, 10.0), (64, 10.0)), helped_ms=((1, 6.0), (64, 6.0)), session_us=0)
ROOMY = MachineSettings(draft_cores=1)


@pytest.mark.slow
def test_a_verifier_is_helped_while_drafters_are_silent_or_absent():
    """The real verifier chooses: with nobody who drafts its steps take 6 ms, with a good drafter in use 10."""
    alone, beside = (
        simulate(replace(BUSY, engine=HELPED, machine=ROOMY, draft=replace(BUSY.draft, drafters=drafters)))
        for drafters in (0, 1)
    )
    assert alone.seconds / alone.rounds == pytest.approx(0.006, rel=0.01)
    assert beside.mean_accepted_length > 1.5
    assert 0.0095 < beside.seconds / beside.rounds < 0.0105


def test_a_verifier_plans_by_the_curve_of_how_it_steps():
    simulation = Simulation(replace(BUSY, engine=HELPED))
    verifier = simulation.world.processes[b"target-0"].worker
    for is_helped, seconds in ((True, 0.006), (False, 0.010)):
        verifier.engine.is_helped = is_helped
        assert verifier.curve(8) == pytest.approx(seconds)


def test_drafters_that_do_not_pay_are_silenced_for_the_core_that_they_take():
    """A drafter that is hardly ever right costs nothing but the help that the verifier could have in its place: the
    controller that serves finds that out. Without help there is nothing to gain by silence, but for its own rows."""
    poor = replace(BUSY.draft, acceptance=(0.05,), ranks=(0.0,), claims=(0.6,))
    simulation = Simulation(
        replace(BUSY, engine=HELPED, machine=ROOMY, draft=poor, traffic=replace(BUSY.traffic, warm_s=8))
    )
    found = simulation.run(drain=False)
    assert found.seconds / found.rounds < 0.0070
    assert not simulation.world.processes[b"target-0"].worker.arms.uses("remote")
