"""Who reads a job: several clients, bounded, refilled by position, forgotten when they are gone."""

from __future__ import annotations

from specq.broker import Send
from specq.broker.state.transcript import MAX_MISSED, MAX_READERS
from specq.protocol.messages import Follow, JobInfo, Tokens
from specq.protocol.wire import encode
from tests.broker.desk import ANN, BEN, Desk, desk_with, token_ids


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


def test_the_end_is_sent_after_the_journal_write() -> None:
    """Not before, to a client that comes in between either."""
    desk = Desk(has_journal=True)
    desk.submit(1)
    desk.verdict(1, 7)
    desk.journaled()
    desk.verdict(1, 8, finish="stop")
    (_, tokens) = desk.front(BEN, Follow(job_id=1))
    assert (tokens.token_ids.tolist(), tokens.finish) == ([7], "")
    assert [(one.token_ids.tolist(), one.finish) for one in desk.journaled(BEN)] == [([8], "stop")]


def test_readers_are_bounded() -> None:
    """Of too many, the one that came first is dropped; it may come again."""
    desk = desk_with(1)
    for i in range(2 * MAX_READERS):
        desk.front(b"reader %d" % i, Follow(job_id=1))
    desk.sent.clear()
    desk.verdict(1, 7)
    assert len(desk.received(b"", Tokens)) == MAX_READERS


def test_a_slow_reader_is_refilled_by_position() -> None:
    """Missed tokens are sent again as one message at the next tick. No message is sent in between."""
    desk = desk_with(1)
    (missed,) = desk.verdict(1, 7, 8)
    desk.broker.undelivered(Send("front", ANN, encode(missed)))
    assert desk.verdict(1, 9) == []
    assert token_ids(desk.tick()) == [7, 8, 9]


def test_a_lost_reader_is_dropped_after_some_ticks() -> None:
    """After some ticks no message is sent to it. The job runs on, and a returning client gets all tokens."""
    desk = desk_with(1)
    desk.verdict(1, 7)
    for _ in range(MAX_MISSED + 2):
        for message in desk.tick():
            desk.broker.undelivered(Send("front", ANN, encode(message)))
    assert desk.job(1).readers.by_client != {}
    desk.verdict(1, 8)
    for _ in range(MAX_MISSED + 2):
        desk.broker.undelivered(Send("front", ANN, encode(Tokens(job_id=1, base_len=0, token_ids=[], origins=[]))))
        desk.tick()
    assert desk.job(1).readers.by_client == {}
    assert desk.verdict(1, 9) == []
    assert token_ids(desk.submit(1)) == [7, 8, 9]
