"""What the broker's core lets each key do: message by message, owner by owner, without a socket."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import orjson
import pytest

from specq.broker import Broker, Effect, Find, FindFinished, Send, Write, gate
from specq.broker.state import rights
from specq.broker.state.rights import MAY, Roles
from specq.journal import StoredJob
from specq.protocol.messages import (
    MESSAGES,
    PROTOCOL_VERSION,
    Activations,
    Assign,
    Cancel,
    Draft,
    Drafts,
    Failed,
    Follow,
    Heartbeat,
    Hello,
    JobInfo,
    JobList,
    ListJobs,
    Message,
    Refused,
    SessionFailed,
    Submit,
    TokenizerChunk,
    Tokens,
    Verdict,
    Verdicts,
    Welcome,
)
from specq.protocol.params import SamplingParams
from specq.protocol.versions import OWNERS
from specq.protocol.wire import decode, encode
from specq.testing.toy import toy_info
from specq.transport.keys import Grant

KEYS = {"gpu": "target", "laptop": "draft", "phone": "draft", "alice": "client", "bob": "client", "hub": "broker"}
OF_VERIFIERS = {Verdict, Verdicts, SessionFailed, TokenizerChunk, Activations}  # at the front only if they dial out


def grants() -> dict[str, Grant]:
    return {name: Grant(name, name.encode(), (role,), trusted=name == "phone") for name, role in KEYS.items()}


class Guarded:
    """A broker with keys; each key has a socket of the same name."""

    def __init__(self, **options: object) -> None:
        self.grants = grants()
        self.broker = Broker(incarnation=1, grants=self.grants, **options)
        self.counts = self.broker.state.counts

    def say(self, who: str, message: Message, identity: bytes = b"") -> list[Effect]:
        return self.broker.from_front(identity or who.encode(), encode(message), 0.0, who)

    def received(self, who: str, message: Message) -> list[Message]:
        """Return what a key receives at once when it sends a message."""
        return [decode(e.frames) for e in self.say(who, message) if isinstance(e, Send) and e.to == who.encode()]

    def begin(self, strategy: str = "deterministic") -> Assign:
        """Let Alice submit job 1, with a verifier and one drafter; return what the drafter receives."""
        self.say("gpu", Hello(role="target", name="gpu", incarnation=1, model=toy_info(), endpoint="x", max_sessions=8))
        self.say("alice", a_job(1, strategy=strategy))
        return self.assigned("laptop")

    def assigned(self, who: str) -> Assign:
        model = replace(toy_info(), fingerprint=who)
        hello = Hello(role="draft", name=who, incarnation=1, model=model, capabilities=(OWNERS,))
        (found,) = (one for one in self.received(who, hello) if isinstance(one, Assign))
        return found


def a_job(job_id: int, **params: object) -> Submit:
    return Submit(job_id=job_id, params=SamplingParams(max_tokens=50, **params), prompt_ids=np.array([5, 6], np.int32))


def a_draft(assigned: Assign, **changes: object) -> Draft:
    """Return a node that claims to have been sampled."""
    values = {
        "session_id": assigned.session_id, "epoch": assigned.epoch, "lane": assigned.lane, "base_len": 2, "first_id": 0,
        "token_ids": [7], "parent_ids": [-1], "scores": [0],
        "q_size": 2, "q_ids": [7, 8], "q_weights": [1, 9], "q_rows": [0],
    }  # fmt: skip
    return Draft(**values | changes)


def passed_on(effects: list[Effect]) -> list[Draft]:
    return [decode(e.frames) for e in effects if isinstance(e, Send) and e.link == "back"]


def test_every_message_to_the_front_has_its_roles():
    """A new message that the broker takes must say who may send it."""
    broker = Broker(incarnation=1)
    taken = set(broker._front) | {Draft, Drafts}
    assert broker._of_verifiers == OF_VERIFIERS
    assert taken | OF_VERIFIERS == set(MAY)
    assert set(MESSAGES.values()) > taken


@pytest.mark.parametrize("kind", MAY, ids=lambda kind: kind.TYPE)
def test_each_role_may_say_what_the_table_says(kind):
    """Held against a table that is written out here once more."""
    clients = {"submit", "follow", "cancel", "list_jobs", "fetch_tokenizer"}
    by_hand = {
        "client": clients | {"get_status", "get_trace", "get_clock", "trace_events"},
        "draft": {"draft", "drafts", "hello", "heartbeat", "get_status", "get_clock", "trace_events"},
        "target": {"hello", "heartbeat", "get_status", "get_clock", "trace_events", "verdict", "verdicts"}
        | {"session_failed", "activations", "tokenizer_chunk"},
        "broker": {"get_status", "get_trace"},
    }
    guard = Roles(grants())
    for name, role in KEYS.items():
        refused = guard.refusal(name.encode(), name, kind, role if kind is Hello else "")
        assert (refused == "") == (kind.TYPE in by_hand[role]), name


def test_without_keys_everyone_may_everything():
    guard = Roles()
    assert guard.refusal(b"x", "", Draft) == ""
    assert (guard.owns(b"x", "whoever"), guard.owner(b"x"), guard.trusts(guard.shown(b"x"))) == (True, None, True)
    assert guard.public_key(b"x") == b""


def test_a_verdict_sent_to_the_frontend_commits_no_tokens():
    """Neither a client nor a drafter can commit, nor the verifier's own key from another socket."""
    guarded = Guarded()
    assigned = guarded.begin()
    job = guarded.broker.state.jobs.active[1]
    for who in KEYS:
        forged = Verdict(session_id=1, epoch=assigned.epoch, base_len=2, finish="stop", token_ids=np.array([9]))
        assert guarded.say(who, forged) == []
    assert (job.transcript.token_ids, job.transcript.finish) == ([], "")


