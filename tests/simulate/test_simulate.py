"""Whole scenarios: the real broker, verifiers and drafters, on stub hardware, under a virtual clock."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from specq.protocol.errors import EngineError
from specq.protocol.params import Speculation
from specq.protocol.types import Judgement
from specq.simulate import Scenario, simulate
from specq.simulate.run import Simulation
from specq.simulate.settings import DrafterSettings, EngineSettings, HostSettings, NetworkSettings, TrafficSettings
from specq.simulate.stubs import TimedEngine

T_S = 0.025
NO_HOST = HostSettings(broker_us=0, draft_us=0, graft_us=0, verdict_us=0, plan_us=0, hear_us=0, send_us=0)
FLAT = EngineSettings(step_ms=((1, 25.0), (154, 25.0), (308, 50.0)), session_us=0)
USELESS = DrafterSettings(acceptance=(0.0,), ranks=(0.0,), claims=(0.8,))


def scenario(mode: str = "async", **sections: object) -> Scenario:
    """A few seconds of one session on a quiet machine; RTT 20 ms, acceptance 0.8."""
    quiet = Scenario(
        engine=FLAT,
        host=NO_HOST,
        network=NetworkSettings(rtt_ms=20),
        traffic=TrafficSettings(warm_s=1, seconds=6),
        speculation=Speculation(mode=mode),
    )
    return replace(quiet, **sections)


@pytest.fixture(scope="module")
def run():
    """Simulate, once for each scenario."""
    known = {}

    def figures(one: Scenario):
        if one not in known:
            known[one] = simulate(one)
        return known[one]

    return figures


# --- plain decoding -----------------------------------------------------------------------------------------------


def test_plain_decoding_takes_a_step_a_token(run):
    """One session: 1/T, but for the step that computes the prompt."""
    figures = run(scenario("plain"))
    assert figures.goodput == pytest.approx(1 / T_S, rel=0.01)
    assert figures.token_ms.p50 == pytest.approx(25, rel=0.001)
    assert (figures.mean_accepted_length, figures.draft_tokens, figures.drafted) == (1.0, 0, 0)
    assert figures.engine_load == pytest.approx(1.0, abs=0.01)


def test_hosts_and_sessions_add_their_time(run):
    """8 sessions: a step takes T + 8 * (session + plan + verdict); the broker, which works meanwhile, adds none."""
    engine = replace(FLAT, session_us=100)
    host = replace(NO_HOST, plan_us=50, verdict_us=350, broker_us=100)
    traffic = TrafficSettings(sessions=8, prompt_tokens=1, output_tokens=100, warm_s=1, seconds=10)
    figures = run(scenario("plain", engine=engine, host=host, traffic=traffic))
    assert figures.goodput == pytest.approx(8 / (T_S + 8 * 0.0005), rel=0.01)


def test_a_step_takes_its_time_by_the_verifiers_own_clock():
    """The clock moves while the engine computes: verdicts report steps of 25 ms."""
    simulation = Simulation(scenario("plain"))
    simulation.run(drain=False)
    stats = simulation.users.finished[-1].stats
    assert stats["forward_us"] / stats["rounds"] == pytest.approx(25_000, rel=0.001)


def test_verifiers_share_the_sessions(run):
    """Where rows cost, two verifiers do twice as much."""
    traffic = TrafficSettings(sessions=16, prompt_tokens=1, warm_s=1, seconds=4)
    one, two = (
        run(scenario("plain", traffic=traffic, engine=EngineSettings(verifiers=n, step_ms=((1, 5.0), (100, 500.0)))))
        for n in (1, 2)
    )
    assert two.goodput / one.goodput == pytest.approx(2.0, rel=0.05)


# --- conservation and determinism ---------------------------------------------------------------------------------


@pytest.mark.parametrize("network", [NetworkSettings(rtt_ms=30), NetworkSettings(rtt_ms=30, loss=0.1, jitter_ms=20)])
def test_every_job_ends_with_all_of_its_tokens(network):
    """Each text is compared with the target's own; drafts were accepted, rejected and stale on the way."""
    traffic = TrafficSettings(sessions=4, num_jobs=12, output_tokens=50, warm_s=0, seconds=1)
    draft = DrafterSettings(drafters=2)
    simulation = Simulation(scenario(traffic=traffic, network=network, draft=draft))
    figures = simulation.run(drain=True)
    assert figures.in_flight > 0
    assert sorted(job.job_id for job in simulation.users.finished) == list(range(1, 13))
    assert {job.num_tokens for job in simulation.users.finished} == {50}
    assert simulation.counts().accepted > 0
    assert simulation.counts().nodes > simulation.counts().accepted
    assert sum(job.stats["stale"] for job in simulation.users.finished) > 0


def test_a_wrong_text_ends_the_simulation(monkeypatch):
    """An engine that accepts what the target does not say is found out."""
    judge = TimedEngine._judge

    def lenient(self, step):
        judgement = judge(self, step)
        if step.tree.num_nodes and not judgement.path:
            tokens = np.concatenate([step.tree.token_ids[:1], judgement.token_ids])
            return Judgement(step.session_id, (0,), tokens)
        return judgement

    monkeypatch.setattr(TimedEngine, "_judge", lenient)
    with pytest.raises(EngineError, match="not all the target's own"):
        simulate(scenario())


