"""Hostile drafters and overload, under a virtual clock: no text changes, and others pay no more than a share.

What a message costs the verifier is what `HostSettings` says. The real sockets' part is
tests/end_to_end/test_floods.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specq.broker import gate
from specq.broker.gate import BURST_S, DRAFTS_SHARE
from specq.broker.state.table import KEEP_FINISHED
from specq.protocol import REMOTE
from specq.protocol.messages import Assign, Draft, Heartbeat, Hello, Release, Verdict
from specq.protocol.params import Speculation
from specq.protocol.wire import Frames, decode, encode
from specq.simulate.machine import LineSettings
from specq.simulate.settings import HostSettings
from specq.testing.toy import VOCAB, ToyEngine, toy_info, toy_text
from specq.testing.toy_drafters import ToyProposer
from specq.testing.world import World

EVIL = b"evil"
HOST = HostSettings(broker_us=10)
PROMPT = [5, 6, 7]


class Evil:
    """A drafter that registers as it should, receives all that a drafter receives, and then sends what it likes."""

    def __init__(self, world: World) -> None:
        self.world, self.random = world, np.random.default_rng(0)
        self.known: dict[int, Assign] = {}
        self.lengths: dict[int, int] = {}
        self.num_sent = 0
        world.simulated.add_client(EVIL, self._hear, LineSettings(0.0002))
        model = replace(toy_info(), fingerprint="evil")
        self._say(Hello(role="draft", name="evil", incarnation=666, model=model))
        self._beat()

    def _say(self, message: Hello | Heartbeat) -> None:
        self.world.simulated.send(EVIL, message)

    def _beat(self) -> None:
        sessions = list(self.known)
        self._say(
            Heartbeat(
                incarnation=666,
                state="ready",
                steps=self.num_sent,
                session_ids=np.array(sessions, np.int64),
                epochs=np.array([self.known[i].epoch for i in sessions], np.int64),
                lengths=np.array([self.lengths[i] for i in sessions], np.int32),
            )
        )
        self.world.at(0.25, self._beat)

    def _hear(self, frames: Frames) -> None:
        message = decode(frames)
        if isinstance(message, Assign):
            self.known[message.session_id] = message
            self.lengths[message.session_id] = len(message.token_ids)
        elif isinstance(message, Verdict) and message.session_id in self.lengths:
            self.lengths[message.session_id] = message.base_len + len(message.token_ids)
        elif isinstance(message, Release):
            self.known.pop(message.session_id, None)

    def send(self, known_as: int, num_nodes: int, **changes: object) -> None:
        """Send a chain of random tokens that claims to be certain; `changes` are other fields of the draft."""
        known = self.known[known_as]
        first = 1000 * self.num_sent
        parents = np.arange(first - 1, first + num_nodes - 1)
        parents[0] = -1
        values = {
            "session_id": known_as,
            "epoch": known.epoch,
            "lane": known.lane,
            "base_len": self.lengths[known_as],
            "first_id": first,
            "token_ids": self.random.integers(1, VOCAB, num_nodes),
            "parent_ids": parents,
            "scores": np.zeros(num_nodes),
        }
        self.num_sent += 1
        simulated = self.world.simulated
        simulated.queue.at(
            self.world.now,
            simulated._broker_takes,
            self.world.broker.from_front,
            EVIL,
            encode(Draft(**values | changes)),
            1,
        )

    def flood(self, session_id: int, num_nodes: int, a_second: int, seconds: float) -> None:
        """Send drafts at this rate a second."""
        for number in range(int(a_second * seconds)):
            self.world.at(number / a_second, lambda: session_id in self.known and self.send(session_id, num_nodes))

    def attack(self) -> None:
        """Send one of each kind of attack, for each session."""
        others = list(self.known)
        for session_id in others:
            known, length = self.known[session_id], self.lengths[session_id]
            right = toy_text([*PROMPT, *self.world.received[session_id].token_ids], 1)[0]
            distributions = {
                "q_size": 2,
                "q_ids": np.array([right, 1 + right % 9]),
                "q_weights": np.array([1, 65535]),
                "q_rows": np.zeros(1),
            }
            self.send(session_id, 8)  # random tokens, false scores
            self.send(session_id, 500)  # a huge tree
            self.send(session_id, 1, token_ids=np.array([right]), first_id=2**40)  # right, but under an impossible name
            self.send(
                session_id, 1, token_ids=np.array([right]), **distributions
            )  # a distribution that it was not drawn from
            self.send(session_id, 2, base_len=length + 5)
            self.send(session_id, 2, base_len=-7)
            self.send(session_id, 2, lane=known.lane ^ 1)  # another's lane
            self.send(session_id, 2, epoch=known.epoch + 1)
            self.send(session_id, 2, session_id=others[0])  # another session, in this one's lane and epoch
        if self.known:
            self.world.at(0.02, self.attack)


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["async", "sync", "jit"])
def test_no_attack_changes_a_text(mode):
    """Random tokens, false scores and distributions, huge trees, forged lanes, epochs, sessions and positions, beside
    an honest drafter or instead of one."""
    world = World(host=HOST)
    verifier = world.add_verifier()
    world.add_drafter(proposer=ToyProposer(wrong_every=5))
    evil = Evil(world)
    world.run(0.1)
    texts = [
        world.submit(job_id, [*PROMPT[:2], job_id], max_tokens=60, speculation=Speculation(mode=mode))
        for job_id in range(1, 5)
    ]
    world.run(0.05)
    assert set(evil.known) == {1, 2, 3, 4}
    evil.attack()
    world.run_until(lambda: all(text.finish for text in texts), 30.0)
    assert [text.token_ids for text in texts] == [toy_text([*PROMPT[:2], job_id], 60) for job_id in range(1, 5)]
    assert evil.num_sent > 100
    assert verifier.sources.num_sent[REMOTE] > evil.num_sent
    assert world.simulated.processes[b"v0"].num_dropped > 20
    assert world.broker.state.counts["dropped_front"] > 20


# --- shares -----------------------------------------------------------------------------------------------------------


def others_goodput(*, flooded: bool, num_jobs: int = 4, seconds: float = 0.4) -> float:
    """Return tokens a second of all jobs but the first, which alone is drafted for, by a hostile drafter."""
    world = World(host=HOST)
    world.add_verifier()
    evil = Evil(world)
    world.run(0.1)
    world.submit(1, PROMPT, max_tokens=1500)
    for job_id in range(2, num_jobs + 1):
        world.submit(job_id, PROMPT, max_tokens=1500, speculation=Speculation(mode="plain"))
    world.run(0.2)
    assert list(evil.known) == [1]
    jobs = world.broker.state.jobs.active
    before = [len(jobs[job_id].transcript.token_ids) for job_id in range(2, num_jobs + 1)]
    if flooded:
        evil.flood(1, 16, 10_000, seconds)
    world.run(seconds)
    after = [len(jobs[job_id].transcript.token_ids) for job_id in range(2, num_jobs + 1)]
    text = jobs[1].transcript.token_ids
    assert text == toy_text(PROMPT, len(text)), "the flood changed the text that it was for"
    return (sum(after) - sum(before)) / seconds


PROBES_SHARE = 0.05  # of so short a time, that the verifier spends on trying the flood's drafts


def test_a_flood_costs_others_no_more_than_a_share():
    """Ten thousand drafts a second for one of four sessions take an eighth of the verifier's time, not all of it."""
    calm, flooded = others_goodput(flooded=False), others_goodput(flooded=True)
    share = DRAFTS_SHARE / 4 * (1 + BURST_S / 0.4)
    assert flooded > (1 - share - PROBES_SHARE) * calm
    assert flooded < 0.99 * calm, "the flood should have cost something, or nothing is tested"


