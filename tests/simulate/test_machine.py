"""Processes that share a machine slow each other as specified, and no work is lost or done twice."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest

from specq.protocol.params import Speculation
from specq.simulate import Scenario, simulate
from specq.simulate.machine import SimulatedMachine, Tenant
from specq.simulate.run import Simulation
from specq.simulate.settings import DrafterSettings, EngineSettings, HostSettings, MachineSettings, TrafficSettings
from tests.each import each


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


SLOWED: dict[str, tuple[list[Tenant], list[float], list[float]]] = {
    "two that use all bandwidth": ([Tenant(0, 2.0), Tenant(1, 2.0)], [0.003, 0.0007], [2.0, 2.0]),
    "one of them alone": ([Tenant(0, 2.0)], [0.003], [1.0]),
    "each by its own stretch": ([Tenant(0, 1.2), Tenant(1, 1.5)], [0.002, 0.0005], [1.2, 1.5]),
    "one that nothing slows": ([Tenant(0, 1.0), Tenant(1, 2.0)], [0.002, 0.0005], [1.0, 2.0]),
    "one that much slows": ([Tenant(0, 3.0), Tenant(1, 1.1)], [0.002, 0.0005], [3.0, 1.1]),
    "three cores": ([Tenant(core, 1.5) for core in range(3)], [0.002, 0.001, 0.0007], [2.0] * 3),
    "turns on one core, where nobody is on another": ([Tenant(0, 9.0), Tenant(0, 9.0)], [0.003, 0.001], [2.0, 2.0]),
}


@each("name", SLOWED)
def test_processes_beside_each_other_are_slowed_as_said(name):
    tenants, works, times_as_long = SLOWED[name]
    machine = SimulatedMachine()
    done = busy_for(machine, dict(zip(on(machine, *tenants), works, strict=True)), 20.0)
    assert [20.0 / seconds for seconds in done.values()] == pytest.approx(times_as_long, rel=0.001)


class Work(NamedTuple):
    """What a process computes, when it ends, and what is owed to processes then."""

    of: int  # its number
    start: float
    work_s: float
    ends: float
    help_part: float = 0.0
    owed: dict[int, float] = {}  # noqa: RUF012 - it is never changed


def broker() -> Tenant:
    return Tenant(0, has_model=False)


def drafter() -> Tenant:
    return Tenant(0, gives_way=True)


def helped_verifier(helped_stretch: float = 1.0, stretch: float = 1.0) -> Tenant:
    return Tenant(1, stretch, helper=Tenant(0, stretch), helped_stretch=helped_stretch)


def turns_with_a_helper(stretch: float) -> tuple[list[Tenant], list[Work]]:
    """A step of a second, half of it by the helper; the broker's tenth takes two there, and the step is owed half of
    the other. That others would slow it is no matter: a step is not slowed by its own helper."""
    works = [Work(1, 0.0, 1.0, 1.0, 0.5), Work(0, 0.5, 0.1, 0.7), Work(1, 1.0, 1.0, 2.05, 0.5)]
    return [broker(), helped_verifier(stretch=stretch)], works


SCHEDULES: dict[str, tuple[list[Tenant], list[Work]]] = {
    "alone, work takes its time": ([Tenant(0, stretch=3.0)], [Work(0, 5.0, 2.0, 7.0)]),
    # A second of work; half-way another begins half a second of its own, at half the pace of each until 1.0, the rest
    # alone: 0.25 are owed.
    "what begins later takes from what computes and owes it": (
        [Tenant(0, stretch=2.0), Tenant(1, stretch=2.0)],
        [Work(0, 0.0, 1.0, 1.0), Work(1, 0.5, 0.5, 1.25, owed={0: 0.25}), Work(0, 1.25, 1.0, 2.5, owed={0: 0.0})],
    ),
    # The broker computes at once; the drafter on its core gets what is left, in any order of starts.
    "who gives way stands still meanwhile": (
        [broker(), drafter()],
        [
            *(Work(1, 0.0, 1.0, 1.0), Work(0, 0.5, 0.2, 0.7, owed={1: 0.2}), Work(0, 1.0, 0.2, 1.2)),
            Work(1, 1.0, 1.0, 1.0 + 0.2 + 0.2 + 1.0),
        ],
    ),
    "what has no model slows no other core": (
        [broker(), Tenant(1, stretch=2.0)],
        [Work(0, 0.0, 1.0, 1.0), Work(1, 0.0, 1.0, 1.0)],
    ),
    "a helper takes turns with the broker on its core": turns_with_a_helper(1.0),
    "a helper takes turns, whatever others would slow": turns_with_a_helper(2.0),
    # While the broker computes, the helper does half of its half: three quarters of the pace.
    "a step does not wait for its helper": (
        [broker(), helped_verifier()],
        [Work(0, 0.0, 0.5, 0.5), Work(1, 0.0, 1.0, 0.5 + (1 - 0.375), 0.5)],
    ),
    "a step without help leaves the other core alone": (
        [broker(), drafter(), helped_verifier(9.0)],
        [Work(2, 0.0, 1.0, 1.0), Work(0, 0.0, 0.25, 0.25), Work(1, 0.25, 0.5, 0.75), Work(2, 1.0, 1.0, 2.0)],
    ),
    "a drafter gives way to a helper": (
        [drafter(), helped_verifier()],
        [Work(1, 0.0, 1.0, 1.0, 0.5), Work(0, 0.5, 0.25, 1.25)],
    ),
    "who would compute where a thread helps disturbs it": (
        [drafter(), helped_verifier(1.25)],
        [Work(0, 0.0, 9.0, 9.0), Work(1, 0.0, 1.0, 1.25, 0.5)],
    ),
}


@each("name", SCHEDULES)
def test_work_ends_when_it_should(name):
    tenants, works = SCHEDULES[name]
    machine = SimulatedMachine()
    on(machine, *tenants)
    for work in works:
        ends = machine.compute(tenants[work.of], work.start, work.work_s, help_part=work.help_part)
        assert ends == pytest.approx(work.ends), work
        assert {number: tenants[number].owed_s for number in work.owed} == pytest.approx(work.owed), work


def test_work_is_conserved_for_any_arrival_order():
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


def test_work_with_help_is_conserved():
    """The helper's core is shared half and half where the broker never rests, so the step goes on at 0.75 of its
    pace."""
    machine = SimulatedMachine()
    sharing, verifier = on(machine, broker(), helped_verifier())
    done = {sharing: 0.0, verifier: 0.0}
    while (tenant := min(done, key=lambda t: t.busy_until)).busy_until < 30.0:
        work, part = (0.001, 0.0) if tenant is sharing else (0.007, 0.5)
        machine.compute(tenant, tenant.busy_until, work, help_part=part)
        done[tenant] += work
    assert list(done.values()) == pytest.approx([15.0, 22.5], rel=0.005)


def test_an_ended_process_slows_no_other_process():
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
    """The real verifier chooses: without drafters its steps take 6 ms, with a good drafter in use 10."""
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
        verifier.control.follow_drafting()
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
    assert (
        "remote" not in simulation.world.processes[b"target-0"].worker.policy.used.sources
    )  # a probe may be under way
