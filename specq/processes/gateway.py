"""The gateway's process: uvicorn around `specq.gateway`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn

from specq.batches import BatchRunner, BatchStore, StoreLimits
from specq.config import ServeConfig, batch_store
from specq.gateway import (
    ApiKeys,
    Batching,
    BatchLines,
    BodyLimits,
    Metrics,
    Parts,
    Upstream,
    limited_protocol,
    make_app,
)
from specq.protocol import Address, ConfigError, parse_address
from specq.runtime import apply_cpu
from specq.transport import calm_collector, keys_of_gateway, listener

log = structlog.get_logger(__name__)

BACKLOG = 2048
SPARE = 64  # connections beyond the limit, to send a reason to refused clients
OTHER_FILES = 128  # further files that the process has open


class Gateway(uvicorn.Server):
    """A server with its own signal handling. The first signal lets requests end. The second stops at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is threading.main_thread():  # only the main thread receives signals
            for name in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(name, self._ask)
        yield

    def _ask(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True


def make_server(config: ServeConfig) -> Gateway:
    """Return the server; call this in its event loop. Raises ConfigError for invalid keys or certificates."""
    keys = ApiKeys(Path(config.api_keys).expanduser()) if config.api_keys else None
    limits = BodyLimits(config.body_kb * 1024, config.body_seconds, config.total_seconds)
    hosts = [*config.hosts.replace(" ", "").split(","), socket.gethostname(), parse_address(config.bind).host]
    upstream = Upstream(config.broker, keys_of_gateway(config.keys), config.timeout_s)
    most = most_connections(config.connections)
    metrics = Metrics()
    batches = make_batching(config, upstream, metrics)
    app = make_app(
        Parts(upstream, limits, metrics, batches, tuple(config.cors_origins)),
        hosts=[host for host in hosts if host],
        keys=keys,
        most=config.requests_per_key,
        header_bytes=config.header_kb * 1024,
        most_in_all=most,
    )
    settings = uvicorn.Config(
        app,
        loop="asyncio",
        http=limited_protocol(config.header_seconds, most + SPARE, config.idle_seconds),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        h11_max_incomplete_event_size=config.header_kb
        * 1024,  # for headers in several parts; the guard checks the others
        timeout_keep_alive=max(1, int(config.idle_seconds)),
        timeout_graceful_shutdown=max(1, int(config.drain_seconds)),
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
    )
    _load(settings)
    return Gateway(settings)


def make_batching(config: ServeConfig, upstream: Upstream, metrics: Metrics) -> Batching | None:
    """Return the store of batches and what runs them. None: they are off.

    With API keys, the files of one key take up half of the store at most.
    """
    address = batch_store(config)
    if not address:
        return None
    num_bytes, keep_s = config.batch_store_mb << 20, int(config.batch_days * 86_400)
    owner_bytes = num_bytes // 2 if config.api_keys else num_bytes
    limits = StoreLimits(num_bytes, owner_bytes, config.upload_mb << 20, keep_s)
    place = address if address.startswith("postgresql://") else Path(address).expanduser()
    store = BatchStore(place, limits)
    runner = BatchRunner(store, BatchLines(upstream, metrics), upstream.report, config.body_kb * 1024)
    return Batching(store, runner)


def most_connections(wanted: int) -> int:
    """Return the maximum number of connections: `wanted`, or less for a low limit of open files."""
    needed = wanted + SPARE + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if soft < needed:
            log.warning("connections_limited", wanted=wanted, open_files=soft)
            return max(1, soft - SPARE - OTHER_FILES)
    return wanted


def _load(settings: uvicorn.Config) -> None:
    try:
        settings.load()
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"serve.tls_cert ({settings.ssl_certfile}) and serve.tls_key ({settings.ssl_keyfile}) cannot be used: "
            f"{error}"
        ) from None


def listen(address: str) -> socket.socket:
    """Return a listening socket. Raises ConfigError if the address cannot be bound."""
    return listener(address, BACKLOG)


async def serve(config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    with listen(config.bind) as listening:
        server = make_server(config)
        host, port = listening.getsockname()[:2]
        scheme = "https" if config.tls_cert else "http"
        shown = Address("", host, port).at(host).replace("tcp", scheme, 1)
        log.info("gateway_started", address=shown, broker=config.broker)
        calm_collector()
        await server.serve(sockets=[listening])
    log.info("gateway_stopped")


def run(config: ServeConfig) -> int:
    """Serve; return the exit status."""
    apply_cpu(config.cores, threads=1)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # its messages about malformed requests do not matter
    asyncio.run(serve(config))
    return 0
