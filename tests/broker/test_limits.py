"""What one peer may take up: by rate, by bytes, by share; and that all else goes on."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from specq.broker import Broker, Find, Send
from specq.broker.gate import BURST_S, DRAFT_US, DRAFTS_SHARE, MAX_DRAFT_NODES, NODE_US
from specq.broker.jobs import intake, lookup
from specq.broker.state import rights
from specq.broker.state.rights import REQUEST_BYTES, REQUESTS_BURST, REQUESTS_S, Bucket, Limits
from specq.broker.workers import tokenizers
from specq.protocol.messages import (
    Accepted,
    Ack,
    Assign,
    Cancel,
    Draft,
    Failed,
    FetchTokenizer,
    Follow,
    GetStatus,
    Heartbeat,
    Hello,
    Message,
    Status,
    Submit,
    TokenizerChunk,
    Verdict,
)
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.testing.toy import toy_info
from specq.transport.keys import Grant
from tests.broker.desk import ANN, VERIFIER, Desk


class Bench(Desk):
    """A desk with drafters that draft."""

    def __init__(self, drafters: int = 1, **options: object) -> None:
        super().__init__(max_sessions=100, drafters_per_job=drafters, **options)
        self.counts = self.broker.state.counts
        self.num_ids, self.lanes = Counter[tuple[bytes, int]](), dict[tuple[bytes, int], Assign]()
        for number in range(drafters):
            self.add_drafter(b"d%d" % number)

    def start(self, *job_ids: int) -> None:
        """Submit long jobs."""
        for job_id in job_ids:
            self.submit(job_id, max_tokens=1000)

    def wait(self, seconds: float) -> None:
        """Let time pass, at the end of which the verifier is alive."""
        self.now += seconds
        self.broker.state.workers.get(VERIFIER).last_seen = self.now

    def assigned(self, drafter: bytes, job_id: int) -> Assign:
        return next(one for one in reversed(self.received(drafter, Assign)) if one.session_id == job_id)

    def draft(self, job_id: int, num_nodes: int = 4, drafter: bytes = b"d0", **changes: object) -> bool:
        """Let a drafter send a chain; return whether it is passed on."""
        to, first = self.lanes.get((drafter, job_id)), self.num_ids[drafter, job_id]
        if to is None:
            to = self.lanes[drafter, job_id] = self.assigned(drafter, job_id)
        self.num_ids[drafter, job_id] += num_nodes
        parents = np.arange(first - 1, first + num_nodes - 1)
        parents[:1] = -1
        draft = Draft(
            session_id=job_id, epoch=to.epoch, lane=to.lane, base_len=2, first_id=first, token_ids=np.ones(num_nodes),
            parent_ids=parents, scores=np.zeros(num_nodes), **changes,
        )  # fmt: skip
        return bool(self.broker.from_front(drafter, encode(draft), self.now))

    def flood(self, job_id: int, seconds: float, drafter: bytes = b"d0", num_nodes: int = 4) -> int:
        """Let a drafter send 20,000 drafts a second, while the verifier is alive; return how many are passed on."""
        passed = 0
        for _ in range(int(seconds * 20_000)):
            self.wait(1 / 20_000)
            passed += self.draft(job_id, num_nodes, drafter)
        return passed


# --- the bucket -------------------------------------------------------------------------------------------------------


def test_a_bucket_gives_its_rate_after_its_burst():
    """At a cost of 2, a rate of 10 and a burst of 20: ten at once, then five a second, however long it rested
    before."""
    bucket = Bucket(20.0, 0.0)
    assert [bucket.take(2, 10, 20, 0.0) for _ in range(11)] == [True] * 10 + [False]
    assert sum(bucket.take(2, 10, 20, tick / 128) for tick in range(1, 513)) == 20
    assert sum(bucket.take(2, 10, 20, 1000.0) for _ in range(100)) == 10
    assert not bucket.take(2, 10, 20, 900.0), "time that runs backwards fills nothing"


def test_what_is_larger_than_a_bucket_passes_a_full_one():
    """And is paid for afterwards."""
    bucket = Bucket(20.0, 0.0)
    assert bucket.take(50, 10, 20, 0.0)
    assert [bucket.take(1, 10, 20, t) for t in (1.0, 2.9, 3.2)] == [False, False, True]


def test_a_message_of_any_cost_passes_while_credit_is_left():
    """As long as anything is left; then not before that is paid for."""
    for cost in (1, 50):
        bucket = Bucket(20.0, 0.0)
        assert [bucket.spend(19, 10, 20, 0.0), bucket.spend(cost, 10, 20, 0.0), bucket.spend(1, 10, 20, 0.0)] == [
            True,
            True,
            False,
        ]
        assert [bucket.spend(1, 10, 20, t) for t in ((cost - 2) / 10, (cost + 2) / 10)] == [False, True]


# --- drafts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_jobs", "drafters"), [(1, 1), (4, 1), (1, 2)])
def test_a_flood_of_drafts_takes_its_share_of_the_verifier(num_jobs, drafters):
    """Half of the verifier's time among all its jobs and their lanes: a flood for one of four jobs gets an eighth."""
    bench = Bench(drafters)
    bench.start(*range(1, num_jobs + 1))
    passed = bench.flood(1, 1.0)
    spent_s = passed * (DRAFT_US + 4 * NODE_US) / 1e6
    share = DRAFTS_SHARE / (num_jobs * drafters)
    assert 0.8 * share < spent_s < share * (1.1 + BURST_S)
    assert bench.counts["limited_drafts"] > 5_000