def test_a_failed_job_ends_the_simulation():
    small = replace(FLAT, kv_slots=50)
    with pytest.raises(EngineError, match="KV slots"):
        simulate(scenario(engine=small))


def test_random_arrivals_are_the_seeds():
    traffic = TrafficSettings(jobs_per_s=5.0, output_tokens=10, warm_s=0, seconds=2)
    runs = [simulate(scenario("plain", traffic=replace(traffic, seed=seed))) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_the_same_scenario_gives_the_same_figures():
    """To the last digit, and in another process with other hashes; another seed gives others."""
    traffic = TrafficSettings(sessions=2, warm_s=0.2, seconds=1, seed=4)
    network = NetworkSettings(rtt_ms=20, jitter_ms=5, loss=0.02)
    one = scenario(traffic=traffic, network=network)
    figures = simulate(one).to_dict()
    assert simulate(one).to_dict() == figures
    assert simulate(replace(one, traffic=replace(traffic, seed=5))).to_dict() != figures
    program = (
        "import json\nfrom specq.simulate import *\nfrom specq.simulate.settings import *\n"
        f"from specq.protocol.params import Speculation\nprint(json.dumps(simulate({one!r}).to_dict()))"
    )
    other = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, env={"PYTHONHASHSEED": "7"}
    )
    assert json.loads(other.stdout.splitlines()[-1]) == json.loads(json.dumps(figures))


# --- speculation --------------------------------------------------------------------------------------------------


def test_running_ahead_beats_waiting_over_a_slow_network(run):
    """At 50 ms, for an acceptance of 0.8: at least 1.4 times sync, which is near plain decoding, and hits occur."""
    network = NetworkSettings(rtt_ms=50)
    plain, sync, ahead = (run(scenario(mode, network=network)) for mode in ("plain", "sync", "async"))
    assert ahead.goodput > 1.4 * sync.goodput
    assert ahead.goodput > 1.5 * plain.goodput
    assert ahead.hits > 0
    assert ahead.accepted_tokens > 0
    assert ahead.wasted_rows > 0
    assert ahead.stale > 0


@pytest.mark.parametrize("rtt_ms", [1, 200])
@pytest.mark.parametrize("sessions", [1, pytest.param(16, marks=pytest.mark.slow)])
def test_a_useless_drafter_has_almost_no_cost(run, rtt_ms, sessions):
    """It claims 0.8 and is never right; hosts take their usual time."""
    network, traffic = NetworkSettings(rtt_ms=rtt_ms), TrafficSettings(sessions=sessions, warm_s=2, seconds=6)
    parts = {"host": HostSettings(), "network": network, "traffic": traffic, "draft": USELESS}
    plain, drafted = (run(scenario(mode, **parts)) for mode in ("plain", "async"))
    assert drafted.accepted_tokens == 0
    assert drafted.goodput > 0.98 * plain.goodput


@pytest.mark.slow
def test_acceptance_pays(run):
    """The better the drafter, the more tokens a second; all more than plain decoding."""
    rates = [run(scenario(draft=DrafterSettings(acceptance=(a,)))).goodput for a in (0.3, 0.6, 0.9)]
    assert 1.02 / T_S < rates[0] < rates[1] < rates[2]


@pytest.mark.slow
def test_a_narrow_line_costs(run):
    """5 kbit/s carry a few drafts a second; the session goes on without them."""
    plain, narrow, wide = (
        run(scenario(mode, network=NetworkSettings(rtt_ms=5, bandwidth_mbit=mbit)))
        for mode, mbit in (("plain", 0), ("async", 0.005), ("async", 0))
    )
    assert 0.98 * plain.goodput < narrow.goodput < 0.7 * wide.goodput


def test_two_models_on_one_session_draft_more_than_one(run):
    """Each is right where the other may be wrong; two drafters of one model share the sessions instead."""
    draft = DrafterSettings(drafters=2, acceptance=(0.5,), ranks=(0.0,))
    alike, unlike = (run(scenario(draft=replace(draft, models=n), network=NetworkSettings(rtt_ms=5))) for n in (1, 2))
    assert unlike.goodput > 1.05 * alike.goodput


# --- traffic ------------------------------------------------------------------------------------------------------


def test_open_load_is_served_as_it_comes(run):
    """Two jobs a second of 20 tokens each; all of them measured, and fewer where fewer come."""
    traffic = TrafficSettings(jobs_per_s=2.0, output_tokens=20, warm_s=2, seconds=60)
    figures = run(scenario("plain", traffic=traffic))
    assert figures.goodput == pytest.approx(40, rel=0.2)
    assert figures.jobs == pytest.approx(120, rel=0.2)
    assert figures.job_ms.p50 == pytest.approx(20 * 25 + 25, rel=0.1)


@pytest.mark.slow
def test_jobs_wait_until_a_session_is_free(run):
    """Beyond the verifier's sessions, the time to the first token grows, and the rate does not."""
    engine = replace(FLAT, max_sessions=4)
    few, many = (
        run(scenario("plain", engine=engine, traffic=TrafficSettings(sessions=n, output_tokens=20, warm_s=2)))
        for n in (4, 12)
    )
    assert many.goodput == pytest.approx(few.goodput, rel=0.05)
    assert many.time_to_first_token_ms.p50 > 2 * 20 * 25
    assert few.time_to_first_token_ms.p95 < 4 * 25
