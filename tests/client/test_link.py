"""The client's I/O thread: each call arrives, and the thread is woken no more often than needed."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from specq.client import link as link_module
from specq.client.core import ClientCore
from specq.client.link import GIVE_WAY_S, STARVED_S, Link
from specq.protocol import JobError

PATIENCE_S = 60.0
NUM_THREADS, NUM_CALLS = 8, 50


@pytest.fixture
def link():
    made = Link(ClientCore("tcp://127.0.0.1:9", 10.0))
    yield made
    made.close()


class Counting:
    """A socket that counts what it sends."""

    def __init__(self, socket):
        self._socket, self.num_sent = socket, 0

    def send(self, data):
        self.num_sent += 1
        return self._socket.send(data)

    def close(self):
        self._socket.close()


def test_calls_of_many_threads_all_arrive(link):
    done, heard = threading.Semaphore(0), []

    def ask(number):
        for turn in range(NUM_CALLS):
            link.call(lambda core, now, said=(number, turn): (heard.append(said), done.release())[1])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)

    assert all(done.acquire(timeout=PATIENCE_S) for _ in range(NUM_THREADS * NUM_CALLS))
    assert sorted(heard) == [(number, turn) for number in range(NUM_THREADS) for turn in range(NUM_CALLS)]


def test_a_busy_thread_is_woken_once_for_all_that_wait(link):
    busy, go, done = threading.Event(), threading.Event(), threading.Semaphore(0)
    link.call(lambda core, now: (busy.set(), go.wait(PATIENCE_S))[0])
    assert busy.wait(PATIENCE_S)
    link._waker = counting = Counting(link._waker)

    for _ in range(NUM_CALLS):
        link.call(lambda core, now: done.release())
    go.set()

    assert all(done.acquire(timeout=PATIENCE_S) for _ in range(NUM_CALLS))
    assert counting.num_sent == 1


class Interrupted(Counting):
    """A socket whose first message is kept from being sent."""

    def send(self, data):
        if not self.num_sent:
            self.num_sent += 1
            raise KeyboardInterrupt
        return super().send(data)


def test_a_call_with_an_interrupted_wake_up_still_arrives(link):
    """And so are those after it, which need not wake the thread."""
    link._waker = Interrupted(link._waker)
    done = threading.Semaphore(0)
    with pytest.raises(KeyboardInterrupt):
        link.call(lambda core, now: done.release())
    link.call(lambda core, now: done.release())

    assert all(done.acquire(timeout=PATIENCE_S) for _ in range(2))


def test_what_is_asked_meanwhile_waits_until_the_rest_is_sent(link, monkeypatch):
    """Else a thread that asks on and on would have nothing sent before it ends."""
    happened, done, flush = [], threading.Event(), link._flush
    monkeypatch.setattr(link, "_flush", lambda: (happened.append("sent"), flush())[1])

    def second(core, now):
        happened.append("second")
        done.set()

    def first(core, now):
        happened.append("first")
        link.call(second)

    link.call(first)
    assert done.wait(PATIENCE_S)
    begun = happened.index("first")
    assert happened[begun : begun + 3] == ["first", "sent", "second"]


def test_a_busy_caller_yields_to_the_io_thread(link, monkeypatch):
    """Once in a while, when the I/O thread has not looked for that long; it never waits for itself."""
    slept, busy, go, own = [], threading.Event(), threading.Event(), []

    def hold(core, now):
        link._is_woken, link._woken_at = True, float("-inf")
        link.call(lambda core, now: None)  # of the I/O thread itself
        own.extend(slept)
        busy.set()
        go.wait(PATIENCE_S)

    monkeypatch.setattr(link_module.time, "sleep", slept.append)
    link.call(hold)
    assert busy.wait(PATIENCE_S)
    now = 100.0
    monkeypatch.setattr(link_module.time, "monotonic", lambda: now)
    for now in (100.0, 100.0 + STARVED_S / 2, 100.0 + 2 * STARVED_S):
        link._woken_at = -1.0 if now == 100.0 else link._woken_at
        link.call(lambda core, now: None)
    go.set()
    assert own == []
    assert slept == [GIVE_WAY_S] * 2


class Late(deque):
    """Actions, of which some thread's come when the I/O thread has ended: it had looked whether the client was closed
    before."""

    def __init__(self, link):
        super().__init__(link._actions)
        self.link, self.asked, self.late = link, threading.Event(), None

    def append(self, action):
        if threading.current_thread() is self.late:
            self.asked.set()
            self.link._thread.join(PATIENCE_S)
        super().append(action)


def test_what_is_asked_while_the_client_closes_is_refused_and_not_forgotten(link):
    link._actions = actions = Late(link)
    errors = []

    def ask():
        try:
            link.request(1, lambda event: None, lambda core, now: None)
        except JobError as error:
            errors.append(error)

    actions.late = threading.Thread(target=ask)
    actions.late.start()
    assert actions.asked.wait(PATIENCE_S)
    link.close()
    actions.late.join(PATIENCE_S)

    assert [error.code for error in errors] == ["lost"]
    assert not actions
