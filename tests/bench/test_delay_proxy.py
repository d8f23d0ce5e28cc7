"""The delay proxy: bytes come out unchanged, in order, and not before their time; keys do not matter to it."""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import zmq

from bench.delay_proxy import DelayProxy
from bench.deployments import PYTHON
from specq import Client
from specq.client import count_ready
from specq.client.detached import JobDesk
from specq.config.values import free_address
from specq.protocol.errors import JobError
from specq.protocol.messages import Submit
from specq.protocol.params import SamplingParams
from specq.protocol.wire import decode, encode
from specq.simulate.machine import LineSettings
from specq.testing.secured import make_all, served
from specq.testing.toy import toy_text
from specq.transport.keys import curve_to_broker, make_keys
from specq.transport.sockets import bind_router, connect_dealer, drain, try_send

PATIENCE_S = 60.0
PROGRAM = (*PYTHON, "bench.delay_proxy")
DATA = random.Random(0).randbytes(400_000)

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Stage:
    """A server, the proxy before it, and connections through it, in one event loop."""

    def __init__(self) -> None:
        self.ends: asyncio.Queue[Streams] = asyncio.Queue()  # what the server has accepted
        self.writers: list[asyncio.StreamWriter] = []

    async def open(self, line: LineSettings, **options: float) -> None:
        self.server = await asyncio.start_server(lambda *streams: self.ends.put_nowait(streams), "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.proxy = DelayProxy(f"tcp://127.0.0.1:{port}", line, **options)
        self.address = await self.proxy.listen("tcp://127.0.0.1:*")

    async def connect(self) -> Streams:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.address.rpartition(":")[2]))
        self.writers.append(writer)
        return reader, writer

    async def pair(self) -> tuple[Streams, Streams]:
        """Connect; return both ends."""
        near, far = await self.connect(), await self.ends.get()
        self.writers.append(far[1])
        return near, far

    async def close(self) -> None:
        self.proxy.server.close()
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.sleep(0.02)


def staged(scenario) -> None:
    """Run a scenario, in bounded time."""

    async def run() -> None:
        stage = Stage()
        await asyncio.wait_for(scenario(stage), PATIENCE_S)
        await stage.close()

    asyncio.run(run())


def test_bytes_are_intact_and_in_order_both_ways():
    """Jitter may not reorder what one connection carries."""

    async def scenario(stage: Stage) -> None:
        await stage.open(LineSettings(delay_s=0.005, jitter_s=0.02))
        (reader, writer), (far_reader, far_writer) = await stage.pair()
        for start in range(0, len(DATA), 1000):
            writer.write(DATA[start : start + 1000])
            far_writer.write(DATA[-start - 1000 : len(DATA) - start])
            await asyncio.sleep(0)
        assert await far_reader.readexactly(len(DATA)) == DATA
        back = await reader.readexactly(len(DATA))
        assert back == b"".join(DATA[-start - 1000 : len(DATA) - start] for start in range(0, len(DATA), 1000))

    staged(scenario)


def test_bandwidth_spaces_bytes_out():
    """At 1 Mbit/s, 50,000 bytes take 0.4 s; each way has a line of its own."""

    async def scenario(stage: Stage) -> None:
        await stage.open(LineSettings(bytes_per_s=125_000))
        (reader, writer), (far_reader, far_writer) = await stage.pair()
        began = time.monotonic()
        writer.write(bytes(50_000))
        far_writer.write(b"x")
        received = asyncio.create_task(far_reader.readexactly(50_000))
        await reader.readexactly(1)
        assert not received.done()
        await received
        assert time.monotonic() - began >= 0.4

    staged(scenario)


def test_connections_do_not_mix():
    async def scenario(stage: Stage) -> None:
        await stage.open(LineSettings(delay_s=0.01))
        pairs = [await stage.pair() for _ in range(5)]
        for i, ((_, writer), _) in enumerate(pairs):
            writer.write(b"%d" % i)
        for i, (_, (far_reader, far_writer)) in enumerate(pairs):
            assert await far_reader.readexactly(1) == b"%d" % i
            far_writer.write(b"to %d" % i)
        for i, ((reader, _), _) in enumerate(pairs):
            assert await reader.readexactly(4) == b"to %d" % i

    staged(scenario)