def test_a_flood_does_not_affect_other_lanes():
    """Neither from those of other jobs nor from the other lane of the same job."""
    bench = Bench(drafters=2)
    bench.start(1, 2)
    bench.flood(1, 0.7, b"d0")
    assert bench.counts["limited_drafts"] > 1_000
    assert all(bench.draft(job_id, 8, b"d1") for job_id in (1, 2))
    assert bench.draft(2, 8, b"d0")


def test_honest_drafting_is_not_limited():
    """64 sessions, each with 24 draft nodes for each of 40 steps a second."""
    bench = Bench()
    bench.start(*range(1, 65))
    for _ in range(40):
        bench.wait(1 / 40)
        assert all(bench.draft(job_id, 8) for job_id in range(1, 65))
    assert bench.counts["limited_drafts"] == 0


def test_huge_trees_are_dropped():
    """A tree larger than a session can hold takes no time to read. Neither do unbounded distributions."""
    bench = Bench()
    bench.start(1)
    assert not bench.draft(1, MAX_DRAFT_NODES + 1)
    assert bench.draft(1, MAX_DRAFT_NODES)
    bench.wait(60)
    many = np.zeros(300_000)
    assert not bench.draft(1, 1, q_size=300_000, q_ids=many, q_weights=many, q_rows=np.zeros(1))
    assert bench.counts["limited_drafts"] == 2


def test_messages_do_not_pile_up_for_a_silent_verifier():
    """Drafts are dropped first. After three heartbeats only mandatory messages are sent to it."""
    bench = Bench()
    bench.start(1)
    bench.now += bench.broker.state.settings.quiet_s + 0.01
    assert not bench.draft(1)
    bench.start(2)
    bench.sent.clear()
    bench.front(VERIFIER, Heartbeat(incarnation=1, state="ready"))
    assert bench.received(VERIFIER, Ack) == []
    assert bench.draft(1)


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_flood_of_requests_is_one_peers_own():
    """It gets the burst and the rate; another peer's first request is answered at once."""
    bench = Bench()
    answered = sum(bool(bench.front(b"flood", GetStatus())) for _ in range(int(REQUESTS_BURST) + 5000))
    assert REQUESTS_BURST * 0.5 < answered <= REQUESTS_BURST
    assert bench.front(b"flood", GetStatus()) == []
    assert isinstance(bench.front(b"other", GetStatus())[0], Status)
    bench.now += 1.0
    again = sum(bool(bench.front(b"flood", GetStatus())) for _ in range(10_000))
    assert 0 < again <= REQUESTS_S
    assert bench.counts["limited_requests"] > 5000


