"""Garbage and messages of another version: a few thousand here, 100,000 in `make chaos`."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from specq.broker import Send
from specq.protocol import Cancel, Follow, Hello, Submit
from specq.protocol.errors import ProtocolError
from specq.protocol.messages import Assign, Message, Verdict
from specq.protocol.params import SamplingParams
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION
from specq.protocol.wire import Frames, decode, encode
from tests.chaos.fuzz import PARTIES, PROMPT, Parties, fuzz, real_messages


def test_nothing_that_comes_stops_anybody() -> None:
    """ProtocolError is all that is raised, and each party hears both what it takes and what it refuses."""
    counts = fuzz(3000)
    assert sum(counts.values()) == 3000
    assert all(counts[f"{name} took or dropped"] > 10 for name in PARTIES)
    assert all(counts[f"{name} refused"] > 10 for name in PARTIES if not name.startswith("broker"))


def of_version(version: int, frames: Frames) -> Frames:
    return [frames[0], orjson.dumps(orjson.loads(frames[1]) | {"v": version}), *frames[2:]]


@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_version_that_is_too_far_is_refused_by_all(version: int) -> None:
    """Its sender is counted and dropped, whatever it says, and told so at most; nothing changes."""
    parties = Parties()
    before = list(parties.broker.state.jobs.active[1].transcript.token_ids)
    for message in real_messages():
        frames = of_version(version, encode(message))
        with pytest.raises(ProtocolError, match="protocol version"):
            decode(frames)
        told = [sent.frames[1] for sent in parties.broker.from_front(b"c", frames, 0.0) if isinstance(sent, Send)]
        assert all(b"this side speaks" in header and b'"v":%d' % version in header for header in told)
        assert len(told) == (type(message) in (Hello, Submit, Follow, Cancel))
        assert parties.broker.from_back(b"v", frames, 0.0) == []
    counts = parties.broker.state.counts
    assert counts["dropped_front"] + counts["dropped_back"] == 2 * len(real_messages())
    assert parties.broker.state.jobs.active[1].transcript.token_ids == before


@pytest.mark.parametrize(
    "message",
    [
        Assign(session_id=2, epoch=1, lane=0, prompt_len=0, params=SamplingParams(), token_ids=np.array([], np.int32)),
        Assign(session_id=2, epoch=1, lane=0, prompt_len=4, params=SamplingParams(), token_ids=PROMPT),
        Assign(session_id=2, epoch=1, lane=0, prompt_len=3, params=SamplingParams(), token_ids=-PROMPT),
        Verdict(session_id=1, epoch=1, base_len=3, token_ids=np.array([-1])),
    ],
    ids=["no context", "a prompt beyond the context", "no tokens", "a verdict without sense"],
)
def test_a_drafter_takes_no_nonsense(message: Message) -> None:
    """What a model could not be given is refused, and the sessions that there are go on."""
    parties = Parties()
    with pytest.raises(ProtocolError):
        parties.drafter.handle(message)
    assert list(parties.drafter.sessions) == [1]
    assert parties.drafter.step()
