"""So many streams at a time, for so long, through real processes of broker, verifier (a toy model) and gateway: each
text is compared with what the toy says for its seed. Prints JSON: how each stream ended, the first text's times, and
the processes' memory and CPU.

    python -m tests.gateway.load STREAMS SECONDS [MAX_TOKENS [STEP_MS [HOSTILE]]]

HOSTILE connections are kept open beside them: every other one says nothing, the others never end their headers. The
gateway then has the limit of connections that it has by default.
"""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import orjson

from specq import Client
from specq.config import free_address
from specq.protocol import parse_address
from specq.testing import tokenizer_files, toy_text
from specq.text import TextCodec

CODEC = TextCodec(tokenizer_files())
SPECQ = (sys.executable, "-m", "specq")
LATE_S = 60.0  # for the last streams to end
LOOK_S = 10.0  # between two looks at the memory


def place(address: str) -> tuple[str, int]:
    """Return host and port as sockets take them."""
    found = parse_address(address)
    return found.host, found.port


class Load:
    """Lanes that read one stream after another, and what came of these."""

    def __init__(self, http: str, max_tokens: int) -> None:
        self.http, self.max_tokens = http, max_tokens
        self.ended: Counter[str] = Counter()
        self.first_s: list[float] = []
        self.num_hostile = 0  # hostile connections that are open

    async def lane(self, number: int, until: float) -> None:
        """Read streams until then, none of which any other lane has."""
        while time.perf_counter() < until:
            try:
                outcome = await self.stream(number)
            except OSError as error:
                outcome = f"refused: {error.strerror}"
            self.ended[outcome] += 1
            number += 1_000_003
            await asyncio.sleep(1.0 if outcome.startswith("refused") else 0)

    async def hostile(self, number: int) -> None:
        """Hold a connection for ever, and open another where it is closed."""
        while True:
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(*place(self.http))
                self.num_hostile += 1
                try:
                    writer.write(b"" if number % 2 else b"POST /v1/completions HTTP/1.1\r\nHost: local")
                    await reader.read()
                finally:
                    self.num_hostile -= 1
                    writer.close()
            await asyncio.sleep(1.0)

    async def stream(self, number: int) -> str:
        """Return how a stream ended."""
        prompt = [5 + number % 40, 6 + number % 7, 7]
        asked = {"prompt": prompt, "max_tokens": self.max_tokens, "seed": number, "temperature": 0, "ignore_eos": True}
        body = orjson.dumps({**asked, "stream": True, "mode": "plain"})
        head = (
            b"Host: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % len(body)
        )
        reader, writer = await asyncio.open_connection(*place(self.http), limit=1 << 20)
        try:
            started = time.perf_counter()
            writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head + body)
            if b" 200 " not in await reader.readline():
                return f"refused: {(await reader.read()).rpartition(b'message')[2][3:90].decode()}"
            return await self._read(reader, started, CODEC.decode(toy_text(prompt, self.max_tokens, number)))
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, started: float, expected: str) -> str:
        texts: list[str] = []
        num_ends = 0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                data = orjson.loads(line[6:])
                if "error" in data:
                    return f"failed: {data['error']['message'][:90]}"
                if not texts:
                    self.first_s.append(time.perf_counter() - started)
                texts.append(data["choices"][0]["text"])
            num_ends += line.startswith(b"data: [DONE]")
        return "right" if "".join(texts) == expected and num_ends == 1 else "wrong"


class House:
    """The processes, and what they take."""

    def __init__(self, stack: ExitStack, folder: str, num_streams: int, step_ms: str, num_hostile: int) -> None:
        self.broker, self.http = free_address(), free_address()
        toy = (sys.executable, "-m", "tests.journal.toy_target", self.broker, step_ms, "tcp://127.0.0.1:*", "")
        connections = () if num_hostile else ("--connections", str(num_streams + 1000))
        limits = ("--requests-per-key", "100000", *connections, "--timeout-s", str(LATE_S))
        quiet = ("--log-level", "error")
        commands = {
            "broker": (*SPECQ, "broker", "--bind", self.broker, "--journal", f"{folder}/journal", *quiet),
            "verifier": (*toy, str(num_streams)),
            "gateway": (*SPECQ, "serve", "--broker", self.broker, "--bind", self.http, *limits, *quiet),
        }
        environment = {**os.environ, "SPECQ_CACHE": f"{folder}/cache", "OMP_NUM_THREADS": "1"}
        self.processes = {}
        for name, command in commands.items():
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.processes[name] = stack.enter_context(process)
            stack.callback(process.kill)

    def memory_mb(self) -> dict[str, float]:
        return {name: _status_kb(process.pid, "VmRSS") / 1024 for name, process in self.processes.items()}

    def cpu_s(self) -> dict[str, float]:
        return {name: _cpu_s(process.pid) for name, process in self.processes.items()}


def _status_kb(process: int, name: str) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


def _cpu_s(process: int) -> float:
    values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


async def measure(
    house: House, num_streams: int, seconds: float, max_tokens: int, num_hostile: int
) -> dict[str, object]:
    """Return what came of it."""
    load, memory, num_held = Load(house.http, max_tokens), [], []
    hostile = [asyncio.create_task(load.hostile(i)) for i in range(num_hostile)]
    before, started = house.cpu_s(), time.perf_counter()
    lanes = asyncio.gather(*(load.lane(1 + i, started + seconds) for i in range(num_streams)))
    while not lanes.done() and time.perf_counter() < started + seconds + LATE_S:
        memory.append({name: round(size) for name, size in house.memory_mb().items()})
        num_held.append(load.num_hostile)
        await asyncio.wait([lanes], timeout=LOOK_S)
    for task in hostile:
        task.cancel()
    took, after = time.perf_counter() - started, house.cpu_s()
    first = {str(q): round(float(np.quantile(load.first_s, q)), 3) for q in (0.5, 0.99) if load.first_s}
    return {
        "streams_at_a_time": num_streams,
        "hostile_connections": {"kept": num_hostile, "open": num_held},
        "seconds": round(took, 1),
        "max_tokens": max_tokens,
        "ended": dict(load.ended),
        "not_ended": 0 if lanes.done() else "some",
        "tokens_s": round(load.ended["right"] * max_tokens / took, 1),
        "first_s": first,
        "cores": {name: round((after[name] - before[name]) / took, 2) for name in after},
        "memory_mb": memory,
    }


def main(num_streams: str, seconds: str, max_tokens: str = "60", step_ms: str = "250", hostile: str = "0") -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with TemporaryDirectory() as folder, ExitStack() as stack:
        house = House(stack, folder, int(num_streams), step_ms, int(hostile))
        with Client(house.broker, timeout_s=60) as client:
            client.wait_until_ready(timeout_s=60)
        found = asyncio.run(measure(house, int(num_streams), float(seconds), int(max_tokens), int(hostile)))
    sys.stdout.write(orjson.dumps(found | {"step_ms": step_ms}, option=orjson.OPT_INDENT_2).decode() + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
