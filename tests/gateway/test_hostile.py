"""Hostile HTTP: slow, large, broken, gone. The sender is refused. Others are served all the time."""

from __future__ import annotations

import socket
import time
from itertools import product

import pytest

from specq.protocol import Accepted, Cancel, Submit
from specq.testing import wait_until
from specq.testing.fake_broker import ANSWER, FakeBroker, answer
from tests.each import each
from tests.gateway.serving import BODY_BYTES, JSON, LIMITS, PATH, connected, raw, read_all, request, running


@pytest.fixture
def gateway(limited, broker):
    yield limited
    with connected(limited) as http:  # after any earlier input
        assert http.post(PATH, json={"prompt": "a", "max_tokens": 99}).json()["choices"][0]["text"] == ANSWER


@each("sent", [b"", b"POST /v1/completions HTTP/1.1\r\nHost: loc", request(BODY_BYTES) + b"GET / HT"])
def test_slow_headers_end_the_connection(gateway, sent):
    """At the first request and at a later one; other clients are served meanwhile."""
    with raw(gateway) as slow, connected(gateway) as http:
        slow.sendall(sent)
        assert http.get("/health").status_code == 200
        started = time.monotonic()
        read_all(slow)

    assert time.monotonic() - started < 9


def test_a_slow_body_is_not_waited_for(gateway):
    with raw(gateway) as slow:
        slow.sendall(request(b"x" * 100)[:-90])
        assert read_all(slow).startswith(b"HTTP/1.1 408")


@each("line", [b"X: " + b"x" * 20_000, b"\r\n".join(b"X%d: x" % i for i in range(3000))])
def test_large_headers(gateway, line):
    with raw(gateway) as large:
        large.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n")
        assert not read_all(large).startswith(b"HTTP/1.1 2")


def test_a_large_body(gateway):
    """Whether or not it says how large it is."""
    with connected(gateway) as http:
        said = http.post(PATH, json={"prompt": "x" * 70_000})
        unsaid = http.post(PATH, content=iter([b'{"prompt": "'] + [b"x" * 10_000] * 7), headers=JSON)

    assert (said.status_code, unsaid.status_code) == (413, 413)


@each(
    ("body", "path"),
    product(
        [
            b"", b"{", b"\xff\xfe", b'{"prompt": "\xc3"}', b'{"prompt": "\\ud800"}', b"NaN", b'{"prompt": NaN}',
            b"[" * 30_000, b'{"prompt": "a", "logit_bias": {"5": 1e999}}',
            b'{"prompt": "a", "seed": 99999999999999999999999999}',
            b'{"messages": ' + b'[{"role":"user","content":"x","a":' * 300 + b"1" + b"}]" * 300 + b"}", b"\x00" * 100,
        ],
        ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"],
    ),
)  # fmt: skip
def test_invalid_bodies_are_refused(gateway, path, body):
    with connected(gateway) as http:
        response = http.post(path, content=body, headers=JSON)

    assert response.status_code in (400, 200)
    assert response.status_code == 400 or b'{"messages"' in body


NO_HTTP = [
    b"nonsense\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    b"\x00\xff\xfe\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHo st: localhost\r\n\r\n",
]


@each(
    "sent",
    [
        *NO_HTTP,
        b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n",
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: "
            b"chunked\r\n\r\nzz\r\n"
        ),
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"GET /%ff%fe%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_hardly_http(gateway, sent):
    """Input that is not HTTP gets an error in the same form as other mistakes."""
    with raw(gateway) as hostile:
        hostile.sendall(sent)
        hostile.shutdown(socket.SHUT_WR)
        head, _, body = read_all(hostile).partition(b"\r\n\r\n")

    assert sent not in NO_HTTP or (head.startswith(b"HTTP/1.1 400") and b'"code":"invalid_http"' in body)


def job_ids(broker, kind) -> set[int]:
    return {message.job_id for message in list(broker.heard) if isinstance(message, kind)}


@pytest.mark.parametrize("streams", [False, True])
def test_disconnects_at_every_point(own_cache, streams):
    """While it is sent, while it waits, while it is answered: the job is stopped, and nothing is left."""
    body = b'{"prompt": "a", "max_tokens": 90, "stream": %s}' % (b"true" if streams else b"false")
    whole = request(body)

    def slow(message):
        return (
            [Accepted(job_id=message.job_id), *answer(message)[1:3]] if isinstance(message, Submit) else answer(message)
        )

    with FakeBroker(slow) as broker, running(broker.address) as gateway:
        for cut in (0, 1, 20, len(whole) - len(body), len(whole) - 1):
            with raw(gateway) as gone:
                gone.sendall(whole[:cut])
        for num_read in (0, 1, 100):
            with raw(gateway) as gone:
                gone.sendall(whole)
                broker.wait_for(Submit)
                if num_read and streams:
                    gone.recv(num_read)
            broker.wait_for(Cancel)
        wait_until(lambda: job_ids(broker, Cancel) == job_ids(broker, Submit), 10)
        with connected(gateway) as http:
            assert http.get("/health").status_code == 200


def test_too_many_connections_do_not_harm_other_clients(broker, own_cache):
    with running(broker.address, connections=5, **LIMITS) as gateway, connected(gateway) as http:
        assert http.get("/health").status_code == 200
        crowd = [raw(gateway) for _ in range(30)]
        assert http.get("/health").status_code == 200
        for one in crowd:
            read_all(one)
            one.close()
        with connected(gateway) as other:
            assert other.get("/health").status_code == 200
