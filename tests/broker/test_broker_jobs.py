"""What the broker promises to those who submit: reasons, deadlines, readers, bounds; with a journal and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import orjson
import pytest

from specq.broker.admission.limits import MAX_REASON
from specq.broker.core import Broker
from specq.broker.jobs import table as job_table
from specq.broker.jobs.readers import MAX_MISSED, MAX_READERS
from specq.broker.state import Effect, Find, FindFinished, Send, Write
from specq.protocol.errors import JournalBusyError
from specq.protocol.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Failed,
    Follow,
    GetStatus,
    Heartbeat,
    Hello,
    JobInfo,
    JobList,
    ListJobs,
    Message,
    Open,
    Status,
    Submit,
    Tokens,
    Verdict,
)
from specq.protocol.params import SamplingParams
from specq.protocol.wire import MAX_HEADER, MAX_SUBMIT_HEADER, decode, encode
from specq.testing.toy import toy_info

VERIFIER, ANN, BEN = b"verifier", b"ann", b"ben"


class Desk:
    """A broker with one verifier, spoken to directly."""

    def __init__(self, *, max_sessions: int = 8, **options: object) -> None:
        self.broker = Broker(incarnation=1, **options)
        self.now = 100.0
        self.writes: list[Write] = []
        self.sent: list[tuple[bytes, Message]] = []
        self.asked: list[Find | FindFinished] = []
        self.hello(VERIFIER, max_sessions=max_sessions)

    def hello(self, identity: bytes, fingerprint: str = "toy", max_sessions: int = 8) -> None:
        model = replace(toy_info(), fingerprint=fingerprint)
        hello = Hello(role="target", name="v", incarnation=1, model=model, endpoint="toy", max_sessions=max_sessions)
        self.front(identity, hello)

    def front(self, identity: bytes, message: Message) -> list[Message]:
        """Send a message to the broker; return what this peer receives at once."""
        return self.take(self.broker.from_front(identity, encode(message), self.now), identity)

    def take(self, effects: list[Effect], received: bytes = b"") -> list[Message]:
        """Take effects in; return what one peer receives."""
        self.writes += [effect for effect in effects if isinstance(effect, Write)]
        self.asked += [effect for effect in effects if isinstance(effect, Find | FindFinished)]
        sends = [(effect.to, decode(effect.frames)) for effect in effects if isinstance(effect, Send)]
        self.sent += sends
        return [message for to, message in sends if to == received]

    def submit(self, job_id: int, client: bytes = ANN, max_tokens: int = 10, **fields: object) -> list[Message]:
        """Submit a job that the journal does not know."""
        params = SamplingParams(max_tokens=max_tokens)
        received = self.front(client, Submit(job_id=job_id, params=params, prompt_ids=np.array([5, 6]), **fields))
        return received + [message for asked in self._asked() for message in self.found(asked, client)]

    def _asked(self) -> list[Find]:
        asked, self.asked = self.asked, []
        return [one for one in asked if isinstance(one, Find)]

    def found(self, asked: Find, client: bytes) -> list[Message]:
        return self.take(self.broker.found(asked.job_id, None, self.now), client)

    def verdict(self, job_id: int, *tokens: int, finish: str = "", received: bytes = ANN) -> list[Message]:
        """Commit tokens of a job; return what a client receives at once."""
        job = self.broker.state.jobs.active[job_id]
        verdict = Verdict(
            session_id=job_id,
            epoch=job.session.epoch,
            base_len=job.transcript.length,
            finish=finish,
            token_ids=np.array(tokens),
        )
        return self.take(self.broker.from_back(job.session.verifier, encode(verdict), self.now), received)

    def journaled(self, received: bytes = ANN) -> list[Message]:
        """Let the journal have everything; return what a client receives."""
        return self.take(self.broker.journaled(self.writes[-1].sequence, self.now), received)

    def tick(self, seconds: float = 0.25, received: bytes = ANN) -> list[Message]:
        self.now += seconds
        held = [job for job in self.broker.state.jobs.active.values() if job.session.verifier == VERIFIER]
        beat = Heartbeat(
            incarnation=1,
            state="ready",
            session_ids=np.array([job.job_id for job in held], np.int64),
            epochs=np.array([job.session.epoch for job in held], np.int64),
            lengths=np.array([job.transcript.length for job in held], np.int32),
        )
        self.front(VERIFIER, beat)
        return self.take(self.broker.tick(self.now), received)


def token_ids(messages: list[Message]) -> list[int]:
    return [token for message in messages if isinstance(message, Tokens) for token in message.token_ids.tolist()]


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses_with_the_reason() -> None:
    """Jobs that wait and run count; one that ends makes room."""
    desk = Desk(max_jobs=2, max_sessions=1)
    assert [desk.submit(i) for i in (1, 2)] == [[Accepted(job_id=1)], [Accepted(job_id=2)]]
    (refused,) = desk.submit(3)
    assert isinstance(refused, Failed)
    assert (refused.code, "the queue is full (2 jobs)" in refused.reason) == ("busy", True)
    assert desk.submit(1) == [Accepted(job_id=1)]
    desk.verdict(1, 7, finish="stop")
    assert desk.submit(3) == [Accepted(job_id=3)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"priority": 1001}, "priority is 1001; it must be a whole number from -1000 to 1000"),
        ({"deadline_ms": -1}, "deadline_ms is -1"),
        ({"label": "x" * 1001}, "(1003 characters); it must be text of at most 1000 characters"),
    ],
)
def test_options_out_of_bounds_are_refused(fields: dict[str, object], reason: str) -> None:
    (refused,) = Desk().submit(1, **fields)
    assert isinstance(refused, Failed)
    assert reason in refused.reason


def test_without_the_journal_no_new_jobs() -> None:
    """What it has goes on, what it has not is refused after all, and all is well when it can be written again."""
    desk = Desk(has_journal=True)
    desk.submit(1)
    assert desk.journaled() == [Accepted(job_id=1)]
    desk.submit(2, BEN)
    (refused,) = desk.take(desk.broker.troubled("the disk is full", desk.now), BEN)
    assert isinstance(refused, Failed)
    assert (refused.code, "the disk is full" in refused.reason) == ("busy", True)
    (refused,) = desk.submit(3)
    assert "the disk is full" in refused.reason
    assert desk.verdict(1, 7, 8) == []
    desk.take(desk.broker.troubled("", desk.now))
    assert token_ids(desk.journaled()) == [7, 8]
    desk.submit(2, BEN)
    assert desk.journaled(BEN) == [Accepted(job_id=2)]
    assert [type(write.record).__name__ for write in desk.writes if write.record.job_id == 2] == [
        "JobTaken", "JobBound", "JobDropped", "JobTaken", "JobBound",
    ]  # fmt: skip


def test_a_journal_that_cannot_be_read_refuses() -> None:
    """Since the job might be one that ended."""
    desk = Desk(has_journal=True)
    desk.front(ANN, Submit(job_id=1, params=SamplingParams(), prompt_ids=np.array([5])))
    (refused,) = desk.take(desk.broker.found(1, JournalBusyError("it is broken"), desk.now), ANN)
    assert isinstance(refused, Failed)
    assert (refused.code, refused.reason) == ("busy", "it is broken")


def test_a_cancel_does_not_overtake_its_submit() -> None:
    """Though the journal is asked first whether it knows the job."""
    desk = Desk(has_journal=True)
    desk.front(ANN, Submit(job_id=1, params=SamplingParams(), prompt_ids=np.array([5])))
    desk.front(ANN, Cancel(job_id=1))
    desk.found(Find(1), ANN)
    received = desk.journaled()
    assert isinstance(received[-1], Tokens)
    assert received[-1].finish == "cancelled"


# --- deadlines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_sessions", [0, 1])
def test_a_deadline_ends_a_job_that_runs_or_waits(max_sessions: int) -> None:
    """At the first tick after it, with what it has; not before."""
    desk = Desk(max_sessions=1)
    desk.submit(1)
    desk.submit(2, deadline_ms=1000, priority=0)
    if max_sessions:
        desk.verdict(1, 3, finish="stop")
        desk.verdict(2, 4, 5)
    desk.sent.clear()
    desk.tick(0.9)
    assert 2 in desk.broker.state.jobs.active
    received = desk.tick(0.2)
    assert isinstance(received[-1], Failed)
    assert received[-1].code == "deadline"
    assert f"{2 * max_sessions} of at most 10 tokens" in received[-1].reason
    assert 2 not in desk.broker.state.jobs.active


# --- readers ----------------------------------------------------------------------------------------------------------


def test_several_clients_follow_one_job() -> None:
    """Each from where it was; one that knows the id only receives what the job is."""
    desk = Desk()
    desk.submit(1, label="mine")
    desk.verdict(1, 7)
    received = desk.front(BEN, Follow(job_id=1))
    assert isinstance(received[0], JobInfo)
    assert (received[0].label, received[0].model, received[0].prompt_ids.tolist()) == ("mine", "toy", [5, 6])
    assert token_ids(received) == [7]
    assert token_ids(desk.verdict(1, 8, received=ANN)) == [8]
    desk.verdict(1, 9, finish="stop")
    for client in (ANN, BEN):
        assert token_ids([message for to, message in desk.sent if to == client]) == [7, 8, 9]
    received = desk.front(BEN, Follow(job_id=1, have=2))
    assert (received[0].ended, token_ids(received), received[-1].finish) == (True, [9], "stop")


def test_readers_are_bounded() -> None:
    """Of too many, the one that came first is dropped; it may come again."""
    desk = Desk()
    desk.submit(1)
    for i in range(2 * MAX_READERS):
        desk.front(b"reader %d" % i, Follow(job_id=1))
    desk.sent.clear()
    desk.verdict(1, 7)
    assert len([message for _, message in desk.sent if isinstance(message, Tokens)]) == MAX_READERS


def test_a_slow_reader_is_refilled_by_position() -> None:
    """What it did not take is sent again at the next tick, as one; it receives nothing in between."""
    desk = Desk()
    desk.submit(1)
    (missed,) = desk.verdict(1, 7, 8)
    desk.broker.undelivered(Send("front", ANN, encode(missed)))
    assert desk.verdict(1, 9) == []
    assert token_ids(desk.tick()) == [7, 8, 9]


def test_a_reader_that_is_gone_costs_nothing_for_long() -> None:
    """After some ticks nothing is sent to it; the job runs on, and a client that comes back gets all."""
    desk = Desk()
    desk.submit(1)
    desk.verdict(1, 7)
    for _ in range(MAX_MISSED + 2):
        for message in desk.tick():
            desk.broker.undelivered(Send("front", ANN, encode(message)))
    assert desk.broker.state.jobs.active[1].readers.by_client != {}
    desk.verdict(1, 8)
    for _ in range(MAX_MISSED + 2):
        desk.broker.undelivered(Send("front", ANN, encode(Tokens(job_id=1, base_len=0, token_ids=[], accepted=[]))))
        desk.tick()
    assert desk.broker.state.jobs.active[1].readers.by_client == {}
    assert desk.verdict(1, 9) == []
    assert token_ids(desk.submit(1)) == [7, 8, 9]


# --- after a restart --------------------------------------------------------------------------------------------------


def test_a_text_goes_on_with_the_same_weights_only() -> None:
    """A verifier of the same name with others is left alone, until there are no tokens that could be mixed."""
    desk = Desk()
    desk.submit(1)
    desk.submit(2)
    desk.verdict(1, 7)
    desk.hello(b"other", fingerprint="another")
    desk.sent.clear()
    desk.front(VERIFIER, Heartbeat(incarnation=1, state="leaving"))
    assert [(to, m.session_id) for to, m in desk.sent if isinstance(m, Open)] == [(b"other", 2)]
    desk.hello(b"again")
    assert [(to, m.session_id, m.token_ids.tolist()) for to, m in desk.sent if isinstance(m, Open)][1:] == [
        (b"again", 1, [5, 6, 7])
    ]


def test_a_restarted_broker_waits_for_its_verifiers() -> None:
    """A client that asks too early is neither refused nor answered; later it is."""
    broker = Broker(incarnation=1, liveness_ms=3000)
    broker.restore([], 10.0)
    submit = encode(Submit(job_id=1, params=SamplingParams(), prompt_ids=np.array([5])))
    assert broker.from_front(ANN, submit, 12.9) == []
    (refused,) = broker.from_front(ANN, submit, 13.1)
    assert b"no_verifier" in refused.frames[1]


# --- what cannot be read, or is too large -----------------------------------------------------------------------------


def reordered(frames: list[bytes]) -> list[bytes]:
    """Return frames whose header names its type last."""
    header = orjson.loads(frames[1])
    return [frames[0], orjson.dumps(dict(reversed(header.items()))), *frames[2:]]


def damaged(message: Message, **fields: object) -> list[bytes]:
    """Return the frames of a message with other fields in its header."""
    frames = encode(message)
    return [frames[0], orjson.dumps({**orjson.loads(frames[1]), **fields}), *frames[2:]]


SUBMIT = Submit(job_id=9, params=SamplingParams(), prompt_ids=np.array([5, 6]))


@pytest.mark.parametrize("order", [list, reordered])
@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (damaged(SUBMIT, params={"top_p": 7}), "cannot read this submit: submit.params: top_p is 7"),
        (damaged(SUBMIT, surprise=1), "submit has no field 'surprise'"),
        ([*encode(SUBMIT), b"more"], "submit has 1 arrays, not 2"),
        (damaged(Follow(job_id=9), have="x"), "cannot read this follow"),
        (damaged(Cancel(job_id=9), now=True), "cancel has no field 'now'"),
        (damaged(SUBMIT, params={"stop": "x" * 60_000, "top_p": 7}), "top_p is 7"),
        (damaged(SUBMIT, model=["x" * 60_000]), "submit.model is ['xxx"),
    ],
)
def test_who_cannot_be_read_is_told_why(
    frames: list[bytes], reason: str, order: Callable[[list[bytes]], list[bytes]]
) -> None:
    """The sender waits for word of its job; the reason is short, whatever it quotes."""
    broker = Desk().broker
    (sent,) = broker.from_front(ANN, order(frames), 100.0)
    assert isinstance(sent, Send)
    refused = decode(sent.frames)
    assert isinstance(refused, Failed)
    assert (sent.to, refused.job_id, refused.code, reason in refused.reason) == (ANN, 9, "invalid", True)
    assert len(sent.frames[1]) < 3 * MAX_REASON
    assert broker.state.counts["dropped_front"] == 1


def test_a_header_over_the_limit_is_answered() -> None:
    """Also where it cannot be decoded at all."""
    large = replace(SUBMIT, params=SamplingParams(stop=("x" * MAX_HEADER,)))
    (refused,) = Desk().front(ANN, large)
    assert isinstance(refused, Failed)
    assert (refused.code, f"at most {MAX_HEADER}" in refused.reason) == ("invalid", True)


@pytest.mark.parametrize(
    "frames",
    [
        damaged(GetStatus(), extra=1),
        [bytes(8), *damaged(SUBMIT, extra=1)[1:]],
        [b"\xff" * 8, *damaged(SUBMIT, extra=1)[1:]],
        [b"short", *damaged(SUBMIT, extra=1)[1:]],
        damaged(SUBMIT, v=PROTOCOL_VERSION + 1, extra=1),
        [b"", b""],
    ],
)
def test_what_names_no_job_is_only_counted(frames: list[bytes]) -> None:
    broker = Desk().broker
    assert broker.from_front(ANN, frames, 100.0) == []
    assert broker.state.counts["dropped_front"] == 1


def test_a_job_that_would_not_fit_into_an_open_is_refused() -> None:
    """It could be read here, but not by the verifier; one a little smaller is opened."""
    desk = Desk()
    desk.sent.clear()
    for length, code in ((MAX_SUBMIT_HEADER, "invalid"), (MAX_SUBMIT_HEADER - 100, "")):
        params = SamplingParams(logit_bias=((5, 1.0),) * (length // 8), max_tokens=9)  # eight bytes each
        (answer,) = desk.front(ANN, Submit(job_id=length, params=params, prompt_ids=np.array([5, 6])))
        assert getattr(answer, "code", "") == code
        assert not code or "of them for logit_bias; at most" in answer.reason
    (opened,) = [message for to, message in desk.sent if to == VERIFIER]
    assert isinstance(opened, Open)
    assert opened.session_id == MAX_SUBMIT_HEADER - 100


def test_what_counts_is_the_size_that_it_has_here() -> None:
    """JSON may be written shorter than the broker writes it: whole numbers where there are fractions."""
    raw = damaged(SUBMIT, params={"logit_bias": [[5, 1]] * 8500})
    assert len(raw[1]) < MAX_SUBMIT_HEADER
    (sent,) = Desk().broker.from_front(ANN, raw, 100.0)
    assert isinstance(sent, Send)
    refused = decode(sent.frames)
    assert isinstance(refused, Failed)
    assert "of them for logit_bias; at most" in refused.reason


# --- memory and lists -------------------------------------------------------------------------------------------------


def test_only_what_the_journal_has_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that ended leave the memory, the oldest first, but not before the journal has their ends."""
    monkeypatch.setattr(job_table, "KEEP_FINISHED", 3)
    desk = Desk(has_journal=True)
    for i in range(1, 8):
        desk.submit(i)
        desk.verdict(i, 7, finish="stop")
    assert len(desk.broker.state.jobs.finished) == 7
    desk.journaled()
    desk.submit(8)
    desk.verdict(8, 7, finish="stop")
    assert list(desk.broker.state.jobs.finished) == [6, 7, 8]
    monkeypatch.setattr(job_table, "KEEP_TOKENS", 7)
    desk.journaled()
    desk.submit(9)
    desk.verdict(9, 7, finish="stop")
    assert list(desk.broker.state.jobs.finished) == [8, 9]


def test_without_a_journal_lists_come_from_memory() -> None:
    """Those that wait and run first, then those that ended, in pages."""
    desk = Desk(max_sessions=1)
    for i in (1, 2, 3, 4):
        desk.submit(i)
    desk.verdict(1, 7, finish="stop")
    desk.verdict(2, 7, finish="stop")
    desk.front(BEN, Cancel(job_id=4))

    def listed(**page: int) -> list[tuple[int, str]]:
        (answer,) = desk.front(BEN, ListJobs(**page))
        assert isinstance(answer, JobList)
        lines = json.loads(answer.data.tobytes())
        return [(line["job_id"], line["state"]) for line in lines]

    assert listed() == [(3, "running"), (4, "cancelled"), (2, "finished"), (1, "finished")]
    assert listed(limit=1, skip=1) == [(2, "finished")]


def test_the_status_tells_of_the_journal() -> None:
    desk = Desk(has_journal=True)
    desk.submit(1)
    (status,) = desk.front(ANN, GetStatus())
    assert isinstance(status, Status)
    assert status.report["journal"] == {"kept": True, "records": 2, "records_waiting": 2, "trouble": ""}
