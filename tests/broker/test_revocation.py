"""A key that is taken away, or may do less than before: what is under way changes at the broker's next look."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specq.broker import Disconnect, Effect, Find, Send
from specq.journal import Crashes, StoredJob
from specq.protocol.messages import (
    Draft,
    FetchTokenizer,
    Follow,
    Hello,
    ListJobs,
    Message,
    Open,
    Refused,
    SessionFailed,
    TokenizerChunk,
    Tokens,
    Verdict,
)
from specq.protocol.wire import decode, encode, type_of
from specq.testing.toy import toy_info
from specq.transport.keys import Grant
from tests.broker.test_roles import Guarded, a_draft, a_job, passed_on

TICK_S = 0.25


class Watched(Guarded):
    """A broker with keys, and a clock."""

    now = 0.0

    def look(self) -> list[Effect]:
        """Let the broker look at its keys."""
        self.now += TICK_S
        return self.broker.tick(self.now)

    def take_away(self, who: str) -> list[Effect]:
        del self.grants[who]
        return self.look()

    def verifier(self, who: str) -> None:
        """Register a verifier."""
        self.grants[who] = Grant(who, who.encode(), ("target",))
        self.say(who, Hello(role="target", name=who, incarnation=1, model=toy_info(), endpoint="x", max_sessions=8))

    def commit(self, who: str, *tokens: int, finish: str = "") -> list[Effect]:
        """Let a verifier commit tokens to job 1."""
        job = self.broker.state.jobs.get(1)
        at = {"session_id": 1, "epoch": job.session.epoch, "base_len": job.transcript.length}
        verdict = Verdict(**at, finish=finish, token_ids=np.array(tokens))
        return self.broker.from_back(who.encode(), encode(verdict), self.now)


def messages(effects: list[Effect], to: str) -> list[Message]:
    return [decode(e.frames) for e in effects if isinstance(e, Send) and e.to == to.encode()]


def opened(effects: list[Effect]) -> dict[bytes, int]:
    """Return which session was opened at which verifier."""
    sends = [e for e in effects if isinstance(e, Send) and type_of(e.frames) is Open]
    return {e.to: int.from_bytes(e.frames[0], "little") for e in sends}


def without_role(guarded: Guarded, who: str, role: str) -> None:
    """Give a key another role than the one it has."""
    guarded.grants[who] = replace(guarded.grants[who], roles=(role,))


def another_key(guarded: Guarded, who: str) -> None:
    """Put another key in the place of one, under its name."""
    guarded.grants[who] = replace(guarded.grants[who], public_key=b"another")


LOSSES = {
    "removed": lambda guarded, who: guarded.grants.pop(who),
    "another role": lambda guarded, who: without_role(guarded, who, "broker"),
    "another key": another_key,
}
losses = pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)


@losses
def test_a_verifier_with_a_revoked_key_commits_no_tokens(lose) -> None:
    """Immediately: its session moves to another verifier, no failure is counted, and its DEALER is closed."""
    guarded = Watched()
    guarded.begin()
    guarded.verifier("gpu2")
    job = guarded.broker.state.jobs.active[1]
    assert job.session.verifier == b"gpu"
    guarded.commit("gpu", 9)
    lose(guarded, "gpu")
    assert guarded.commit("gpu", 10) == []  # even before the broker looks
    effects = guarded.look()
    assert Disconnect(b"gpu") in effects
    assert opened(effects) == {b"gpu2": 1}
    assert isinstance(messages(effects, "gpu")[0], Refused)
    guarded.commit("gpu", 11, finish="stop")
    failed = encode(SessionFailed(session_id=1, epoch=job.session.epoch, reason="I say so"))
    guarded.broker.from_back(b"gpu", failed, guarded.now)
    assert (job.transcript.token_ids, job.transcript.finish) == ([9], "")
    assert (job.crashes, job.session.num_failures) == (Crashes(), 0)
    guarded.commit("gpu2", 12)
    assert job.transcript.token_ids == [9, 12]


def test_a_verifier_without_its_key_gets_no_sessions() -> None:
    """Not even where it is the only one: jobs wait."""
    guarded = Watched()
    guarded.begin()
    guarded.take_away("gpu")
    assert opened(guarded.look()) == {}
    assert guarded.broker.state.jobs.active[1].session.verifier == b""
    guarded.verifier("gpu2")
    assert guarded.broker.state.jobs.active[1].session.verifier == b"gpu2"


@losses
def test_a_reader_with_a_revoked_key_receives_no_more_messages(lose) -> None:
    """The job of its key stops, too, unless the same name has a new key."""
    guarded = Watched()
    guarded.begin()
    job = guarded.broker.state.jobs.active[1]
    assert any(isinstance(m, Tokens) for m in messages(guarded.commit("gpu", 9), "alice"))
    lose(guarded, "alice")
    effects = guarded.look()
    if lose is another_key:
        effects += guarded.commit("gpu", 10, finish="stop")
        assert job.transcript.finish == "stop"
    else:
        assert (job.transcript.finish, job.transcript.failure.code) == ("error", "forbidden")
        assert job.transcript.token_ids == [9]
        assert guarded.broker.state.workers.get(b"gpu").job_ids == set()
    assert messages(effects, "alice") == []
    assert job.readers.by_client == {}


def test_what_waits_for_the_journal_is_not_done_for_a_key_that_is_gone() -> None:
    """A job that was being looked for is not taken, and what was asked is not answered."""
    guarded = Watched(has_journal=True)
    guarded.verifier("gpu")
    (find,) = (e for e in guarded.say("alice", a_job(5)) if isinstance(e, Find))
    guarded.say("alice", Follow(job_id=6))
    (listing,) = guarded.say("alice", ListJobs())
    guarded.say("alice", FetchTokenizer())
    guarded.take_away("alice")
    stored = StoredJob(a_job(6), "alice", finish="stop", token_ids=bytes(4), origins=b"\0")
    chunk = encode(TokenizerChunk(model=toy_info(), index=0, count=1, data=np.zeros(1, np.uint8)))
    effects = guarded.broker.found(find.job_id, None, guarded.now)
    effects += guarded.broker.found(6, stored, guarded.now)
    effects += guarded.broker.listed(listing, [], guarded.now)
    effects += guarded.broker.from_back(b"gpu", chunk, guarded.now)
    assert effects == []
    assert not guarded.broker.state.jobs.active


def test_jobs_of_a_key_that_went_while_the_broker_was_away_fail() -> None:
    """They are in the journal, and fail at the first look."""
    guarded = Watched(has_journal=True)
    guarded.broker.restore([StoredJob(a_job(1), "alice"), StoredJob(a_job(2), "carol")], 0.0)
    guarded.look()
    assert list(guarded.broker.state.jobs.active) == [1]
    assert guarded.broker.state.jobs.finished[2].transcript.failure.code == "forbidden"


@losses
def test_a_drafter_without_its_key_drafts_no_more(lose) -> None:
    """Its lane goes to another at once, and what it still sends is dropped."""
    guarded = Watched()
    mine = guarded.begin()
    job = guarded.broker.state.jobs.active[1]
    lose(guarded, "laptop")
    effects = guarded.look()
    assert job.drafters.lanes == {}
    assert isinstance(messages(effects, "laptop")[0], Refused)
    assert passed_on(guarded.say("laptop", a_draft(mine))) == []
    assert guarded.broker.state.workers.get(b"laptop") is None
    guarded.assigned("phone")
    assert job.drafters.identities() == [b"phone"]


@pytest.mark.parametrize("change", ["untrusted", "removed"])
@pytest.mark.parametrize("strategy", ["probabilistic", "deterministic"])
def test_what_a_trusted_drafter_sent_is_not_believed_when_it_is_trusted_no_more(change: str, strategy: str) -> None:
    """Where its word counts, the session is opened anew, without its drafts; then its distributions are taken off."""
    guarded = Watched()
    guarded.begin(strategy)
    mine = guarded.assigned("phone")
    assert passed_on(guarded.say("phone", a_draft(mine)))[0].q_size == 2
    epoch = guarded.broker.state.jobs.active[1].session.epoch
    if change == "removed":
        effects = guarded.take_away("phone")
    else:
        guarded.grants["phone"] = replace(guarded.grants["phone"], trusted=False)
        effects = guarded.look()
    job = guarded.broker.state.jobs.active[1]
    assert (job.session.epoch > epoch) == (strategy == "probabilistic")
    assert opened(effects) == ({b"gpu": 1} if strategy == "probabilistic" else {})
    if change == "untrusted":
        (lane,) = (number for number, lane in job.drafters.lanes.items() if lane.drafter == b"phone")
        changes = {"epoch": job.session.epoch, "lane": lane}
        drafts = [one for one in passed_on(guarded.say("phone", a_draft(mine, **changes))) if isinstance(one, Draft)]
        assert [one.q_size for one in drafts] == [0]
    assert opened(guarded.look()) == {}


def test_what_changes_for_one_key_leaves_others_alone() -> None:
    """A key that is added, or another's that goes: sessions, lanes and readers stay as they are."""
    guarded = Watched()
    guarded.begin()
    guarded.look()
    job = guarded.broker.state.jobs.active[1]
    before = (job.session.verifier, job.session.epoch, dict(job.drafters.lanes), dict(job.readers.by_client))
    guarded.grants["carol"] = Grant("carol", b"carol", ("client",))
    assert guarded.look() == []
    assert guarded.take_away("bob") == []
    assert (job.session.verifier, job.session.epoch, job.drafters.lanes, job.readers.by_client) == before


def test_a_key_may_come_and_go_between_two_looks() -> None:
    """What it began in the meantime ends with it."""
    guarded = Watched()
    guarded.begin()
    guarded.look()
    guarded.grants["carol"] = Grant("carol", b"carol", ("client",))
    guarded.say("carol", a_job(2))
    guarded.take_away("carol")
    assert list(guarded.broker.state.jobs.active) == [1]


def test_a_flood_of_sockets_keeps_known_peers_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose socket it is may be forgotten; the keys of workers and readers are remembered with them."""
    monkeypatch.setattr("specq.broker.state.rights.MAX_SOCKETS", 3)
    guarded = Watched()
    guarded.begin()
    guarded.look()
    for number in range(9):
        guarded.say("bob", ListJobs(), identity=b"%d" % number)
    guarded.take_away("bob")
    effects = guarded.commit("gpu", 9)
    assert guarded.broker.state.jobs.active[1].transcript.token_ids == [9]
    assert [type(message) for message in messages(effects, "alice")] == [Tokens]
