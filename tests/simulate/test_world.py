"""When things happen in a simulated world, to the microsecond."""

from dataclasses import replace

import pytest

from specq.protocol import SUFFIX
from specq.protocol.messages import Ack, Assign, Close, Draft, Open, Verdict
from specq.protocol.params import Speculation
from specq.simulate.run import Simulation
from specq.simulate.settings import (
    DrafterSettings,
    EngineSettings,
    HostSettings,
    NetworkSettings,
    Scenario,
    TrafficSettings,
)
from tests.each import each

HOST = HostSettings(
    broker_us=1000, draft_us=2000, graft_us=100, verdict_us=3000, plan_us=4000, hear_us=5000, send_us=6000
)


def scenario(**sections: object) -> Scenario:
    """One session; 40 ms between all near processes, 200 ms to the drafter; a step of 25 ms, a pass of 10; no beats."""
    usual = Scenario(
        engine=EngineSettings(step_ms=((1, 25.0),), session_us=500),
        draft=DrafterSettings(pass_ms=((1, 10.0),), fan_out=2),
        network=NetworkSettings(rtt_ms=200, near_rtt_ms=40, heartbeat_ms=10_000),
        host=HOST,
        traffic=TrafficSettings(prompt_tokens=1, output_tokens=1000, warm_s=0, seconds=3),
    )
    return replace(usual, **sections)


def heard(simulation: Simulation, identity: bytes) -> list[tuple[float, object]]:
    """Return a list that will hold (when, what) a worker handles."""
    process, found = simulation.world.processes[identity], []
    handle = process.worker.handle

    def spy(message, *stamp):
        found.append((process.ready_at, message))
        return handle(message, *stamp)

    process.worker.handle = spy
    return found


def first(found: list[tuple[float, object]], kind: type) -> tuple[float, object]:
    return next((time, message) for time, message in found if isinstance(message, kind))


@each("client_ms", [0, 7])
def test_a_plain_token_takes_its_way(client_ms):
    """Client to broker to verifier and back, 20 ms each; the broker twice, a step with its planning, a verdict; and
    what the client takes for a message."""
    host, traffic = replace(HOST, client_us=1000 * client_ms), TrafficSettings(prompt_tokens=1, output_tokens=4)
    figures = Simulation(scenario(speculation=Speculation(mode="plain"), traffic=traffic, host=host)).run(drain=False)
    step = 25 + 0.5 + 4 + 3
    assert figures.time_to_first_token_ms.p50 == pytest.approx(4 * 20 + 2 * 1 + step + client_ms)
    assert client_ms or figures.token_ms.p50 == pytest.approx(step)


def test_verdicts_that_travel_together_take_as_long_as_each_alone():
    """Of 8 sessions in a step: 8 times 3 ms at the verifier, 8 times 1 at the broker, one message on the line."""
    traffic = TrafficSettings(sessions=8, prompt_tokens=1, output_tokens=1000, warm_s=0, seconds=3)
    simulation = Simulation(scenario(speculation=Speculation(mode="plain"), traffic=traffic))
    taken = noted_work(simulation)
    figures = simulation.run(drain=False)
    step = 25 + 8 * 0.5 + 8 * 4 + 8 * 3
    assert figures.goodput == pytest.approx(8 / step * 1e3, rel=0.08)
    (up, _), engine = simulation.world.lines[b"target-0"], simulation.engines[0]
    assert up.num_messages < engine.num_steps + 12
    assert taken[-1] == pytest.approx(0.008)