def test_answers_count():
    """Who asks for much and reads nothing cannot fill the broker's memory: bytes are paid for, a burst at first."""
    limit, sent, size = Limits(), 0, 1 << 20
    for millisecond in range(60_000):
        if limit.admit_request("greedy", 100, millisecond / 1000):
            limit.charge_answer("greedy", size)
            sent += size
    assert sent < (REQUESTS_BURST + 60 * REQUESTS_S) * REQUEST_BYTES + size
    assert limit.admit_request("modest", 100, 60.0)


@pytest.fixture
def crowded(monkeypatch):
    """A broker that has many jobs; what a peer may ask at once is little."""
    monkeypatch.setattr(rights, "REQUESTS_BURST", 500.0)
    monkeypatch.setattr(Broker, "validates", False)  # it looks at each job after each message
    bench = Bench(max_jobs=10_000)
    for job_id in range(1, 2001):
        bench.now += 0.01
        bench.start(job_id)
    return bench


def num_answered(bench: Bench, who: bytes, sessions: int) -> int:
    """Return how many of many questions at once are answered."""
    return sum(bool(bench.front(who, GetStatus(sessions=sessions))) for _ in range(500))


def test_a_report_costs_what_it_takes_to_look_at_all_jobs(crowded):
    """However little it then says; else a peer could occupy the broker with questions."""
    free = num_answered(Bench(), b"flood", 0)
    looked, listed = num_answered(crowded, b"one", 0), num_answered(crowded, b"two", 1)
    assert looked < 0.6 * free
    assert listed < 0.5 * looked


def test_workers_pay_for_what_they_ask(crowded):
    """A worker, too, gets its share of answers, and not more because it is one."""
    of_client, of_worker = (num_answered(crowded, who, 1000) for who in (b"ann2", b"d0"))
    assert of_worker == pytest.approx(of_client, rel=0.1)
    assert of_client < 50


def test_those_who_wait_are_bounded(monkeypatch):
    """For a tokenizer that its verifier does not send, and for a journal that does not answer."""
    monkeypatch.setattr(tokenizers, "MAX_WAITING", 3)
    monkeypatch.setattr(lookup, "MAX_ASKING", 4)
    bench = Bench(has_journal=True)
    for number in range(10):
        for message in (FetchTokenizer(), Follow(job_id=1), Cancel(job_id=1)):
            bench.front(b"client %d" % number, message)
    bench.sent.clear()
    bench.back(TokenizerChunk(model=toy_info(), index=0, count=1, data=np.ones(3)))
    assert len(bench.received(b"", TokenizerChunk)) == 3
    bench.found(Find(1), ANN)
    assert len(bench.received(b"", Failed)) == 2  # half of the kept messages are cancels


def test_counting_is_bounded(monkeypatch):
    monkeypatch.setattr(rights, "MAX_PEERS", 10)
    limit = Limits()
    for number in range(100):
        assert limit.admit_request(f"peer {number}", 10, 0.0)
    assert len(limit._peers) == 10


def test_a_worker_with_many_replies_stays_registered(monkeypatch):
    """What it is sent in answer to its heartbeats is not its debt."""
    monkeypatch.setattr(rights, "REQUESTS_BURST", 100.0)
    bench, sessions = Bench(), np.arange(1000, 1400)
    beat = Heartbeat(incarnation=1, state="ready", session_ids=sessions, epochs=sessions, lengths=sessions)
    for _ in range(30):
        assert len(bench.front(b"d0", beat)) == 400
    assert bench.counts["limited_requests"] == 0


@pytest.mark.parametrize(
    "sessions", [np.arange(100_000), np.array([-5]), np.array([1, 2])], ids=["huge", "negative", "odd"]
)
def test_a_malformed_heartbeat_is_dropped(sessions):
    """Unbounded session lists, negative ids, or arrays of different lengths do not stop the broker."""
    bench = Bench()
    zeros = np.zeros(len(sessions) if sessions[0] != 1 else 1)
    beat = Heartbeat(incarnation=1, state="ready", session_ids=sessions, epochs=zeros, lengths=zeros)
    for worker in (VERIFIER, b"d0"):
        assert bench.broker.from_front(worker, encode(beat), bench.now) == []
    assert bench.counts["dropped_front"] == 2