def test_the_end_of_a_stream_comes_after_what_is_in_flight():
    """And one way may end before the other."""

    async def scenario(stage: Stage) -> None:
        await stage.open(LineSettings(delay_s=0.1))
        (reader, writer), (far_reader, far_writer) = await stage.pair()
        writer.write(b"last words")
        writer.write_eof()
        assert await far_reader.read() == b"last words"
        far_writer.write(b"answer")
        far_writer.close()
        assert await reader.read() == b"answer"

    staged(scenario)


def test_a_cut_connection_loses_what_is_in_flight_and_comes_back():
    """Both ends see theirs end; the next connection waits until the cut is over."""

    async def scenario(stage: Stage) -> None:
        await stage.open(LineSettings(delay_s=30.0), cut_every_s=1e-6, cut_s=0.3)
        (reader, writer), (far_reader, _) = await stage.pair()
        writer.write(b"lost")
        with pytest.raises(ConnectionResetError):
            await asyncio.gather(_to_the_end(reader), _to_the_end(far_reader))
        assert stage.proxy.num_cut == 1
        stage.proxy.cut_every_s, stage.proxy.line = 0.0, LineSettings()
        began = time.monotonic()
        (_, writer), (far_reader, _) = await stage.pair()
        assert time.monotonic() - began > 0.2
        writer.write(b"carried")
        assert await far_reader.readexactly(7) == b"carried"

    staged(scenario)


async def _to_the_end(reader: asyncio.StreamReader) -> None:
    """Read up to the end of the stream, which carried no bytes."""
    assert await reader.read() == b""
    raise ConnectionResetError


def test_connections_close_when_the_target_does_not_listen():
    async def scenario(stage: Stage) -> None:
        await stage.open(LineSettings())
        stage.server.close()
        reader, _ = await stage.connect()
        assert await reader.read() == b""

    staged(scenario)


def test_a_receiver_that_does_not_read_stops_the_sender():
    """The proxy keeps a bounded number of bytes."""

    async def scenario(stage: Stage) -> None:
        await stage.open(LineSettings())
        (_, writer), _ = await stage.pair()
        sent = 0
        with suppress(TimeoutError):
            while sent < 1 << 28:
                writer.write(bytes(1 << 20))
                await asyncio.wait_for(writer.drain(), 1.0)
                sent += 1 << 20
        assert sent < 1 << 26

    staged(scenario)


# --- as a process -------------------------------------------------------------------------------------------------


@contextmanager
def echo() -> Iterator[str]:
    """A ROUTER that sends everything back, in a thread."""
    stop = threading.Event()
    with zmq.Context() as context:
        router, address = bind_router(context, "tcp://127.0.0.1:*")
        thread = threading.Thread(target=_echo, args=(router, stop))
        thread.start()
        try:
            yield address
        finally:
            stop.set()
            thread.join()


def _echo(router: zmq.Socket[bytes], stop: threading.Event) -> None:
    with router:
        while not stop.is_set():
            if router.poll(50):
                for frames in drain(router):
                    try_send(router, frames)


def start(spawn, upstream: str, *options: str) -> str:
    """Start the proxy; return the address that it prints."""
    process = spawn("--upstream", upstream, *options, program=PROGRAM)
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end and process.poll() is None:
        found = re.match(r"tcp://\S+\n", process.output.read_text())
        if found:
            return found.group().strip()
        time.sleep(0.02)
    raise AssertionError(process.output.read_text())


def test_a_round_trip_takes_the_set_time(spawn):
    """Never less than what was set, and at best little more, on a machine as busy as it is."""
    with echo() as upstream, zmq.Context() as context:
        address = start(spawn, upstream, "--rtt-ms", "30")
        with connect_dealer(context, address, queue=True) as peer:
            times = [round_trip(peer, b"%d" % i) for i in range(30)]
            peer.close(0)
    assert min(times) >= 0.03
    assert min(times) < 0.04
    assert statistics.median(times) < 0.08


def round_trip(peer: zmq.Socket[bytes], payload: bytes) -> float:
    started = time.monotonic()
    peer.send(payload)
    assert peer.poll(PATIENCE_S * 1000), "no answer"
    assert peer.recv() == payload
    return time.monotonic() - started


def test_it_listens_on_this_machine_only(spawn):
    process = spawn("--listen", "tcp://0.0.0.0:*", program=PROGRAM)
    assert process.wait(PATIENCE_S) == 2
    assert "which other machines can reach" in process.output.read_text()


