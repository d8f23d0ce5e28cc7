"""Attacks beside which a well-behaved client goes on: its text is the same, and its wait is bounded."""

from __future__ import annotations

import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from itertools import product

import httpx2
import pytest

from specq.gateway import chat_call, completion_call, messages_call, responses_call
from specq.gateway.fields import IGNORED, SAMPLING, SPECULATION
from specq.gateway.routes import tokens as token_call
from specq.processes import gateway as process
from specq.protocol import Accepted, Cancel, Submit
from specq.testing.fake_broker import ANSWER, FakeBroker, answer
from specq.testing.waiting import wait_until
from tests.each import each
from tests.gateway.serving import BODY_BYTES, JSON, LIMITS, PATH, connected, raw, read_all, request, running

LONGEST_S = 3.0  # that a small request may take beside any attack; the machine may be busy
ERROR = {"message", "type", "param", "code"}


@pytest.fixture
def gateway(limited, broker):
    return limited


@contextmanager
def beside(gateway, most_cut=0):
    """A client that streams all the while; at the end, each of its texts was right and came in time. `most_cut`: times
    that its connection may be cut while it has no request there; it asks again then."""
    stop, taken, texts, cut = threading.Event(), [], [], []

    def ask() -> None:
        with connected(gateway) as http:
            while not stop.is_set() or not texts:
                started = time.monotonic()
                try:
                    found = http.post(PATH, json={"prompt": "a", "max_tokens": 99, "stream": True}).text
                except (httpx2.ReadError, httpx2.RemoteProtocolError) as error:
                    cut.append(error)
                    if len(cut) > most_cut:
                        return
                    continue
                texts.append(found.count('"finish_reason":"stop"') == 1 and found.endswith("data: [DONE]\n\n"))
                taken.append(time.monotonic() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert len(cut) <= most_cut
    assert all(texts)
    assert max(taken) < LONGEST_S


# --- connections ------------------------------------------------------------------------------------------------------


def test_silent_connections_do_not_block_other_clients(broker, own_cache):
    """The oldest connections without a request are closed first, before their timeout. Idle keep-alive ones may be,
    too."""
    limits = LIMITS | {"header_seconds": 60.0, "connections": 5}
    with running(broker.address, **limits) as gateway, beside(gateway, most_cut=2):
        crowd = [raw(gateway) for _ in range(3 * process.SPARE)]
        for one in crowd[: process.SPARE]:
            assert read_all(one) == b""
        with connected(gateway) as http:
            assert http.get("/health").status_code == 200
        for one in crowd:
            one.close()


def test_a_crowd_does_not_cut_an_answer_that_is_on_its_way(broker, own_cache, monkeypatch):
    """A slow reader's connection is idle for HTTP as soon as its answer is written, and long before that has
    arrived."""
    monkeypatch.setattr("specq.gateway.connection.SEND_BYTES", 4096)
    limits = {"header_seconds": 60.0, "connections": 5}
    with running(broker.address, **limits) as gateway, connected(gateway) as http, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.connect(("127.0.0.1", gateway.port))
        asked = request(b'{"prompt": "%s"}' % (b"a " * 15_000))
        reader.sendall(asked.replace(b"/v1/completions", b"/tokenize"))
        reader.recv(1, socket.MSG_PEEK)
        assert http.get("/health").status_code == 200
        crowd = [raw(gateway) for _ in range(3 * process.SPARE)]
        for one in crowd[: process.SPARE]:
            assert read_all(one) == b""
        head = reader.recv(1024)
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        body = head.partition(b"\r\n\r\n")[2]
        while len(body) < length and (more := reader.recv(65536)):
            body += more
        assert len(body) == length > 30_000
        for one in crowd:
            one.close()


def test_requests_beyond_the_limit_receive_an_error(own_cache):
    """For all clients, with or without keys. State requests are still answered, and room comes back."""

    def silent(message):
        return [Accepted(job_id=message.job_id)] if isinstance(message, Submit) else answer(message)

    with FakeBroker(silent) as broker, running(broker.address, connections=3) as gateway, connected(gateway) as http:
        busy = [raw(gateway) for _ in range(3)]
        for one in busy:
            one.sendall(request(BODY_BYTES))
        broker.wait_for(Submit, 3)
        refused = http.post(PATH, content=BODY_BYTES, headers=JSON)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "too_many_requests")
        assert refused.headers["retry-after"] == "1"
        assert http.get("/health").status_code == 200
        for one in busy:
            one.close()
        wait_until(lambda: http.get("/v1/models").status_code == 200)


def test_a_process_that_may_open_few_files_takes_fewer_connections(monkeypatch):
    """And no fewer than there is room for; where it may have more, it asks for them."""
    asked = []
    monkeypatch.setattr(process.resource, "getrlimit", lambda _: (256, 1000))
    monkeypatch.setattr(process.resource, "setrlimit", lambda _, limits: asked.append(limits))

    assert process.most_connections(4096) == 1000 - process.SPARE - process.OTHER_FILES
    assert process.most_connections(500) == 500
    assert process.most_connections(10) == 10
    assert asked == [(1000, 1000), (500 + process.SPARE + process.OTHER_FILES, 1000)]


