"""The gateway in front of real processes: kill -9 of each in mid-stream, and the stream goes on where it broke."""

from __future__ import annotations

import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx2
import orjson
import pytest

from specq import Client
from specq.config.values import free_address
from specq.testing.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
BODY = {
    "messages": [{"role": "user", "content": "Tom has 3 boxes with 12 pencils each. How many pencils has he?"}],
    "max_tokens": 400,
    "temperature": 0.8,
    "ignore_eos": True,
    "stream": True,
}
PATH = "/v1/chat/completions"
NUM_MANY, MANY_TOKENS = 50, 150
RETRY_S = 0.05  # as clients wait before they ask again


class House:
    """A broker with a journal, a slow verifier and a gateway, each a process that can be killed and started again.

    `serve`: further options of the gateway.
    """

    def __init__(self, spawn, folder: Path, *serve: str) -> None:
        self.spawn, self.broker, self.http = spawn, free_address(), free_address()
        broker = ("broker", "--bind", self.broker, "--journal", str(folder / "journal"), "--heartbeat-ms", "100")
        slow = ("--engine", "slow", "--model", "tiny", "--prompt-lookup", "none")
        target = ("worker", "--role", "target", "--broker", self.broker, *slow)
        self.commands = {
            "broker": broker,
            "target": target,
            "gateway": ("serve", "--broker", self.broker, "--bind", self.http, "--timeout-s", "20", *serve),
        }
        self.processes = {}
        for name in self.commands:
            self.start(name)
        with Client(self.broker) as client:
            client.wait_until_ready(timeout_s=120)
        wait_until(lambda: self.status("/ready") == 200, 60)

    def start(self, name: str) -> None:
        slow = {"program": (sys.executable, "-m", "tests.end_to_end.slow_target")} if name == "target" else {}
        self.processes[name] = self.spawn(*self.commands[name], **slow)

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    @property
    def url(self) -> str:
        return self.http.replace("tcp", "http")

    def status(self, path: str) -> int:
        try:
            return httpx2.get(self.url + path, trust_env=False, timeout=60).status_code
        except httpx2.TransportError:
            return 0


class Reader:
    """Reads a stream to its end, however often it breaks, by key and position; `between` is called after so many
    events."""

    def __init__(self, house: House, key: str, **changes) -> None:
        self.house, self.key, self.body = house, key, BODY | changes
        self.events: list[dict] = []
        self.last, self.done, self.breaks = "", False, 0

    def read(self, between=None, after: int = 10) -> str:
        while not self.done:
            try:
                self._read(between, after)
            except httpx2.TransportError:
                self.breaks += 1
            assert self.breaks < 1000, "the stream never went on"
            if not self.done:
                time.sleep(RETRY_S)
        return "".join(event["choices"][0]["delta"].get("content", "") for event in self.events)

    def _read(self, between, after) -> None:
        headers = {"Idempotency-Key": self.key} | ({"Last-Event-ID": self.last} if self.last else {})
        with (
            httpx2.Client(base_url=self.house.url, trust_env=False, timeout=60) as client,
            client.stream("POST", PATH, json=self.body, headers=headers) as response,
        ):
            if response.status_code == 503:
                self.breaks += 1
                return
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("id: "):
                    waiting = line[4:]
                elif line == "data: [DONE]":
                    self.done = True
                elif line.startswith("data: "):
                    data = orjson.loads(line[6:])
                    if "error" in data:
                        assert data["error"]["type"] == "server_error", data
                        return
                    self.events.append(data)
                    self.last = waiting
                    if between is not None and len(self.events) == after:
                        between()


@pytest.fixture
def house(spawn, tmp_path, own_cache):
    return House(spawn, tmp_path)


def test_kill_of_each_in_mid_stream(house):
    """Each stream ends with the text of an undisturbed one."""
    texts = {}
    for name in ("gateway", "broker", "target"):

        def restart(name=name):
            house.kill(name)
            house.start(name)

        reader = Reader(house, f"kill {name}")
        texts[name] = reader.read(restart)
        assert [event["choices"][0]["finish_reason"] for event in reader.events].count("length") == 1
        assert (reader.breaks > 0) or name != "gateway"

    with Client(house.broker) as client:
        for name, text in texts.items():
            seed = _seed(f"http  kill {name}")
            alone = client.generate(
                messages=BODY["messages"], max_tokens=400, temperature=0.8, ignore_eos=True, seed=seed, mode="plain"
            )
            assert alone.text == text
    assert len(set(texts.values())) == 3


def test_all_three_at_once(house):
    def restart():
        for name in house.commands:
            house.kill(name)
        for name in house.commands:
            house.start(name)

    reader = Reader(house, "all")
    text = reader.read(restart)

    assert text == Reader(house, "all").read()
    assert reader.breaks > 0


@pytest.mark.slow
def test_many_streams_and_many_kills(house):
    """Fifty streams at a time, and gateway, broker and verifier killed in turn, twice: each ends with the text of its
    seed."""
    readers = [Reader(house, f"many {i}", max_tokens=MANY_TOKENS, seed=i) for i in range(NUM_MANY)]
    with ThreadPoolExecutor(NUM_MANY) as pool:
        texts = [pool.submit(reader.read) for reader in readers]
        for kill, name in enumerate(["gateway", "broker", "target"] * 2):
            least = (kill + 1) * NUM_MANY * MANY_TOKENS // 10
            wait_until(lambda least=least: _num_read(readers) > least or _failed(texts), 120)
            for failed in _failed(texts):
                raise failed
            house.kill(name)
            house.start(name)
        found = [text.result(120) for text in texts]

    assert sum(reader.breaks for reader in readers) >= NUM_MANY
    with Client(house.broker) as client:
        plain = {"max_tokens": MANY_TOKENS, "temperature": 0.8, "ignore_eos": True, "mode": "plain"}
        jobs = [client.submit(messages=BODY["messages"], seed=i, **plain) for i in range(NUM_MANY)]
        assert [job.result(120).text for job in jobs] == found
    assert len(set(found)) == NUM_MANY


def _num_read(readers: list[Reader]) -> int:
    """Return how many tokens have arrived: the position of the last event of each."""
    return sum(int(reader.last.rstrip("e") or 0) for reader in readers)


def _failed(texts: list[Future[str]]) -> list[BaseException]:
    """Return what those readers died of that have died."""
    return [error for text in texts if text.done() and (error := text.exception()) is not None]


def _seed(job_key: str) -> int:
    from specq.client.parameters import keyed_number

    return keyed_number(f"{job_key} seed")