def test_a_drafter_speaks_only_for_its_own_lane():
    """Not for another session, epoch or lane, and another key not for it, even with its socket's identity."""
    guarded = Guarded()
    mine = guarded.begin()
    others = guarded.assigned("phone")
    assert mine.lane != others.lane
    assert len(passed_on(guarded.say("laptop", a_draft(mine)))) == 1
    for forged in (a_draft(others), a_draft(mine, session_id=2), a_draft(mine, epoch=mine.epoch + 1)):
        assert passed_on(guarded.say("laptop", forged)) == []
    assert passed_on(guarded.say("alice", a_draft(mine), identity=b"laptop")) == []
    assert guarded.counts["forbidden"] == 1


def test_distributions_of_untrusted_drafters_are_taken_off():
    """The nodes pass as point masses; those of a trusted key pass as they are."""
    guarded = Guarded()
    mine, trusted = guarded.begin("probabilistic"), guarded.assigned("phone")
    (stripped,) = passed_on(guarded.say("laptop", a_draft(mine)))
    (whole,) = passed_on(guarded.say("phone", a_draft(trusted)))
    assert (stripped.q_size, len(stripped.q_ids), stripped.token_ids.tolist()) == (0, 0, [7])
    assert whole == a_draft(trusted)


def test_a_removed_key_loses_all_permissions():
    """At once, also over a connection that stands."""
    guarded = Guarded()
    mine = guarded.begin()
    del guarded.grants["laptop"], guarded.grants["alice"]
    assert passed_on(guarded.say("laptop", a_draft(mine))) == []
    assert guarded.say("laptop", Heartbeat(incarnation=1, state="ready")) == []
    (failed,) = guarded.received("alice", Follow(job_id=1))
    assert (failed.code, failed.reason) == ("forbidden", "this key is no longer allowed")


def test_a_role_is_not_taken_on_ones_word():
    guarded = Guarded()
    for who, role in (("laptop", "target"), ("gpu", "draft"), ("alice", "draft")):
        (refused,) = guarded.received(who, Hello(role=role, name="x", incarnation=1, model=toy_info(), endpoint="x"))
        assert isinstance(refused, Refused)
        assert refused.fatal
        assert f"the key {who} has the role {KEYS[who]}; expected the role {role}" == refused.reason
    assert guarded.broker.state.workers.all() == []


@pytest.mark.parametrize(
    "changes", [{"name": "\x1b[2J"}, {"name": "x" * 1001}, {"model": replace(toy_info(), name="a\nb")}]
)
def test_names_are_fit_to_be_shown(changes):
    """What a worker calls itself is printed on the terminals of others: no escape sequences, no lines of its own."""
    guarded = Guarded()
    hello = {"role": "target", "name": "x", "incarnation": 1, "model": toy_info(), "endpoint": "x"}
    (refused,) = guarded.received("gpu", Hello(**hello | changes))
    assert "1000 printable characters" in refused.reason or "at most 1000 characters" in refused.reason
    assert guarded.broker.state.workers.all() == []


def test_workers_are_bounded(monkeypatch):
    """A key that registers ever more of them is refused; those that are known go on."""
    monkeypatch.setattr(gate, "MAX_WORKERS", 2)
    guarded = Guarded()
    hello = Hello(role="draft", name="x", incarnation=1, model=toy_info())
    answers = [guarded.say("laptop", hello, identity=b"%d" % number) for number in (1, 2, 3, 1)]
    kinds = [[type(decode(e.frames)) for e in received] for received in answers]
    assert kinds == [[Welcome], [Welcome], [Refused], [Welcome]]