def test_what_is_looked_up_takes_its_time():
    """5 ms for each node of a text that repeats itself, beside steps of 25: as many fewer steps as they take."""
    texts = [([3, 4], [11, 12, 13, 14, 15, 16, 17, 18] * 16)]
    traffic = TrafficSettings(output_tokens=128, num_jobs=1)
    free = HostSettings(broker_us=0, verdict_us=0, plan_us=0)
    seconds, nodes = [], []
    usual = scenario(traffic=traffic, draft=DrafterSettings(drafters=0), network=NetworkSettings())
    for host in (free, replace(free, lookup_us=5000)):
        simulation = Simulation(replace(usual, host=host), texts)
        seconds.append(simulation.run_jobs(traffic, Speculation()))
        nodes.append(simulation.metrics()["sent"][SUFFIX])
    assert nodes[1] > 50
    assert seconds[1] - seconds[0] == pytest.approx(0.005 * nodes[1], rel=0.1)


def noted_work(simulation: Simulation) -> list[float]:
    """Return a list that will hold the seconds that the broker computes for each message."""
    world, found = simulation.world, []
    compute = world._machine.compute

    def noted(tenant, start, work_s, **options):
        if tenant is world._broker_at:
            found.append(work_s)
        return compute(tenant, start, work_s, **options)

    world._machine.compute = noted
    return found


def test_drafts_and_verdicts_take_theirs():
    """Assign: 100 ms down. A pass of 10 ms, 6 to send, 100 up, 1 at the broker, 20 to the verifier, which is done with
    it 2 ms and 0.1 for each node later, or after the step that it is in.

    A verdict: a step, 20 ms to the broker, 1 there, 100 down; 5 to take it in, once the pass is done that it finds."""
    simulation = Simulation(scenario())
    at_verifier, at_drafter = heard(simulation, b"target-0"), heard(simulation, b"draft-0")
    simulation.run(drain=False)
    opened, _ = first(at_verifier, Open)
    assigned, _ = first(at_drafter, Assign)
    assert assigned - opened == pytest.approx(0.080)  # both left the broker together
    drafted, draft = first(at_verifier, Draft)
    arrived = assigned + 0.010 + 0.006 + 0.100 + 0.001 + 0.020
    step = 0.025 + 0.0005 + 0.004 + 0.003
    busy_until = opened + step * (int((arrived - opened) / step) + 1)
    assert drafted == pytest.approx(busy_until + 0.002 + 0.0001 * len(draft.token_ids), abs=1e-9)
    told, verdict = first(at_drafter, Verdict)
    arrived = opened + 0.0325 + 0.020 + 0.001 + 0.100
    assert verdict.base_len == 1
    assert arrived + 0.005 - 1e-9 <= told <= arrived + 0.005 + 0.016 + 1e-9


def test_a_dead_worker_receives_and_sends_no_messages():
    """Killed without a word, it loses its sessions after a while; a job that has no verifier waits."""
    simulation = Simulation(scenario(network=NetworkSettings(heartbeat_ms=500)))
    world = simulation.world
    world.queue.run(1.0)
    simulation.users.start()
    world.queue.run(1.0)
    at_verifier = heard(simulation, b"target-0")
    steps = simulation.engines[0].num_steps
    world.kill(b"target-0")
    world.queue.run(10.0)
    assert at_verifier == []
    assert simulation.engines[0].num_steps == steps
    assert [job.session.verifier for job in world.broker.state.jobs.active.values()] == [b""]


def test_only_the_drafters_lines_lose_messages():
    network = NetworkSettings(rtt_ms=5, loss=0.2)
    simulation = Simulation(scenario(network=network, traffic=TrafficSettings(output_tokens=50, seconds=5)))
    simulation.run(drain=True)
    lost = {name: [line.num_lost for line in lines] for name, lines in simulation.world.lines.items()}
    assert min(lost[b"draft-0"]) > 0
    assert {count for name, counts in lost.items() for count in counts if name != b"draft-0"} == {0}


def test_workers_send_heartbeats_and_receive_commits():
    simulation = Simulation(scenario(network=NetworkSettings(heartbeat_ms=500)))
    at_verifier = heard(simulation, b"target-0")
    simulation.run(drain=False)
    beats = [time for time, message in at_verifier if isinstance(message, Ack)]
    assert 3 <= len(beats) <= 8
    assert not any(isinstance(message, Close) for _, message in at_verifier)
