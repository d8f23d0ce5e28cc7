"""`specq bench gateway`: the cost of the HTTP gateway beside the Python client, and many streams at once.

The cost is time to the first text, and time for a token. Both use the same broker and verifier, in turn. The HTTP
reader is a few lines over asyncio's streams, so that the gateway is measured and not an HTTP library.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import orjson

from bench.report import Report, figure, show
from bench.rivals.children import memory_of
from bench.suite import COUNT, option, repeatable, suite
from bench.turns import rotated
from specq import AsyncClient
from specq.config import free_address
from specq.processes.servers import Servers, pair_config
from specq.protocol import parse_address

PATIENCE_S = 300.0
MAX_SESSIONS = 1024
KV_SLOTS = 262_144
MOST_FIRST_MS, MOST_TOKEN_MS = 2.0, 0.3  # maximum that the gateway may add, medians


@suite("gateway")
@option("--model", str, "tiny", "Target model: bundled, a directory, or a hub name.")
@option("--repeats", COUNT, 20, "Number of streams of each way, in turn.")
@option("--max-tokens", COUNT, 64, "Tokens of each stream.")
@repeatable("--streams", COUNT, (200,), "Number of streams at a time.")
def command(report: Report, *, model: str, repeats: int, max_tokens: int, streams: tuple[int, ...]) -> None:
    """Measure time to the first text and for a token with the gateway and without it, and many streams at a time."""
    report.update(settings={"model": model, "repeats": repeats, "max_tokens": max_tokens, "streams": list(streams)})
    result = measure(model, repeats, max_tokens, streams)
    report.update(figures={name: figure("ms", values) for name, values in result["latency"].items()}, results=result)
    rows = [(name, f"{median(values):.3f} ms") for name, values in result["latency"].items()]
    many = [tuple(one.values()) for one in result["streams"]]
    more = added(result["latency"])
    verdicts = [
        f"the gateway adds {more['first']:.2f} ms to the first text (at most {MOST_FIRST_MS}), medians",
        f"and {more['token']:.3f} ms a token (at most {MOST_TOKEN_MS})",
        *(
            f"{one['same']} of {one['streams']} streams at a time had the text of their seed"
            for one in result["streams"]
        ),
    ]
    show([("WAY", "MEDIAN"), *rows], [" ".join(map(str, row)) for row in many] + verdicts)


@dataclass(frozen=True, slots=True)
class Reading:
    """One stream, read to its end: its text, time to the first text, and time for a token after it, in ms."""

    text: str
    first_ms: float
    token_ms: float


def prompt(number: int) -> str:
    """Return a prompt that no other stream has."""
    return f"Tom has {number + 2} boxes with {number % 7 + 3} pencils each. How many pencils has he?"


def arguments(number: int, max_tokens: int) -> dict[str, Any]:
    """Return the request of both ways."""
    sampling = {"temperature": 0.8, "seed": number, "ignore_eos": True}
    return {"prompt": prompt(number), "max_tokens": max_tokens, "mode": "plain", **sampling}


async def by_client(client: AsyncClient, asked: dict[str, Any]) -> Reading:
    """Read a stream of the Python client."""
    times, texts = [time.perf_counter()], []
    async for piece in client.stream(**asked):
        if piece.text:
            texts.append(piece.text)
            times.append(time.perf_counter())
    return _reading(texts, times, asked["max_tokens"])


async def by_http(address: str, asked: dict[str, Any]) -> Reading:
    """Read a stream of the gateway; the connection is open before the time begins."""
    at = parse_address(address)
    reader, writer = await asyncio.open_connection(at.host, at.port, limit=1 << 20)
    try:
        body = orjson.dumps({**asked, "stream": True})
        head = (
            f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: "
            f"close\r\n\r\n"
        )
        times, texts = [time.perf_counter()], []
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head.encode() + body)
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                text = orjson.loads(line[6:])["choices"][0]["text"]
                if text:
                    texts.append(text)
                    times.append(time.perf_counter())
    finally:
        writer.close()
    return _reading(texts, times, asked["max_tokens"])


def _reading(texts: Sequence[str], times: Sequence[float], num_tokens: int) -> Reading:
    if not texts:
        return Reading("", float("nan"), float("nan"))
    return Reading("".join(texts), 1e3 * (times[1] - times[0]), 1e3 * (times[-1] - times[1]) / max(1, num_tokens - 1))


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(model: str, repeats: int, max_tokens: int, streams: Sequence[int]) -> dict[str, Any]:
    """Return latencies of both ways, and the results of each number of streams at a time."""
    config = pair_config(model, model, 0)
    http = free_address()
    config = replace(
        config,
        up=replace(config.up, serve=True),
        serve=replace(config.serve, bind=http, requests_per_key=100_000, connections=20_000),
        target=replace(config.target, max_sessions=MAX_SESSIONS, kv_slots=KV_SLOTS, max_step_rows=MAX_SESSIONS),
    )
    with Servers(config) as servers:
        servers.wait_ready()
        return asyncio.run(_measure(servers, http, repeats, max_tokens, streams))


async def _measure(
    servers: Servers, http: str, repeats: int, max_tokens: int, streams: Sequence[int]
) -> dict[str, Any]:
    async with AsyncClient(servers.address, timeout_s=60) as client:
        latency = await _latency(client, http, repeats, max_tokens)
        many = [await _many(client, http, servers.process_id("gateway"), count, max_tokens) for count in streams]
    return {"latency": latency, "streams": many}


async def _latency(client: AsyncClient, http: str, repeats: int, max_tokens: int) -> dict[str, list[float]]:
    """Return the times of both ways, in turns of changing order. The prompt is computed once before, for both."""
    found: dict[str, list[float]] = {
        f"{way} {name}": [] for way in ("client", "gateway") for name in ("first", "token")
    }
    ways = {"client": lambda asked: by_client(client, asked), "gateway": lambda asked: by_http(http, asked)}
    for number in range(repeats):
        asked = arguments(number, max_tokens)
        await client.generate(**asked)
        both = {way: await ways[way](asked) for way in rotated(list(ways), number)}
        assert both["client"].text == both["gateway"].text, "the same seed gives the same text"
        for way, reading in both.items():
            found[f"{way} first"].append(reading.first_ms)
            found[f"{way} token"].append(reading.token_ms)
    return found


async def _many(client: AsyncClient, http: str, process: int, count: int, max_tokens: int) -> dict[str, Any]:
    """Read `count` streams at a time, and compare each text with the Python client's."""
    started = time.perf_counter()
    asked = [arguments(number, max_tokens) for number in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        readings = await asyncio.gather(*(by_http(http, one) for one in asked), return_exceptions=True)
    seconds = time.perf_counter() - started
    memory = memory_of({"gateway": process}).get("gateway", {}).get("peak_mb", 0.0)
    right = [result.text for result in await asyncio.gather(*(client.generate(**one) for one in asked))]
    read = [one for one in readings if isinstance(one, Reading)]
    same = sum(isinstance(one, Reading) and one.text == text for one, text in zip(readings, right, strict=True))
    first = [one.first_ms for one in read]
    return {
        "streams": count,
        "same": same,
        "tokens_s": round(count * max_tokens / seconds, 1),
        "first_ms": {str(q): round(float(np.nanquantile(first, q)), 1) for q in (0.5, 0.99)} if first else {},
        "gateway_mb": memory,
    }


def added(latency: dict[str, list[float]]) -> dict[str, float]:
    """Return what the gateway adds at the median, in ms."""
    return {name: median(latency[f"gateway {name}"]) - median(latency[f"client {name}"]) for name in ("first", "token")}