def test_jobs_of_others_do_not_exist():
    """For Alice's job Bob gets the same answer as for a missing one. He can neither stop it nor take its id."""
    guarded = Guarded()
    guarded.begin()
    (none,), (hidden,) = guarded.received("bob", Follow(job_id=2)), guarded.received("bob", Follow(job_id=1))
    assert (hidden.code, hidden.reason) == (none.code, none.reason.replace("job 2", "job 1"))
    assert guarded.received("bob", Cancel(job_id=1)) == []
    (taken,) = guarded.received("bob", a_job(1))
    assert isinstance(taken, Failed)
    assert taken.code == "forbidden"
    job = guarded.broker.state.jobs.active[1]
    assert (job.transcript.finish, job.request.owner, list(job.readers.by_client)) == ("", "alice", [b"alice"])
    lists = {who: guarded.received(who, ListJobs()) for who in ("alice", "bob")}
    seen = {who: [line["job_id"] for line in listed(received)] for who, received in lists.items()}
    assert seen == {"alice": [1], "bob": []}
    guarded.received("alice", Cancel(job_id=1))
    assert job.transcript.finish == "cancelled"


def listed(received: list[Message]) -> list[dict[str, object]]:
    (message,) = (one for one in received if isinstance(one, JobList))
    return orjson.loads(message.data.tobytes())


def test_jobs_in_the_journal_are_their_owners_too():
    """The journal records the owner of a job. Another key gets no information about it."""
    guarded = Guarded(has_journal=True)
    ids = np.array([9], "<i4").tobytes()
    stored = StoredJob(a_job(5), "alice", finish="stop", token_ids=ids, origins=b"\0")
    for who in ("bob", "alice"):
        assert guarded.say(who, Follow(job_id=5)) == [Find(5)]
        received = [decode(e.frames) for e in guarded.broker.found(5, stored, 0.0) if isinstance(e, Send)]
        assert [type(one) for one in received] == ([Failed] if who == "bob" else [JobInfo, Tokens])
        guarded.broker.state.jobs.finished.clear()


def test_lists_are_asked_for_by_owner():
    """Of what is in the journal, too; once at a time for each client."""
    guarded = Guarded(has_journal=True)
    for who in ("bob", "alice"):
        asked = guarded.say(who, ListJobs())
        assert asked == [FindFinished(who.encode(), 100, 0, who)]
        assert guarded.say(who, ListJobs()) == []
        guarded.broker.listed(asked[0], [], 0.0)
        assert guarded.say(who, ListJobs()) == asked


def test_the_journal_records_the_owner_of_a_job():
    guarded = Guarded(has_journal=True)
    guarded.say("gpu", Hello(role="target", name="gpu", incarnation=1, model=toy_info(), endpoint="x", max_sessions=8))
    guarded.say("alice", a_job(6))
    records = [e.record for e in guarded.broker.found(6, None, 0.0) if isinstance(e, Write)]
    assert records[0].owner == "alice"


@pytest.mark.parametrize(
    ("most", "priority", "is_taken"), [(0, 0, True), (0, -5, True), (0, 1, False), (7, 7, True), (7, 8, False)]
)
def test_a_key_claims_no_higher_priority_than_it_was_granted(most, priority, is_taken):
    """None above 0 unless its file says so; the reason names the key and what it may claim."""
    guarded = Guarded()
    guarded.begin()
    guarded.grants["bob"] = replace(guarded.grants["bob"], max_priority=most)
    received = guarded.received("bob", replace(a_job(2), priority=priority))
    assert (2 in guarded.broker.state.jobs.active) == is_taken
    if not is_taken:
        (failed,) = received
        assert failed.code == "invalid"
        assert f"priority is {priority}; the key bob may claim at most {most}" in failed.reason


def test_without_keys_any_priority_may_be_claimed():
    """All clients are alike there; what waits still ages."""
    assert Roles().refused_priority(b"x", 1000) == ""


def test_memory_of_sockets_is_bounded(monkeypatch):
    """A forgotten socket has no owner, which is the safe side."""
    monkeypatch.setattr(rights, "MAX_SOCKETS", 3)
    guard = Roles(grants())
    for number in range(10):
        guard.refusal(bytes([number]), "alice", Submit)
    assert len(guard._names) == 3
    asked = [(bytes([9]), "alice"), (bytes([0]), "alice"), (bytes([0]), "")]
    assert [guard.owns(*one) for one in asked] == [True, False, False]


def test_an_unauthorised_client_receives_no_parse_errors() -> None:
    """A message that cannot be read is answered only to those who may send such a one."""
    guarded = Guarded()
    frames = [(7).to_bytes(8, "little"), orjson.dumps({"v": PROTOCOL_VERSION, "type": "cancel", "extra": 1})]
    assert guarded.broker.from_front(b"laptop", frames, 0.0, "laptop") == []
    (answer,) = guarded.broker.from_front(b"alice", frames, 0.0, "alice")
    assert isinstance(answer, Send)
    assert isinstance(decode(answer.frames), Failed)
