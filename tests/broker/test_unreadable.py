"""Unreadable or oversized messages: the sender receives the reason, or the message is only counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import orjson
import pytest

from specq.broker import Send
from specq.broker.state.memory import MAX_REASON
from specq.protocol.messages import Cancel, Failed, Follow, GetStatus, Hello, Message, Open, Refused, Submit
from specq.protocol.params import SamplingParams
from specq.protocol.versions import OLDEST_VERSION, PROTOCOL_VERSION, version_spoken
from specq.protocol.wire import MAX_HEADER, MAX_SUBMIT_HEADER, decode, encode
from specq.testing.toy import toy_info
from tests.broker.desk import ANN, VERIFIER, Desk


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
def test_the_sender_of_an_unreadable_message_receives_the_reason(
    frames: list[bytes], reason: str, order: Callable[[list[bytes]], list[bytes]]
) -> None:
    """The sender waits for an answer about its job. The reason is short, even if it quotes a long value."""
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
        damaged(GetStatus(), v=OLDEST_VERSION - 1),
        damaged(SUBMIT, v=OLDEST_VERSION - 1, type="unheard-of"),
        [b"", b""],
    ],
)
def test_what_names_no_job_is_only_counted(frames: list[bytes]) -> None:
    broker = Desk().broker
    assert broker.from_front(ANN, frames, 100.0) == []
    assert broker.state.counts["dropped_front"] == 1


@pytest.mark.parametrize("order", [list, reordered])
@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, PROTOCOL_VERSION + 1])
@pytest.mark.parametrize(
    "message", [SUBMIT, Cancel(job_id=9), Hello(role="draft", name="dan", incarnation=1, model=toy_info())]
)
def test_a_peer_of_another_version_gets_the_error_in_its_version(
    message: Message, version: int, order: Callable[[list[bytes]], list[bytes]]
) -> None:
    """Otherwise it would wait or ask for ever. It ignores messages of other versions."""
    (sent,) = Desk().broker.from_front(ANN, order(damaged(message, v=version)), 100.0)
    assert isinstance(sent, Send)
    header = orjson.loads(sent.frames[1])
    assert (sent.to, header["v"]) == (ANN, version)
    spoken = f"{OLDEST_VERSION} and {PROTOCOL_VERSION}"
    assert f"protocol version {version}; this side speaks {spoken}" in header["reason"]
    assert version_spoken(header["reason"]) == PROTOCOL_VERSION
    assert isinstance(decode([sent.frames[0], orjson.dumps(header | {"v": PROTOCOL_VERSION})]), Refused | Failed)


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
