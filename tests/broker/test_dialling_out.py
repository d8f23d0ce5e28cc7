"""A verifier without an address: the broker takes its messages at the front, from nobody else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specq.broker import Broker, Connect, Send
from specq.broker.gate import MOST_UNANSWERED
from specq.protocol import (
    Assign,
    Draft,
    Failed,
    FetchTokenizer,
    Heartbeat,
    Hello,
    Message,
    Open,
    SamplingParams,
    SessionFailed,
    Submit,
    TokenizerChunk,
    Tokens,
    Verdict,
    Welcome,
    decode,
    encode,
)
from specq.protocol.versions import CAPABILITIES, DIALS_OUT
from specq.testing.toy import toy_info
from specq.transport.keys import Grant

KEYS = {"gpu": "target", "other": "target", "laptop": "draft", "alice": "client"}
HELLO = Hello(role="target", name="gpu", incarnation=1, model=toy_info(), max_sessions=2000, capabilities=CAPABILITIES)


class Place:
    """A broker with such a verifier, a drafter and a client, each with a key and a socket of its name."""

    def __init__(self, *, has_keys: bool = True) -> None:
        self.grants = {name: Grant(name, name.encode(), (role,)) for name, role in KEYS.items()}
        self.has_keys, self.now = has_keys, 100.0
        self.broker = Broker(incarnation=1, grants=self.grants if has_keys else None)
        self.counts = self.broker.state.counts
        self.welcomed = self.say("gpu", HELLO)

    def say(self, who: str, message: Message, identity: str = "") -> list[Message]:
        """Send a message with a key; return all that the broker sends."""
        frames, key = encode(message), who if self.has_keys else ""
        effects = self.broker.from_front((identity or who).encode(), frames, self.now, key)
        assert not any(isinstance(effect, Connect) and effect.to == b"gpu" for effect in effects)
        sends = [effect for effect in effects if isinstance(effect, Send)]
        return [decode(effect.frames) for effect in sends]

    def begin(self) -> Open:
        """Submit job 1; return what the verifier receives."""
        params = SamplingParams(max_tokens=50)
        sent = self.say("alice", Submit(job_id=1, params=params, prompt_ids=np.array([5, 6], np.int32)))
        (opened,) = (message for message in sent if isinstance(message, Open))
        return opened

    @property
    def text(self) -> list[int]:
        return list(self.broker.state.jobs.active[1].transcript.token_ids)


def verdict(opened: Open, *tokens: int) -> Verdict:
    return Verdict(session_id=1, epoch=opened.epoch, base_len=2, token_ids=np.array(tokens))


def chunk() -> TokenizerChunk:
    return TokenizerChunk(model=toy_info(), index=0, count=1, data=np.zeros(1, np.uint8))


def test_it_registers_and_serves_jobs_over_the_front() -> None:
    """The broker connects to nobody, and says that it can do so."""
    place = Place()
    (welcome,) = (message for message in place.welcomed if isinstance(message, Welcome))
    assert DIALS_OUT in welcome.capabilities
    opened = place.begin()
    assert place.broker.reaches_by_front(b"gpu")
    (tokens,) = place.say("gpu", verdict(opened, 7, 8))
    assert isinstance(tokens, Tokens)
    assert (place.text, tokens.token_ids.tolist()) == ([7, 8], [7, 8])
    assert any(isinstance(message, FetchTokenizer) for message in place.say("alice", FetchTokenizer()))
    assert any(isinstance(message, TokenizerChunk) for message in place.say("gpu", chunk()))
    failed = place.say("gpu", SessionFailed(session_id=1, epoch=opened.epoch, reason="no room"))
    assert any(isinstance(message, Failed) for message in failed)


@pytest.mark.parametrize("has_keys", [True, False])
def test_nobody_else_commits_tokens_at_the_front(has_keys: bool) -> None:
    """No client, drafter, unknown socket, or verifier that does not dial out."""
    place = Place(has_keys=has_keys)
    place.say("laptop", Hello(role="draft", name="laptop", incarnation=2, model=replace(toy_info(), fingerprint="d")))
    place.say("other", replace(HELLO, name="other", incarnation=3, endpoint="tcp://127.0.0.1:1"))
    opened = place.begin()
    place.say("alice", FetchTokenizer())
    for who, identity in (("laptop", ""), ("alice", ""), ("other", ""), ("gpu", "stranger")):
        for forged in (verdict(opened, 9), chunk(), SessionFailed(session_id=1, epoch=opened.epoch, reason="x")):
            assert place.say(who, forged, identity) == [], who
    assert place.text == []
    assert place.counts["forbidden"] + place.counts["dropped_front"] == 12


def test_another_key_does_not_speak_for_it() -> None:
    """Not even from its socket's identity. A key that is taken away has no effect at once."""
    place = Place()
    opened = place.begin()
    assert place.say("alice", verdict(opened, 9), "gpu") == []
    del place.grants["gpu"]
    assert place.say("gpu", verdict(opened, 9)) == []
    assert (place.text, place.counts["forbidden"]) == ([], 2)


def test_drafts_leave_room_for_what_must_arrive() -> None:
    """Its queue is a client's. Until it says something, it is sent no more drafts than half of it holds."""
    place = Place(has_keys=False)
    place.begin()
    drafter = Hello(role="draft", name="laptop", incarnation=2, model=replace(toy_info(), fingerprint="d"))
    (assigned,) = (message for message in place.say("laptop", drafter) if isinstance(message, Assign))

    def draft() -> bool:
        message = Draft(
            session_id=1, epoch=assigned.epoch, lane=assigned.lane, base_len=2, first_id=0,
            token_ids=np.array([7]), parent_ids=np.array([-1]), scores=np.array([0.0]),
        )  # fmt: skip
        place.now += 0.001  # within its share of the verifier's time, and before the verifier counts as silent
        return any(isinstance(message, Draft) for message in place.say("laptop", message))

    verifier = place.broker.state.workers.get(b"gpu")
    assert verifier is not None
    assert all(draft() for _ in range(MOST_UNANSWERED))
    assert not draft()
    assert place.counts["limited_drafts"] == 1
    place.say("gpu", Heartbeat(incarnation=1, state="ready", pending=1))
    assert draft()


def test_bytes_of_a_worker_are_counted_both_ways() -> None:
    """What it sends when it arrives, what it receives when its socket has taken it."""
    place = Place()
    worker = place.broker.state.workers.get(b"gpu")
    assert worker is not None
    beat = Heartbeat(incarnation=1, state="ready")
    place.say("gpu", beat)
    assert worker.sent_bytes == sum(map(len, encode(beat)))
    place.broker.note_sent(Send("front", b"gpu", [b"12345678", b"12"]))
    place.broker.note_sent(Send("front", b"alice", [b"12345678", b"12"]))
    assert worker.received_bytes == 10