@pytest.mark.parametrize("lane", [b"[]", b"{}", b'"0"', b"null", b"true"])
def test_a_lane_that_is_not_a_number_is_dropped(lane):
    bench = Bench()
    bench.start(1)
    to = bench.assigned(b"d0", 1)
    draft = Draft(
        session_id=1, epoch=to.epoch, lane=77, base_len=2, first_id=0, token_ids=[1], parent_ids=[-1], scores=[0]
    )
    key, header, *arrays = encode(draft)
    assert bench.broker.from_front(b"d0", [key, header.replace(b":77", b":" + lane), *arrays], bench.now) == []
    assert bench.counts["dropped_front"] == 1


# --- jobs -------------------------------------------------------------------------------------------------------------


def keyed(**options: object) -> Broker:
    grants = {name: Grant(name, name.encode(), ("target", "client")) for name in ("gpu", "ann", "ben", "cat")}
    broker = Broker(incarnation=1, grants=grants, **options)
    hello = Hello(role="target", name="gpu", incarnation=1, model=toy_info(), endpoint="x", max_sessions=1)
    broker.from_front(VERIFIER, encode(hello), 0.0, "gpu")
    return broker


def submit_all(broker: Broker, who: str, first: int) -> list[Message]:
    """Submit 100 jobs with a key; return the answers."""
    received = []
    for job_id in range(first, first + 100):
        job = Submit(job_id=job_id, params=SamplingParams(max_tokens=9), prompt_ids=np.array([5], np.int32))
        effects = broker.from_front(who.encode(), encode(job), 0.0, who)
        received += [decode(e.frames) for e in effects if isinstance(e, Send) and e.to == who.encode()]
    return received


def test_one_key_leaves_room_in_the_queue_for_others():
    """Half of it for the first, half of the rest for the second, and each refusal says why."""
    broker = keyed(max_jobs=40)
    for who, first, room in (("ann", 100, 20), ("ben", 300, 10), ("cat", 500, 5)):
        received = submit_all(broker, who, first)
        assert Counter(type(one) for one in received) == {Accepted: room, Failed: 100 - room}
        assert {(one.code, f"more than {room} jobs of one key" in one.reason) for one in received[room:]} == {
            ("busy", True)
        }


def test_room_comes_back_when_jobs_end():
    broker = keyed(max_jobs=4)
    assert sum(isinstance(one, Accepted) for one in submit_all(broker, "ann", 100)) == 2
    job = broker.state.jobs.active[100]
    verdict = Verdict(
        session_id=100, epoch=job.session.epoch, base_len=1, finish="stop", token_ids=np.array([7], np.int32)
    )
    broker.from_back(VERIFIER, encode(verdict), 0.0)
    assert sum(isinstance(one, Accepted) for one in submit_all(broker, "ann", 200)) == 1
    assert broker.state.jobs.held == {"ann": 2}


def test_a_queue_of_too_many_tokens_is_full(monkeypatch):
    monkeypatch.setattr(intake, "MAX_TOKENS", 3 * 1002)
    bench = Bench()
    received = [bench.submit(job_id, max_tokens=1000)[0] for job_id in range(1, 6)]
    assert [type(one) for one in received] == [Accepted] * 3 + [Failed] * 2
    assert (received[3].code, "tokens of prompts and texts" in received[3].reason) == ("busy", True)


def test_a_journal_that_is_behind_takes_no_new_jobs(monkeypatch):
    """A slow disk is not an error, but the queue for it must not grow for ever."""
    monkeypatch.setattr(intake, "MAX_RECORDS", 2)
    bench = Bench(has_journal=True)
    assert [bench.submit(1), bench.submit(2)] == [[], []]
    (refused,) = bench.submit(3)
    assert (refused.code, "journal is behind" in refused.reason) == ("busy", True)
    bench.journaled()
    assert bench.submit(4) == []


def test_large_headers_take_no_more_than_a_fifth_of_the_broker():
    """A 60 KB header takes 20 ms to decode, also for a refused job. A peer may send ten a second after a burst."""
    limit = Limits()
    admitted = [now for now in range(60_000) if limit.admit_request("ann", 60_000, now / 1000, num_header_bytes=60_000)]
    assert len([now for now in admitted if now >= 30_000]) <= 30 * 10
    assert limit.admit_request("bob", 300, 60.0, num_header_bytes=200)
