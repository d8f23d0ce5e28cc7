"""`specq bench roundtrip`: the cost of the broker in a round trip: draft up, verdict down.

It is compared with the same messages without a broker. A real broker, a stub verifier and a stub drafter run as
separate processes. One client subscribes to all sessions and reads their tokens. The same two workers measure both ways
in turn.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import numpy as np
import zmq

from bench.deployments import first_line, output, process
from bench.report import Report, figure, show, tell
from bench.stubs import NUM_SESSIONS, VerdictCounter, draft_frames
from bench.suite import COUNT, option, suite
from specq.config import free_address
from specq.processes.servers import check_keys, keys_option
from specq.protocol import SamplingParams, Submit, encode
from specq.runtime import Number, Tell
from specq.transport import connect_dealer, curve_to_broker, drain

UNITS = {"p50_us": "us", "p99_us": "us", "rate": "round trips/s"}
MOST_ADDED_US = 250.0
LEAST_RATE = 0.45  # of the direct rate, with all sessions outstanding
_PATIENCE_S = 60.0


@suite("roundtrip")
@option("--repeats", COUNT, 3, "Number of repetitions.")
@option("--count", COUNT, 2000, "Number of round trips of each way, with one outstanding.")
@option("--seconds", Number(0.01), 2.0, "Seconds of each way, with all outstanding.")
@option("--keys", str, "", "Directory of CURVE keys (specq keys). Default: no encryption.")
def command(report: Report, *, repeats: int, count: int, seconds: float, keys: str) -> None:
    """Measure a draft up and a verdict down from stub drafter to stub verifier, directly and through the broker."""
    report.update(settings={"repeats": repeats, "count": count, "seconds": seconds, "keys": bool(keys)})
    result = roundtrip(repeats=repeats, count=count, seconds=seconds, keys=keys, tell=tell)
    figures = {
        f"{way} {name}": figure(unit, [one[way][name] for one in result["repeats"]])
        for way in ("direct", "broker")
        for name, unit in UNITS.items()
    }
    report.update(figures=figures, results=result)
    show(roundtrip_table(result), verdict_on(result))


def roundtrip(
    *,
    repeats: int = 3,
    count: int = 2000,
    seconds: float = 2.0,
    keys: str = "",
    tell: Tell = bool,
) -> dict[str, Any]:
    """Return latencies (us) and rates (round trips a second) of both ways, medians over `repeats`.

    count    round trips with one outstanding, in each repetition.
    seconds  time with one outstanding for each session.
    keys     as in `specq up`. With keys the stubs speak CURVE, too, also directly to each other.

    Raises ConfigError if one of them lacks its key.
    """
    check_keys(keys, "broker", "target", "draft", "client")
    broker = free_address()
    with ExitStack() as stack:
        # No heartbeats: they would disturb the measurement, and are not missed while no draft is sent.
        quiet = ("--liveness-ms", "600000", "--heartbeat-ms", "60000")
        options = (*quiet, "--log-level", "warning", "--journal", "none", *keys_option(keys))
        stack.enter_context(process("specq", "broker", "--bind", broker, *options))
        verifier = stack.enter_context(process("bench.stubs", "verifier", broker, keys))
        endpoint = first_line(verifier)
        stack.enter_context(_subscriber(broker, keys))
        tell(f"{repeats} repetitions of {count} round trips and {seconds:g} s, direct and through the broker")
        arguments = (broker, endpoint, str(repeats), str(count), str(seconds), keys)
        drafter = stack.enter_context(process("bench.stubs", "drafter", *arguments))
        return summarize(json.loads(output(drafter, _PATIENCE_S + repeats * 4 * (seconds + 5))))


def summarize(repeats: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Return medians of the figures and of their differences and ratios within a repetition."""
    ways = {
        way: {name: round(median(one[way][name] for one in repeats), 1) for name in ("p50_us", "p99_us", "rate")}
        for way in ("direct", "broker")
    }
    added = median(one["broker"]["p50_us"] - one["direct"]["p50_us"] for one in repeats)
    ratio = median(one["broker"]["rate"] / one["direct"]["rate"] for one in repeats)
    sizes = {
        "draft": sum(map(len, draft_frames(2**62, 2**40, 0))),
        "verdict": sum(map(len, VerdictCounter(2**62, 2**40, 1000).take())),
    }
    return {
        **ways,
        "added_us": round(added, 1),
        "rate_ratio": round(ratio, 3),
        "outstanding": NUM_SESSIONS,
        "bytes": sizes,
        "repeats": repeats,
    }


def roundtrip_table(result: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return the figures as rows for the screen."""
    header = ("WAY", "P50 US", "P99 US", f"ROUND TRIPS/S AT {result['outstanding']}")
    return [header, *((way, *result[way].values()) for way in ("direct", "broker"))]


def verdict_on(result: dict[str, Any]) -> list[str]:
    """Return the figures beside their required values, as text."""
    added, ratio, sizes = result["added_us"], result["rate_ratio"], result["bytes"]
    return [
        f"the broker adds {added:.0f} us at the median ({_judge(added <= MOST_ADDED_US)}: at most {MOST_ADDED_US:.0f})",
        f"and carries {ratio:.2f} of the direct rate ({_judge(ratio >= LEAST_RATE)}: at least {LEAST_RATE})",
        f"a draft has {sizes['draft']} bytes, a verdict {sizes['verdict']}",
    ]


def _judge(met: bool) -> str:
    return "met" if met else "missed"


# --- the client -----------------------------------------------------------------------------------------------------


@contextmanager
def _subscriber(broker: str, keys: str) -> Iterator[None]:
    """Submit all the sessions, and read their tokens, as a client would."""
    stop = threading.Event()
    thread = threading.Thread(target=_subscribe, args=(broker, keys, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _subscribe(broker: str, keys: str, stop: threading.Event) -> None:
    curve = curve_to_broker(keys, "client")
    with zmq.Context() as context, connect_dealer(context, broker, queue=True, curve=curve) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        while not _submit(socket) and not stop.wait(0.05):
            pass
        while not stop.is_set():
            if socket.poll(100):
                for _ in drain(socket):
                    pass


def _submit(socket: zmq.Socket[bytes]) -> bool:
    """Submit the sessions; False if the broker does not know its verifier yet."""
    for job_id in range(1000, 1000 + NUM_SESSIONS):
        params = SamplingParams(max_tokens=2**18)
        socket.send_multipart(encode(Submit(job_id=job_id, params=params, prompt_ids=np.ones(1, np.int32))))
        if not socket.poll(int(_PATIENCE_S * 1e3)) or b'"failed"' in socket.recv_multipart()[1]:
            return False
    return True
