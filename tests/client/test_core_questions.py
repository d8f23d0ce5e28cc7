"""Questions to the broker, by the core alone: the tokenizer, who is waited for before it comes, the status."""

import numpy as np

from specq.client.core import STATUS, TOKENIZER, VERIFIER_WAIT_S, ClientCore
from specq.client.events import AwaitedModel, StatusReport, TokenizerReady
from specq.protocol.messages import Failed, FetchTokenizer, GetStatus, Status, TokenizerChunk
from specq.testing.fake_broker import INFO

NO_VERIFIER = Failed(job_id=0, code="no_verifier", reason="none is registered")


def test_a_verifier_is_waited_for():
    """The question is repeated every second; it is said once what for."""
    core = ClientCore("tcp://there:1", 10.0)
    core.fetch_tokenizer("", 0.0)
    events, asked = [], 0
    for tenth in range(1, int(VERIFIER_WAIT_S - 5) * 10):
        now = tenth / 10
        events += core.tick(now)
        questions = core.take_outbox().count(FetchTokenizer())
        asked += questions
        events += core.receive(NO_VERIFIER, now) if questions else []
    assert events == [AwaitedModel(TOKENIZER, "a verifier to register with the broker at tcp://there:1")]
    assert 40 <= asked <= 60
    assert [type(event) for event in core.receive(chunks(b'{"a":"b"}')[0], 55.0)] == [TokenizerReady]


def test_the_wait_for_a_verifier_is_bounded():
    """Then the broker's reason is the error."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0, wait_s=5.0)
    assert [type(event) for event in core.receive(NO_VERIFIER, 4.9)] == [AwaitedModel]
    (failed,) = core.receive(NO_VERIFIER, 5.0)
    assert (failed.error.code, str(failed.error)) == ("no_verifier", "none is registered")


def test_a_broker_is_waited_for():
    """As long as was asked for; what is sent meanwhile is small, since all of it waits for the broker to come."""
    core = ClientCore("tcp://there:1", 10.0)
    core.fetch_tokenizer("", 0.0, wait_s=30.0)
    events, sent = [], core.take_outbox()
    for tenth in range(1, 300):
        events += core.tick(tenth / 10)
        sent += core.take_outbox()
    assert events == [AwaitedModel(TOKENIZER, "a broker at tcp://there:1")]
    assert sent.count(FetchTokenizer()) == 1
    assert sent.count(GetStatus()) == len(sent) - 1 > 5
    (failed,) = core.tick(30.0)
    assert (failed.error.code, "within 30 s" in str(failed.error)) == ("no_broker", True)


def test_a_broker_that_comes():
    """Is asked for the tokenizer again, in case the first question was lost with another one."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0, wait_s=30.0)
    core.tick(20.0)
    core.take_outbox()
    core.receive(Status(report={}), 20.5)
    core.tick(25.0)
    assert core.take_outbox() == [FetchTokenizer()]


# --- tokenizer and status -----------------------------------------------------------------------------------------


def chunks(*texts: bytes, name: str = "fake") -> list[TokenizerChunk]:
    """Return pieces of a tokenizer."""
    model = INFO.__class__(**{f: getattr(INFO, f) for f in INFO.__slots__} | {"name": name})
    pieces = [np.frombuffer(text, np.uint8) for text in texts]
    return [TokenizerChunk(model=model, index=i, count=len(texts), data=p) for i, p in enumerate(pieces)]


def test_tokenizer_in_pieces():
    """Pieces are joined in any order, doubles ignored."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("m", 0.0)
    assert core.take_outbox() == [FetchTokenizer(model="m")]
    a, b, c = chunks(b'{"tokenizer', b'.json"', b':"x"}')
    assert [core.receive(piece, 0.1) for piece in (c, a, c)] == [[], [], []]
    (ready,) = core.receive(b, 0.2)
    assert ready == TokenizerReady(TOKENIZER, INFO, {"tokenizer.json": "x"})
    assert core.receive(b, 0.3) == []


def test_tokenizer_of_another_model_in_between():
    """Pieces of two models are not mixed."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0)
    old, new = chunks(b'{"old', b'":"1"}', name="old"), chunks(b'{"new', b'":"2"}')
    assert [core.receive(piece, 0.1) for piece in (old[0], new[1], new[0])][-1][0].files == {"new": "2"}


def test_tokenizer_that_is_known():
    """With the first piece a known tokenizer is ready; later pieces are ignored."""
    core = ClientCore("", 10.0, recall=lambda first: {"known": "yes"} if first.count == 2 else None)
    core.fetch_tokenizer("", 0.0)
    first, second = chunks(b"{", b"}")
    (ready,) = core.receive(first, 0.1)
    assert ready.files == {"known": "yes"}
    assert core.receive(second, 0.2) == []


def test_tokenizer_that_is_broken():
    """Pieces that make no JSON object of texts end the request with an error."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0)
    (failed,) = core.receive(chunks(b"[]")[0], 0.1)
    assert (failed.key, failed.error.code) == (TOKENIZER, "lost")


def test_no_verifier():
    """A failure without a job is the tokenizer's, at once where nobody wants to wait."""
    core = ClientCore("", 10.0)
    core.fetch_tokenizer("", 0.0, wait_s=0.0)
    (failed,) = core.receive(Failed(job_id=0, code="no_verifier", reason="start one"), 0.1)
    assert (failed.key, failed.error.code) == (TOKENIZER, "no_verifier")


def test_status():
    """A status is asked for, again if need be, and answered once."""
    core = ClientCore("", 10.0)
    core.get_status(0.0)
    core.tick(1.0)
    assert core.take_outbox() == [GetStatus(), GetStatus()]
    assert core.receive(Status(report={"models": []}), 1.1) == [StatusReport(STATUS, {"models": []})]
    assert core.receive(Status(report={"models": []}), 1.2) == []


def test_a_verifier_of_a_model_is_waited_for_by_name():
    """Again where the broker's reason has changed, since it may serve other models by then."""
    core, said = ClientCore("tcp://there:1", 10.0), []
    core.fetch_tokenizer("m", 0.0)
    for now, reason in enumerate(("none", "none", "served are n", "served are n")):
        said += core.receive(Failed(job_id=0, code="no_verifier", reason=reason), float(now))
    assert said == [AwaitedModel(TOKENIZER, "a verifier of model 'm' to register with the broker at tcp://there:1")] * 2
