"""A gateway in a thread in front of any broker, and its clients: httpx, OpenAI's own, and bare sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import openai

from specq.config import ServeConfig, free_address
from specq.gateway.connection import limited_protocol  # noqa: F401 - its home is tested through the server
from specq.processes.gateway import listen, make_server

PATIENCE_S = 60.0
LIMITS = {"header_seconds": 0.4, "body_seconds": 0.4, "idle_seconds": 1.0, "body_kb": 64, "header_kb": 8}
PATH = "/v1/completions"
BODY_BYTES = b'{"prompt": "a"}'
JSON = {"Content-Type": "application/json"}


class Running:
    """A gateway that runs: where it is, and a client of it."""

    def __init__(self, config: ServeConfig) -> None:
        self.config, self.port = config, int(config.bind.rpartition(":")[2])
        self.url = f"{'https' if config.tls_cert else 'http'}://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._server: Any = None
        self.errors: list[BaseException] = []

    async def _serve(self) -> None:
        try:
            with listen(self.config.bind) as listener:
                self._server = make_server(self.config)
                self._started.set()
                await self._server.serve(sockets=[listener])
        except Exception as error:  # noqa: BLE001 - the test that started it raises it
            self.errors.append(error)
        finally:
            self._started.set()

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(PATIENCE_S)
        if self.errors:
            raise self.errors[0]

    @property
    def connections(self) -> list[Any]:
        """The server's end of each."""
        return list(self._server.server_state.connections)

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def running(broker: str, **options: Any) -> Iterator[Running]:
    gateway = Running(ServeConfig(**{"broker": broker, "bind": free_address(), "drain_seconds": 1.0, **options}))
    gateway.start()
    try:
        yield gateway
    finally:
        gateway.stop()


@contextmanager
def connected(gateway: Running, **options: Any) -> Iterator[httpx2.Client]:
    # most have no TLS, and to read the system's certificates takes longer than most tests
    options = {"verify": False} | options
    with httpx2.Client(base_url=gateway.url, timeout=PATIENCE_S, trust_env=False, **options) as client:
        yield client


@contextmanager
def openai_client(gateway: Running, api_key: str = "none") -> Iterator[openai.OpenAI]:
    own = openai.DefaultHttpxClient(verify=False)  # as in `connected`
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=api_key, max_retries=0, http_client=own) as client:
        yield client


def request(body: bytes, headers: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a request of a completion."""
    given = {"Host": "localhost", **JSON, "Content-Length": str(len(body)), **(headers or {})}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"POST {PATH} HTTP/1.1\r\n{lines}\r\n".encode() + body


def raw(gateway: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gateway.port), 10)


def read_all(connection: socket.socket) -> bytes:
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found
