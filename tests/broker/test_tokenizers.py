"""What the broker keeps of tokenizers: those of verifiers that are there, whole or half received, and no others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specq.protocol.bounds import PIECES
from specq.protocol.messages import Failed, FetchTokenizer, Message, TokenizerChunk
from specq.protocol.wire import encode
from specq.testing.toy import toy_info
from tests.broker.desk import ANN, VERIFIER, Desk

OTHER = b"other"


def piece(
    desk: Desk, verifier: bytes, index: int, count: int = 2, tokenizer: str = "toy-tokenizer", **model_fields: str
) -> list[Message]:
    """Let a verifier send a piece; return what Ann receives."""
    model = replace(toy_info(), tokenizer_hash=tokenizer, **model_fields)
    chunk = TokenizerChunk(model=model, index=index, count=count, data=np.zeros(3, np.uint8))
    return desk.take(desk.broker.from_back(verifier, encode(chunk), desk.now), ANN)


def leave(desk: Desk, verifier: bytes) -> None:
    desk.leave(verifier)
    desk.take(desk.broker.tick(desk.now))


def kept(desk: Desk) -> int:
    """Return how many tokenizers, parts of some, and waiting clients the broker remembers."""
    known = desk.broker.tokenizers
    return len(known._known) + len(known._pieces) + len(known._waiting) + len(known._asked)


def asked(desk: Desk) -> list[bytes]:
    return [to for to, message in desk.sent if isinstance(message, FetchTokenizer)]


def test_a_tokenizer_goes_with_the_last_verifier_that_has_it() -> None:
    """A client that asks later is refused, since there is none, or gets it from a verifier that comes back."""
    desk = Desk()
    desk.hello(OTHER)
    desk.front(ANN, FetchTokenizer())
    assert [len(piece(desk, VERIFIER, index)) for index in (0, 1)] == [0, 2]
    leave(desk, VERIFIER)
    assert len(desk.front(ANN, FetchTokenizer())) == 2
    leave(desk, OTHER)
    assert kept(desk) == 0
    (failed,) = desk.front(ANN, FetchTokenizer())
    assert isinstance(failed, Failed)
    desk.hello(b"third")
    desk.front(ANN, FetchTokenizer())
    assert asked(desk)[-1] == b"third"


def test_a_half_received_tokenizer_goes_with_its_sender() -> None:
    """A client that waits for it is served by another verifier that has the same, without asking again."""
    desk = Desk()
    desk.hello(OTHER)
    desk.front(ANN, FetchTokenizer())
    piece(desk, VERIFIER, 0)
    leave(desk, VERIFIER)
    assert asked(desk) == [VERIFIER, OTHER]
    assert piece(desk, OTHER, 1) == []
    assert len(piece(desk, OTHER, 0)) == 2
    desk.front(ANN, FetchTokenizer())
    leave(desk, OTHER)
    assert kept(desk) == 0


def test_a_hundred_dead_verifiers_leave_no_state() -> None:
    """Each with a tokenizer of its own, some pieces of it received."""
    desk = Desk()
    leave(desk, VERIFIER)
    for number in range(100):
        name = b"v%d" % number
        desk.hello(name)
        desk.front(ANN, FetchTokenizer())
        piece(desk, name, 0)
        piece(desk, name, 1, count=2 + number % 2)
        leave(desk, name)
    assert kept(desk) == 0


def test_a_verifier_sends_only_its_own_tokenizer() -> None:
    """The number of pieces is bounded. Invented pieces take no memory and reach no client."""
    desk = Desk()
    desk.front(ANN, FetchTokenizer())
    before = kept(desk)
    for number in range(50):
        assert piece(desk, VERIFIER, 0, count=1, tokenizer=f"made up {number}") == []
    for index, count in ((0, int(PIECES.high) + 1), (5, 2), (-1, 2), (0, 0)):
        assert piece(desk, VERIFIER, index, count) == []
    assert (kept(desk), desk.broker.state.counts["dropped_back"]) == (before, 54)


def test_models_of_one_vocabulary_have_files_of_their_own() -> None:
    """Their chat templates may differ, and what else a client learns with the files."""
    desk = Desk()
    desk.hello(OTHER, name="chat")
    for verifier, name in ((VERIFIER, toy_info().name), (OTHER, "chat")):
        desk.front(ANN, FetchTokenizer(model=name))
        assert asked(desk)[-1] == verifier
        (received,) = piece(desk, verifier, 0, count=1, name=name)
        assert isinstance(received, TokenizerChunk)
        assert received.model.name == name
        assert desk.front(ANN, FetchTokenizer(model=name)) == [received]


@pytest.mark.parametrize(
    ("served", "wanted", "said"),
    [
        ((), "smolm2", "no verifier of model 'smolm2' is registered with this broker; start one: "),
        (("tiny",), "smolm2", "with this broker; served: tiny; start one: "),
        (("tiny", "smollm2"), "smolm2", "; served: smollm2, tiny; did you mean 'smollm2'? Or start one: "),
    ],
)
def test_who_asks_for_a_model_that_is_not_served_learns_what_is(served, wanted, said):
    desk = Desk()
    desk.leave()
    for name in served:
        desk.hello(name.encode(), name=name)
    (refused,) = desk.front(ANN, FetchTokenizer(model=wanted))
    assert f"{said}specq worker --role target" in refused.reason
    (refused,) = desk.submit(1, model=wanted)
    assert (refused.code, said in refused.reason) == ("no_verifier", True)