def test_without_limits_a_flood_would_cost_them_half(monkeypatch):
    """The test above fails for a broker without limits."""
    monkeypatch.setattr(gate, "admit_draft", lambda *_: True)
    assert others_goodput(flooded=True) < 0.5 * others_goodput(flooded=False)


# --- overload ---------------------------------------------------------------------------------------------------------


class SlowToy(ToyEngine):
    """A toy engine with the steps of a large model."""

    def step_times(self, sizes):
        return [0.05 + 0.0005 * size for size in sizes]


@pytest.mark.slow
def test_ten_times_overload_for_a_minute():
    """The queue stays as long as it may be, each refusal says why, and what was taken is done right, at full speed."""
    world = World(host=HOST, max_jobs=50)
    world.add_verifier(engine=SlowToy(), max_sessions=8)
    world.run(0.1)
    arrivals_s, seconds = 150, 60  # of jobs of 10 tokens; 8 sessions at 54 ms a step do 15 a second
    sizes = []
    for number in range(arrivals_s * seconds):
        world.at(
            number / arrivals_s, lambda job_id=number + 1: world.submit(job_id, [5, 6, 1 + job_id % 40], max_tokens=10)
        )
    for second in range(seconds):
        world.at(second, lambda: sizes.append(len(world.broker.state.jobs.active)))
    world.run(seconds)
    world.run_until(lambda: not world.broker.state.jobs.active, 60.0)
    world.run(1.0)
    done = {job_id: one for job_id, one in world.received.items() if one.finish}
    refused = [one.failed for one in world.received.values() if one.failed]
    assert len(done) + len(refused) == arrivals_s * seconds
    assert {(one.code, one.reason) for one in refused} == {
        ("busy", "the queue is full (50 jobs); try again when some have finished")
    }
    assert all(one.token_ids == toy_text([5, 6, 1 + job_id % 40], 10) for job_id, one in done.items())
    assert len(done) > 0.9 * 8 / 0.0545 / 10 * seconds
    state = world.broker.state
    assert max(sizes) <= 50
    assert len(state.jobs.finished) <= KEEP_FINISHED
    assert (len(state.limits._peers), state.jobs.num_tokens, dict(state.jobs.held)) == (2, 0, {})
