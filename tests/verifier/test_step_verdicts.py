"""The verdicts of a step as one message of arrays say what verdicts one by one say, and a broker takes them alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specq.protocol import (
    REMOTE,
    Draft,
    Message,
    Open,
    ProtocolError,
    SamplingParams,
    Verdict,
    Verdicts,
    decode,
    encode,
)
from specq.testing.toy import ToyEngine, toy_text
from specq.verifier import StepCurve, Verifier
from specq.verifier.step import verdicts
from tests.broker.desk import VERIFIER, Desk, token_ids

NUM, LENGTH = 9, 12


def make_verifier(**params: Any) -> Verifier:
    """Return a verifier with sessions; every third has a draft, one of its nodes wrong, some in two lanes."""
    verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.01, 0.0101]), incarnation=1)
    for i in range(NUM):
        prompt = np.array([i + 1, 2, 3], np.int32)
        asked = SamplingParams(max_tokens=LENGTH, **(params if i == 4 else {}))
        said = {"session_id": i, "epoch": i + 5, "prompt_len": 3, "tokens_left": LENGTH - i}
        verifier.handle(Open(**said, params=asked, token_ids=prompt), 0.0)
    for i in range(0, NUM, 3):
        for lane in range(1 + i % 2):
            tokens = [*toy_text([i + 1, 2, 3], 2), 9]
            draft = Draft(
                session_id=i, epoch=i + 5, lane=lane, base_len=3, first_id=0, token_ids=np.array(tokens, np.int32),
                parent_ids=np.array([-1, 0, 1], np.int32), scores=np.full(3, -0.01, np.float16),
            )  # fmt: skip
            verifier.handle(draft, 0.0)
    assert REMOTE in verifier.policy.allowed
    return verifier


def said(messages: list[Message]) -> list[Verdict]:
    """Return messages in the order of their sessions, with nothing left out that a verdict may leave out."""
    full = []
    for message in messages:
        assert isinstance(message, Verdict)
        lanes = message.node_lanes if len(message.node_lanes) else np.full(len(message.node_ids), message.seen[:1])
        origins = message.origins if len(message.origins) else np.full(len(message.token_ids), 2)
        full.append(replace(message, node_lanes=lanes, origins=origins))
    return sorted(full, key=lambda message: message.session_id)


@pytest.mark.parametrize("params", [{}, {"logprobs": 0}])
def test_they_say_the_same(params: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step, until all sessions have ended, wherever a session ends or asks for log-probabilities."""
    together = make_verifier(**params)
    alone, num_packed = make_verifier(**params), 0
    while together.has_work:
        reports = together.step(lambda: 1.0)
        packed = [decode(encode(message)) for message in reports.packed()]
        num_packed += sum(isinstance(message, Verdicts) for message in packed)
        unpacked = [
            one for message in packed for one in (message.each() if isinstance(message, Verdicts) else [message])
        ]
        with monkeypatch.context() as patch:
            patch.setattr(verdicts, "MANY", NUM + 1)
            expected = alone.step(lambda: 1.0)
        assert len(expected.packed()) == len(expected)
        assert said(unpacked) == said(list(reports)) == said(list(expected))
        for reader, part in reports.by_reader(lambda session_id: session_id % 2):
            theirs = [
                one for message in part for one in (message.each() if isinstance(message, Verdicts) else [message])
            ]
            assert said(theirs) == said([one for one in unpacked if one.session_id % 2 == reader])
            assert sum(isinstance(message, Verdicts) for message in part) <= 1
    assert num_packed > 3


def of_arrays(**changes: Any) -> Verdicts:
    fields: dict[str, Any] = {
        "session_ids": [1, 2], "epochs": [1, 1], "base_lens": [2, 2], "num_tokens": [1, 2], "num_nodes": [0, 1],
        "num_seen": [0, 2], "waited_us": [0, 5], "token_ids": [7, 8, 9], "origins": [2, 4, 2], "node_ids": [0],
        "mask": [1], "node_lanes": [0], "seen": [0, 3],
    }  # fmt: skip
    return Verdicts(**{name: np.array(value) for name, value in (fields | changes).items()}, min_accept_prob=300)


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": [1]}, {"num_tokens": [1, 1]}, {"num_tokens": [1, 2**31 - 1]}, {"origins": [2]}, {"mask": []},
        {"node_lanes": [0, 0]},
        {"seen": [0]}, {"num_nodes": [1, 1]}, {"session_ids": [1, 2, 3]},
    ],
    ids=str,
)  # fmt: skip
def test_arrays_that_do_not_fit_together_are_refused(changes: dict[str, list[int]]) -> None:
    """As a whole: the broker commits nothing of them."""
    found = decode(encode(of_arrays(**changes)))
    assert isinstance(found, Verdicts)
    with pytest.raises(ProtocolError, match="do not fit together"):
        found.each()
    desk = Desk()
    desk.submit(1, max_tokens=10)
    assert desk.take(desk.broker.from_back(VERIFIER, encode(of_arrays(**changes)), desk.now)) == []
    assert desk.broker.state.counts["dropped_back"] == 1
    assert desk.broker.state.jobs.active[1].transcript.num_tokens == 0


def test_a_broker_takes_each_as_if_it_came_alone() -> None:
    """Of a session that it does not know, nothing; and none twice."""
    desk = Desk()
    desk.submit(1, max_tokens=10)
    desk.submit(2, max_tokens=10)
    epochs = [desk.broker.state.jobs.active[i].session.epoch for i in (1, 2)]
    message = encode(of_arrays(epochs=epochs))
    effects = desk.broker.from_back(VERIFIER, message, desk.now)
    assert token_ids(desk.take(effects, b"ann")) == [7, 8, 9]
    jobs = desk.broker.state.jobs.active
    assert [jobs[i].transcript.token_ids for i in (1, 2)] == [[7], [8, 9]]
    assert (jobs[2].stats.draft_tokens, jobs[2].transcript.origins) == (1, bytearray([4, 2]))
    desk.take(desk.broker.from_back(VERIFIER, message, desk.now))
    desk.take(desk.broker.from_back(VERIFIER, encode(of_arrays(epochs=[epochs[0], 77])), desk.now))
    assert [jobs[i].transcript.token_ids for i in (1, 2)] == [[7], [8, 9]]
    assert desk.broker.state.counts["late_verdicts"] == 1