def test_it_ends_when_asked(spawn):
    """SIGTERM: exit status 0, and a line on what was relayed."""
    process = spawn("--upstream", free_address(), program=PROGRAM)
    end = time.monotonic() + PATIENCE_S
    while "tcp://" not in process.output.read_text() and time.monotonic() < end:
        time.sleep(0.02)
    process.terminate()
    assert process.wait(PATIENCE_S) == 0
    assert "connections 0, bytes 0, cut 0" in process.output.read_text()


def test_zeromq_comes_back_after_cuts(spawn):
    """Messages in flight are lost with their connections; the sockets connect again, and answers go on."""
    with echo() as upstream, zmq.Context() as context:
        address = start(spawn, upstream, "--rtt-ms", "2", "--cut-every-s", "0.2", "--cut-s", "0.05")
        with connect_dealer(context, address, queue=True) as peer:
            began, answers = time.monotonic(), 0
            while answers < 100 or time.monotonic() < began + 2:
                assert time.monotonic() < began + PATIENCE_S, f"{answers} answers"
                peer.send(b"x")
                answers += peer.poll(100) and len(list(drain(peer)))
            peer.close(0)


def test_keys_pass_through(spawn, tmp_path):
    """Behind the proxy Bob still does not see Alice's job, a drafter submits none, and strangers are refused."""
    keys = make_all(tmp_path / "keys")
    make_keys(tmp_path / "strange", "stranger", ("client",))
    shutil.copy(Path(keys) / "hub.pub", tmp_path / "strange")
    with served(keys) as up:
        address = start(spawn, up.address, "--rtt-ms", "10")
        with Client(address, keys=f"{keys}/alice") as client:
            client.wait_until_ready()
        alice_submits_and_bob_sees_nothing(address, keys)
        a_drafter_is_no_client(address, keys)
        for own in ("", str(tmp_path / "strange")):
            with (
                Client(address, keys=own, timeout_s=0.3, cache_dir=tmp_path) as client,
                pytest.raises(JobError, match="no b"),
            ):
                client.status()


def job() -> Submit:
    return Submit(job_id=80, params=SamplingParams(max_tokens=20), prompt_ids=np.array([5, 6, 7], np.int32))


def alice_submits_and_bob_sees_nothing(address: str, keys: str) -> None:
    with JobDesk(address, PATIENCE_S, f"{keys}/alice") as alice, JobDesk(address, PATIENCE_S, f"{keys}/bob") as bob:
        assert dict(alice.submit([job()])) == {80: None}
        (found,) = alice.fetch([80], wait=True)
        assert found.transcript.token_ids == toy_text([5, 6, 7], 20)
        assert [found.error.code for found in bob.fetch([80], wait=True)] == ["unknown"]


def a_drafter_is_no_client(address: str, keys: str) -> None:
    laptop = curve_to_broker(f"{keys}/laptop", "draft")
    with zmq.Context() as context, connect_dealer(context, address, queue=True, curve=laptop) as socket:
        socket.send_multipart(encode(job()))
        assert socket.poll(PATIENCE_S * 1000)
        assert decode(socket.recv_multipart()).code == "forbidden"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pipeline_over_it_says_the_same(spawn, free_address):
    """The bundled pair, the drafter 20 ms away: drafts arrive and are accepted, and the greedy text is plain
    decoding's."""
    spawn("broker", "--bind", free_address)
    spawn("worker", "--role", "target", "--model", "tiny", "--broker", free_address)
    far = start(spawn, free_address, "--rtt-ms", "20", "--jitter-ms", "2")
    spawn("worker", "--role", "draft", "--model", "tiny", "--broker", far, "--nice", "0")
    with Client(free_address, timeout_s=5) as client:
        wait_ready(client)
        prompts = ["def add(a, b):", "Tom has 3 boxes with 12 pencils each."]
        plain = [client.generate(prompt, max_tokens=80, ignore_eos=True, mode="plain") for prompt in prompts]
        num_accepted = 0
        for _ in range(20):  # on a busy machine all drafts of a short text may come too late
            drafted = [client.generate(prompt, max_tokens=80, ignore_eos=True) for prompt in prompts]
            assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
            num_accepted += sum(result.stats["accepted_tokens"] for result in drafted)
            if num_accepted:
                break
    assert num_accepted > 0
    assert sum(result.stats["draft_tokens"] for result in plain) == 0


def wait_ready(client: Client, patience_s: float = 120) -> None:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        try:
            if min(count_ready(client.status())) >= 1:
                return
        except JobError:
            pass
        time.sleep(0.1)
    raise AssertionError("not all were ready")