def test_a_storm_of_disconnects_leaves_no_job(own_cache):
    """Each job that was begun for somebody who left is stopped."""

    def endless(message):
        return list(answer(message))[:2] if isinstance(message, Submit) else answer(message)

    with FakeBroker(endless) as broker, running(broker.address) as gateway:
        for _ in range(4):
            storm = [raw(gateway) for _ in range(50)]
            for one in storm:
                one.sendall(request(b'{"prompt": "a", "max_tokens": 90, "stream": true}'))
            for one in storm:
                one.close()

        def jobs(kind):
            return {message.job_id for message in list(broker.heard) if isinstance(message, kind)}

        with connected(gateway) as http:
            wait_until(lambda: "specq_http_requests_under_way 1.0" in http.get("/metrics").text)
        wait_until(lambda: jobs(Submit) == jobs(Cancel))


def test_what_is_written_is_sent_at_once(broker, own_cache):
    """A body does not wait until the reader's system has acknowledged its head, nor an event until it has acknowledged
    the one before."""
    with running(broker.address) as gateway, connected(gateway) as http:
        assert http.get("/health").status_code == 200
        served = [one.transport.get_extra_info("socket") for one in gateway.connections]

        assert [bool(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for one in served] == [True]


def test_a_reader_that_never_reads_is_given_up(own_cache, monkeypatch):
    """After the idle limit its jobs are stopped; what waits for it meanwhile is not more than they have."""

    def endless(message):
        return list(answer(message))[:-1] if isinstance(message, Submit) else answer(message)

    monkeypatch.setattr("specq.gateway.connection.SEND_BYTES", 4096)  # the answers of the small broker are short
    body = b'{"prompt": "a", "max_tokens": 90, "stream": true, "n": 128}'
    with FakeBroker(endless) as broker, running(broker.address, **LIMITS) as gateway, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        reader.connect(("127.0.0.1", gateway.port))
        reader.sendall(request(body))
        broker.wait_for(Submit, 128)
        broker.wait_for(Cancel, 128, timeout_s=20)


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["chunked", "long", "absurd"])
def test_a_body_without_end(gateway, kind):
    """The answer comes at once, and the connection ends though more and more arrives."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    length = {
        "chunked": b"Transfer-Encoding: chunked",
        "long": b"Content-Length: 99999999",
        "absurd": b"Content-Length: " + b"9" * 40,
    }
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n" if kind == "chunked" else b" " * 4096
    with beside(gateway), raw(gateway) as endless:
        endless.sendall(head + length[kind] + b"\r\n\r\n")
        started = time.monotonic()
        with suppress(OSError):
            while time.monotonic() - started < 20:
                endless.sendall(chunk)
                time.sleep(0.001)
        assert time.monotonic() - started < 10


def test_an_answer_before_the_end_of_its_body_can_be_read(gateway):
    with raw(gateway) as slow:
        slow.sendall(request(b"x" * 100_000)[:-30_000])
        found = read_all(slow)

    assert found.startswith(b"HTTP/1.1 413")
    assert b"larger than 65536 bytes" in found


@each(
    ("path", "opened", "depth"),
    product(
        [PATH, "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"],
        ["[", '{"a":'],
        [90, 101, 260, 1020],
    ),
)
def test_deep_bodies(gateway, path, opened, depth):
    """Deep values in fields that are repeated, shown, hashed or given to a template: refused as any other."""
    value = opened * depth + "1" + ("]" if opened == "[" else "}") * depth
    source = {"/v1/responses": '"input": "a"', "/detokenize": '"tokens": [5]', PATH: '"prompt": "a"'}
    with connected(gateway) as http:
        for name in ("metadata", "n", "tree", "stop", "tools", "chat_template_kwargs", "logit_bias"):
            body = f'{{{source.get(path, MESSAGES)}, "{name}": {value}}}'
            headers = {**JSON, "Idempotency-Key": f"{path} {name} {depth} {opened}"}
            response = http.post(path, content=body, headers=headers)
            assert response.status_code == 400 or (response.status_code, depth) == (200, 90), response.text


MESSAGES = '"messages": [{"role": "user", "content": "a"}]'


@each(
    ("name", "value"),
    [
        ("logit_bias", {str(token): 1 for token in range(5000)}), ("bad_token_ids", [[5]] * 12_000),
        ("tree", [[0]] * 12_000), ("bad_words", ["a"] * 12_000), ("stop", ["a"] * 12_000),
        ("stop_token_ids", [5] * 20_000), ("prompt", ["a"] * 12_000), ("prompt", "a " * 30_000),
        ("temperature", "x" * 60_000), ("priority", "x" * 60_000), ("model", "x" * 60_000), ("x" * 60_000, 1),
    ],
)  # fmt: skip
def test_large_values_take_no_time_and_answers_do_not_repeat_them(gateway, name, value):
    with beside(gateway), connected(gateway) as http:
        started = time.monotonic()
        response = http.post(PATH, json={"prompt": "a", name: value})

    assert response.status_code < 500
    assert len(response.content) < 4000
    assert time.monotonic() - started < LONGEST_S


# --- HTTP -------------------------------------------------------------------------------------------------------------


def test_http_1_0(gateway):
    """Answered, in one and as a stream, and closed."""
    for stream in (b"false", b"true"):
        body = b'{"prompt": "a", "max_tokens": 99, "stream": %s}' % stream
        with raw(gateway) as old:
            old.sendall(request(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
            found = read_all(old)
        assert found.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason":"stop"' in found


def test_garbage_behind_a_stream_does_not_change_it(gateway):
    """It is read when the stream has ended, and refused."""
    with beside(gateway), raw(gateway) as hostile:
        hostile.sendall(request(b'{"prompt": "a", "max_tokens": 99, "stream": true}') + b"\x00garbage\r\n\r\n" * 1000)
        found = read_all(hostile)

    assert found.count(b'"finish_reason":"stop"') == 1
    assert b"data: [DONE]" in found


# --- keys and positions -----------------------------------------------------------------------------------------------


@each(
    "event_id",
    ["9999999999", "0e", "5e", "99,99", "-", "-;u", "3;u", "3;v", "1e;u", "e", "-1", "3.5", "٣", "3" * 300, "\u00b2"],
)
def test_positions_that_no_event_had(gateway, event_id):
    """Refused, or a stream that ends. No request hangs."""
    headers = {"Idempotency-Key": "k", "Last-Event-ID": event_id.encode()}
    with connected(gateway) as http:
        http.post(PATH, json={"prompt": "a", "max_tokens": 99, "stream": True}, headers={"Idempotency-Key": "k"})
        response = http.post(PATH, json={"prompt": "a", "max_tokens": 99, "stream": True}, headers=headers)

    assert response.status_code in (200, 400)
    assert response.status_code == 400 or "data: " in response.text


@each(
    ("param", "headers"),
    [
        ("Idempotency-Key", {"Idempotency-Key": b""}),
        ("Idempotency-Key", {"Idempotency-Key": b"x" * 256}),
        ("Idempotency-Key", {"Idempotency-Key": "é".encode()}),
        ("Last-Event-ID", {"Last-Event-ID": b"3"}),
        ("Last-Event-ID", {"Idempotency-Key": b"k", "Last-Event-ID": b"x"}),
    ],
)
def test_keys_and_positions_that_cannot_be_used(gateway, param, headers):
    with connected(gateway) as http:
        response = http.post(PATH, json={"prompt": "a", "stream": True}, headers=headers)

    error = response.json()["error"]
    assert (response.status_code, error["param"], param in error["message"]) == (400, param, True)


# --- every field of every endpoint ------------------------------------------------------------------------------------

ATOMS = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64 - 1, -(2**63), 1.5, -0.0, 1e308, "", "x", "\u0000", "é" * 50,
    "none", "auto",
]  # fmt: skip
ENDPOINTS = {
    PATH: (completion_call, {"prompt": "Hi"}),
    "/v1/chat/completions": (chat_call, {"messages": [{"role": "user", "content": "Hi"}]}),
    "/v1/responses": (responses_call, {"input": "Hi"}),
    "/v1/messages": (messages_call, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}),
    "/tokenize": (token_call, {"prompt": "Hi"}),
    "/detokenize": (token_call, {"tokens": [5]}),
}


def names_of(module):
    known = getattr(module, "KNOWN", ("model", "tokens", *token_call._TEXT, *token_call._CHAT))
    return [*known, *IGNORED, *SAMPLING, *SPECULATION, *module._ONLY, *module._REFUSED]


def some_value(rng, depth=3):
    """Return a JSON value at random."""
    kind = rng.random()
    if depth == 0 or kind < 0.5:
        return rng.choice(ATOMS)
    values = [some_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    keys = ("type", "text", "role", "content", "5", "x")
    return values if kind < 0.75 else {rng.choice(keys): value for value in values}


@pytest.mark.slow
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("seed", range(3))
def test_anything_in_any_field(gateway, path, seed):
    """One field, or several, with values at random: an answer, or a refusal in its form; never a fault of ours."""
    module, body = ENDPOINTS[path]
    rng, names = random.Random(f"{path} {seed}"), list(dict.fromkeys(names_of(module)))
    with beside(gateway), connected(gateway) as http:
        for name in names:
            changed = {name: some_value(rng)} | {rng.choice(names): some_value(rng) for _ in range(rng.randrange(2))}
            headers = {"Idempotency-Key": f"{seed} {name}"} if rng.random() < 0.5 else {}
            response = http.post(path, json={**body, **changed}, headers=headers)
            assert response.status_code < 500, (changed, response.text)
            if response.status_code != 200:
                own = {"type", "message"} if path == "/v1/messages" else ERROR  # Anthropic's form
                assert set(response.json()["error"]) - {"details"} == own, changed


def test_the_answer_is_the_whole_answer(gateway):
    """What `beside` compares with."""
    with connected(gateway) as http:
        assert http.post(PATH, json={"prompt": "a", "max_tokens": 99}).json()["choices"][0]["text"] == ANSWER
