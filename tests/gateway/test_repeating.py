"""Exactly once over HTTP, against a real broker with a journal and a toy model: disconnects, repeats, restarts,
conflicts."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import orjson
import pytest

from specq.client import Client
from specq.testing import ToyEngine, wait_until
from specq.testing.secured import Secured, served
from specq.text.codec import TextCodec
from tests.each import each
from tests.gateway.serving import PATH, connected, running

BODY = {"prompt": "duck eggs", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def is_fast(monkeypatch):
    """Until it is set, each step of the toy takes 10 ms."""
    event, step = threading.Event(), ToyEngine.step

    def delayed(self, steps, *tap):
        event.wait(0.01)
        return step(self, steps, *tap)

    monkeypatch.setattr(ToyEngine, "step", delayed)
    return event


@pytest.fixture
def world(tmp_path, is_fast, own_cache):
    with served("", journal=str(tmp_path / "journal")) as one:
        with Client(one.address) as client:
            client.wait_until_ready()
        yield one


@pytest.fixture
def http(world: Secured):
    with running(world.address) as gateway, connected(gateway) as client:
        yield client


def events_of(text: str) -> list[tuple[str, dict]]:
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
        if lines.get("data", "[DONE]") != "[DONE]":
            found.append((lines.get("id", ""), orjson.loads(lines["data"])))
    return found


def text_of(events) -> str:
    return "".join(choice["text"] for _, event in events for choice in event["choices"])


def whole(http, is_fast, **headers):
    is_fast.set()
    response = http.post(PATH, json=STREAM, headers={"Idempotency-Key": "whole", **headers})
    is_fast.clear()
    return response.text


@contextmanager
def broken(http, key="k", body=STREAM):
    """Read a stream's first events, and break off; yield what was read."""
    read = ""
    with http.stream("POST", PATH, json=body, headers={"Idempotency-Key": key} if key else {}) as response:
        for text in response.iter_text():
            read += text
            if read.count("data:") >= 3:
                break
    yield events_of(read)


def states(world):
    with Client(world.address) as client:
        return client.status()["jobs"]


def test_a_disconnect_stops_the_job(world, http, is_fast):
    with broken(http, key=""):
        wait_until(lambda: world.broker.broker.state.counts["finished_cancelled"] == 1)


def test_with_a_key_the_job_runs_on_and_the_stream_is_taken_up_again(world, http, is_fast):
    """Also if the reader left before its end. The text is the same, and each part of it comes once."""
    reference = events_of(whole(http, is_fast))
    with broken(http) as read:
        last = read[-1][0]
    is_fast.set()
    wait_until(lambda: states(world)["running"] == 0)
    rest = http.post(PATH, json=STREAM, headers={"Idempotency-Key": "k", "Last-Event-ID": last})

    assert text_of(read) + text_of(events_of(rest.text)) == text_of(reference)
    assert len(text_of(reference)) > 20
    assert rest.text.endswith("data: [DONE]\n\n")
    assert world.broker.broker.state.counts["jobs"] == 2


@each("place", range(0, 300, 41))
def test_every_event_is_a_place_to_go_on_from(http, is_fast, place):
    """Toy text has broken characters, so that what is held back matters."""
    reference = events_of(whole(http, is_fast))
    cut = min(place, len(reference) - 2)
    rest = whole(http, is_fast, **{"Last-Event-ID": reference[cut][0]})

    assert text_of(reference[: cut + 1]) + text_of(events_of(rest)) == text_of(reference)


def test_repeating_while_it_runs_joins(http, is_fast):
    """Two read one job at the same time; one leaves, and the other has all of it."""
    with broken(http) as read:
        is_fast.set()
        rest = http.post(PATH, json=STREAM, headers={"Idempotency-Key": "k"})

    assert text_of(events_of(rest.text)).startswith(text_of(read))
    assert events_of(rest.text)[-1][1]["usage"]["completion_tokens"] == 300


def test_in_one_it_is_the_same_answer(http, is_fast, world):
    is_fast.set()
    first, again = (http.post(PATH, json=BODY, headers={"Idempotency-Key": "k"}).json() for _ in range(2))

    assert first["choices"] == again["choices"]
    assert first["id"] == again["id"]
    assert world.broker.broker.state.counts["jobs"] == 1


def test_a_chat_with_the_date_in_its_template_is_the_same_on_another_day(http, is_fast, world, monkeypatch):
    """A prompt that is longer by then, and leaves less room for the text, changes nothing."""
    render, days = TextCodec.render_chat, iter(("1 May", "10 December", "2 May"))
    monkeypatch.setattr(
        TextCodec, "render_chat", lambda *given, **named: f"Today is {next(days)}. {render(*given, **named)}"
    )
    body = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "stop": ["a", "e"], "stream": True}
    is_fast.set()
    first, later, other = (
        http.post("/v1/chat/completions", json=body | change, headers={"Idempotency-Key": "k"})
        for change in ({}, {}, {"stream": False})
    )
    assert text_of_chat(first.text) == text_of_chat(later.text) != ""
    assert (first.status_code, later.status_code, other.status_code) == (200, 200, 409)
    assert world.broker.broker.state.counts["jobs"] == 1


def text_of_chat(text: str) -> str:
    choices = [choice for _, event in events_of(text) for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@each("change", [{"max_tokens": 301}, {"user": "x"}, {"prompt": "duck"}, {"stream": False}])
def test_the_same_key_with_another_body_is_a_conflict(http, is_fast, change):
    """Also where the jobs would be the same."""
    is_fast.set()
    http.post(PATH, json=BODY | {"stream": True}, headers={"Idempotency-Key": "k"})
    response = http.post(PATH, json=BODY | {"stream": True} | change, headers={"Idempotency-Key": "k"})

    assert response.status_code == 409
    assert response.json()["error"]["code"] == "conflict"
    assert response.headers["x-should-retry"] == "false"


def test_across_a_restart_of_the_gateway(world, is_fast):
    with running(world.address) as gateway, connected(gateway) as http, broken(http) as read:
        pass
    is_fast.set()
    with running(world.address) as gateway, connected(gateway) as http:
        rest = http.post(PATH, json=STREAM, headers={"Idempotency-Key": "k", "Last-Event-ID": read[-1][0]})
        reference = events_of(whole(http, is_fast))

    assert text_of(read) + text_of(events_of(rest.text)) == text_of(reference)


def test_a_gateway_that_stops_leaves_repeatable_jobs_only(world, is_fast):
    """The others are stopped, since no client can ask for them again."""
    with (
        running(world.address) as gateway,
        connected(gateway) as http,
        http.stream("POST", PATH, json=STREAM, headers={"Idempotency-Key": "k"}) as kept,
        http.stream("POST", PATH, json=STREAM) as stopped,
    ):
        next(kept.iter_text())
        next(stopped.iter_text())
        gateway.stop()
    wait_until(lambda: world.broker.broker.state.counts["finished_cancelled"] == 1)
    assert states(world)["running"] == 1
