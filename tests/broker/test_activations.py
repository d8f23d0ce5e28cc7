"""Hidden states pass from a verifier only to the drafter that asked for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specq.broker import Broker
from specq.protocol import Activations, Assign, GetActivations, Heartbeat, Hello, Open, Refused, Release, encode
from specq.testing.toy import toy_info
from specq.transport import Grant
from tests.broker.desk import VERIFIER, Desk

DRAFTER, OTHER = b"drafter", b"other"
ASKED: dict[str, Any] = {"tap_layers": (0, 1), "tap_form": "int8", "tap_window": 32}


@pytest.fixture
def desk() -> Desk:
    """A broker with a verifier, a drafter that reads hidden states, and a job that both have."""
    desk = Desk()
    desk.front(DRAFTER, hello())
    desk.submit(1)
    return desk


def hello(**changes: Any) -> Hello:
    return Hello(**{"role": "draft", "name": "reader", "incarnation": 2, "model": toy_info(), **ASKED, **changes})


def states(desk: Desk, **changes: Any) -> list[bytes]:
    """The frames of a row of a job's text, from its verifier."""
    job = desk.job(1)
    (lane,) = job.drafters.lanes or (0,)
    row: dict[str, Any] = {"data": np.zeros(6, np.uint8), "scales": np.zeros(2, np.float32)}
    fields = {"session_id": 1, "epoch": job.session.epoch, "lane": lane, "first": 1, "width": 6, **row}
    return encode(Activations(**{**fields, "tap_layers": (0, 1), "tap_form": "int8", **changes}))


def passed(desk: Desk, frames: list[bytes], verifier: bytes = VERIFIER) -> list[tuple[bytes, Any]]:
    """What is sent to whom when a verifier sends these frames."""
    before = len(desk.sent)
    desk.take(desk.broker.from_back(verifier, frames, desk.now))
    return desk.sent[before:]


def asked(desk: Desk) -> list[GetActivations]:
    return desk.received(VERIFIER, GetActivations)


def beat(desk: Desk) -> None:
    """The drafter says that it has its session, and all of its text."""
    job = desk.job(1)
    held = {"session_ids": [1], "epochs": [job.session.epoch], "lengths": [job.transcript.length]}
    desk.front(DRAFTER, Heartbeat(incarnation=2, state="ready", **{name: np.array(one) for name, one in held.items()}))


def test_a_verifier_is_asked_behind_the_session_that_it_opens(desk: Desk) -> None:
    """For the lane of the drafter that reads them; of one that does not, nothing is asked."""
    kinds = [type(message) for to, message in desk.sent if to == VERIFIER]
    assert kinds[-2:] == [Open, GetActivations]
    (assign,) = desk.received(DRAFTER, Assign)
    (message,) = asked(desk)
    assert message == GetActivations(session_id=1, epoch=assign.epoch, lane=assign.lane, **ASKED)
    desk.front(OTHER, hello(tap_layers=(), model=toy_info("other"), incarnation=3))
    assert len(asked(desk)) == 1


def test_they_reach_the_drafter_of_their_lane(desk: Desk) -> None:
    frames = states(desk)
    ((to, message),) = passed(desk, frames)
    assert (to, encode(message)) == (DRAFTER, frames)


def test_others_are_not_passed_on(desk: Desk) -> None:
    """Of another epoch or session, malformed, or for a silent drafter. For a lost lane the verifier receives a stop."""
    assert passed(desk, states(desk, epoch=1)) == passed(desk, states(desk, session_id=2)) == []
    assert passed(desk, [*states(desk)[:-1], b"123"]) == []
    assert passed(desk, [*states(desk)[:-2], bytes((1 << 20) + 1)]) == []
    assert desk.broker.state.counts["dropped_back"] == 2
    desk.now += 10
    assert passed(desk, states(desk)) == []
    ((to, message),) = passed(desk, states(desk, lane=77))
    epoch = desk.job(1).session.epoch
    assert (to, message) == (VERIFIER, GetActivations(session_id=1, epoch=epoch, lane=77))


def test_a_silent_verifier_is_asked_again(desk: Desk) -> None:
    """The request may be lost. It is repeated at each drafter heartbeat if no rows passed since the last one."""
    beat(desk)
    assert len(asked(desk)) == 2
    passed(desk, states(desk))
    beat(desk)
    assert len(asked(desk)) == 2
    beat(desk)
    assert len(asked(desk)) == 3
    assert len({message.lane for message in asked(desk)}) == 1


def test_only_trusted_drafters_read_hidden_states() -> None:
    """With keys; another is refused, with the reason. One that reads none is not."""
    grants = {name: Grant(name, name.encode(), ("draft",), trusted=name == "friend") for name in ("friend", "stranger")}
    broker = Broker(incarnation=1, grants=grants)
    desk = Desk()
    desk.broker = broker

    def say(who: str, message: Hello) -> Any:
        return desk.take(broker.from_front(who.encode(), encode(message), desk.now, who), who.encode())[0]

    refused = say("stranger", hello())
    assert isinstance(refused, Refused)
    assert "whose key was made with specq keys --trusted" in refused.reason
    assert not isinstance(say("friend", hello(incarnation=3)), Refused | Release)
    assert not isinstance(say("stranger", hello(tap_layers=(), incarnation=4)), Refused | Release)
