"""A gateway in a thread, in front of whatever broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx2

from specq.config import ServeConfig, free_address
from specq.gateway.connection import limited_protocol  # noqa: F401 - its home is tested through the server
from specq.processes.gateway import listen, make_server

PATIENCE_S = 20.0


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
    options = {
        "verify": False
    } | options  # most have no TLS, and to read the system's certificates takes longer than most tests
    with httpx2.Client(base_url=gateway.url, timeout=PATIENCE_S, trust_env=False, **options) as client:
        yield client
