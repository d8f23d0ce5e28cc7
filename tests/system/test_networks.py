"""Workers that change networks, or that nobody can connect to, in network namespaces (as root)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from specq.runtime.usage import reap
from specq.testing.secured import make_all
from specq.testing.toy import toy_text
from specq.testing.waiting import wait_until

BROKER = "tcp://10.9.0.1:5750"
NEW_PEER = " 0700090A:"  # 10.9.0.7, as the system lists it
LIVENESS = ("--liveness-ms", "20000")
TOY_TARGET, TOY_PROGRAMS = "tests.journal.toy_target", "tests.chaos.programs"
STEP_MS = "20"
PROMPT = [5, 6, 7]
LISTENING = " 0A "  # the state of a socket that accepts connections, as the system lists it
FIREWALL = """
table inet firewall {
    chain forward {
        type filter hook forward priority 0; policy drop;
        iifname "in" accept
        ct state established,related accept
    }
    chain input { type filter hook input priority 0; policy drop; }
    chain leaving { type nat hook postrouting priority 100; oifname "out" masquerade; }
}
"""


class Namespace:
    """A network of its own, while a process holds it."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "600"])
        self.pid = self._holder.pid
        own = Path("/proc/self/ns/net").readlink()
        wait_until(lambda: Path(f"/proc/{self.pid}/ns/net").readlink() != own)

    def command(self, *command: str) -> list[str]:
        return ["nsenter", "--target", str(self.pid), "--net", *command]

    def run(self, *commands: str) -> str:
        """Run commands there; return what the last one prints."""
        for command in commands:
            output = subprocess.run(self.command(*command.split()), check=True, capture_output=True, text=True).stdout
        return output

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()


@contextmanager
def process(place: Namespace, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python module in a network, and write its log to a file. It must not end by itself."""
    with log.open("wb") as file:
        found = subprocess.Popen(
            place.command(sys.executable, "-m", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield found
        assert found.poll() is None, log.read_text()
    finally:
        found.terminate()
        reap(found, 20)


def specq(place: Namespace, log: Path, *options: str) -> AbstractContextManager[object]:
    """Run a process of specq in a network."""
    return process(place, log, "specq", *options, "--log-level", "info")


def workers(hub: Namespace, *options: str) -> dict[str, dict[str, Any]]:
    """Return the broker's report of its workers, by role."""
    report = json.loads(hub.run(f"{sys.executable} -m specq status --json --broker {BROKER} {' '.join(options)}"))
    return {worker["role"]: worker for worker in report["workers"]}


@pytest.fixture
def hub() -> Iterator[Namespace]:
    with a_network() as found:
        yield found


@pytest.fixture
def laptop(hub: Namespace) -> Iterator[Namespace]:
    """A network with an address beside the hub's."""
    with a_network() as found:
        hub.run(f"ip link add h0 type veth peer name w0 netns {found.pid}")
        hub.run("ip addr add 10.9.0.1/24 dev h0", "ip link set h0 up")
        found.run("ip addr add 10.9.0.2/24 dev w0", "ip link set w0 up")
        yield found


@contextmanager
def a_network() -> Iterator[Namespace]:
    found = Namespace()
    try:
        found.run("ip link set lo up")
        yield found
    finally:
        found.close()


def move(hub: Namespace, laptop: Namespace) -> None:
    """Give the laptop another address, without a word to the broker, and wait until it is connected again."""
    laptop.run("ip addr del 10.9.0.2/24 dev w0", "ip addr add 10.9.0.7/24 dev w0")
    wait_until(lambda: NEW_PEER in hub.run("cat /proc/net/tcp"), 15)


def test_a_draft_worker_that_changes_networks_stays_registered(
    hub: Namespace, laptop: Namespace, tmp_path: Path
) -> None:
    """Its old address is gone without a word to the broker. It connects from the new one as the same worker."""
    hub_log, log = tmp_path / "hub", tmp_path / "laptop"
    served = specq(hub, hub_log, "broker", "--bind", BROKER, "--insecure", "--journal", "none", *LIVENESS)
    with served, specq(laptop, log, "worker", "--role", "draft", "--proposer", "ngram", "--broker", BROKER):
        wait_until(lambda: "worker_welcomed" in log.read_text())
        move(hub, laptop)
        wait_until(lambda: workers(hub)["draft"]["heard_s_ago"] < 1.0, 15)
    said = hub_log.read_text()
    assert (said.count("worker_registered"), said.count("worker_lost")) == (1, 0)


def test_a_draft_worker_that_changes_networks_resumes_its_lanes(
    hub: Namespace, laptop: Namespace, tmp_path: Path
) -> None:
    """It goes on to draft for the same lane of the same session, which it was assigned once."""
    served = specq(hub, tmp_path / "hub", "broker", "--bind", BROKER, "--insecure", "--journal", "none", *LIVENESS)
    target = process(hub, tmp_path / "target", TOY_TARGET, BROKER, STEP_MS)
    drafter = process(laptop, tmp_path / "laptop", TOY_PROGRAMS, "drafter", BROKER, "toy-draft")
    with served, target, drafter:
        wait_until(lambda: len(workers(hub)) == 2, 20)
        with process(hub, tmp_path / "client", "specq", "submit", str(prompts(tmp_path, 4000)), "--broker", BROKER):
            wait_until(lambda: workers(hub)["draft"]["drafts"] > 20, 20)
            laptop.run("ip addr del 10.9.0.2/24 dev w0")
            wait_until(lambda: workers(hub)["draft"]["heard_s_ago"] > 1.0, 10)
            before = workers(hub)["draft"]["drafts"]
            laptop.run("ip addr add 10.9.0.7/24 dev w0")
            wait_until(lambda: workers(hub)["draft"]["drafts"] > before + 20, 15)
            trace = json.loads(hub.run(f"{sys.executable} -m specq trace --json --broker {BROKER}"))
    assigned = [one["process"] for one in trace["events"] if one["event"] == "assigned"]
    assert assigned.count("broker") == 1
    assert assigned.count("toy-draft") <= 1  # its own note of it may not have arrived
    assert "worker_lost" not in (tmp_path / "hub").read_text()


def test_workers_that_nobody_can_connect_to_serve_jobs(hub: Namespace, tmp_path: Path) -> None:
    """A verifier and a draft worker behind a firewall with NAT, which refuses each incoming connection. With keys."""
    keys = make_all(tmp_path / "keys")
    with a_network() as gate, a_network() as home:
        connect(hub, gate, home)
        with process(home, tmp_path / "knocked", "http.server", "8080"):
            wait_until(lambda: LISTENING in home.run("cat /proc/net/tcp"))
            assert can_connect(home, "192.168.9.2")
            assert not can_connect(hub, "192.168.9.2")
        served = specq(hub, tmp_path / "hub", "broker", "--bind", BROKER, "--keys", keys, "--journal", "none")
        target = process(home, tmp_path / "target", TOY_TARGET, BROKER, STEP_MS, "none", "", "64", keys)
        drafter = process(home, tmp_path / "draft", TOY_PROGRAMS, "drafter", BROKER, "toy-draft", keys)
        with served, target, drafter:
            alice = ("--keys", f"{keys}/alice")
            wait_until(lambda: len(workers(hub, *alice)) == 2, 20)
            results = tmp_path / "results"
            asked = f"{sys.executable} -m specq submit {prompts(tmp_path, 300)} --out {results} --broker {BROKER}"
            hub.run(f"{asked} {' '.join(alice)}")
            found = workers(hub, *alice)
        listens = home.run("cat /proc/net/tcp")
    (result,) = map(json.loads, results.read_text().splitlines())
    assert result["token_ids"] == toy_text(PROMPT, 300)
    assert result["stats"]["accepted_tokens"] > 0
    assert found["target"]["sent_bytes"] > found["target"]["tokens"] > 0
    assert LISTENING not in listens, "no port of these processes is open"


def connect(hub: Namespace, gate: Namespace, home: Namespace) -> None:
    """Let `home` reach `hub` through `gate`, which translates addresses and lets nobody in."""
    hub.run(f"ip link add h0 type veth peer name out netns {gate.pid}")
    home.run(f"ip link add w0 type veth peer name in netns {gate.pid}")
    hub.run("ip addr add 10.9.0.1/24 dev h0", "ip link set h0 up", "ip route add 192.168.9.0/24 via 10.9.0.9")
    gate.run("ip addr add 10.9.0.9/24 dev out", "ip link set out up", "ip addr add 192.168.9.1/24 dev in")
    gate.run("ip link set in up", "sysctl -q -w net.ipv4.ip_forward=1")
    home.run("ip addr add 192.168.9.2/24 dev w0", "ip link set w0 up", "ip route add default via 192.168.9.1")
    subprocess.run(gate.command("nft", "-f", "-"), input=FIREWALL, check=True, text=True)


def can_connect(place: Namespace, host: str) -> bool:
    """Return whether a connection to port 8080 comes to stand."""
    knock = f"import socket; socket.create_connection(({host!r}, 8080), 0.5)"
    done = subprocess.run(place.command(sys.executable, "-c", knock), check=False, stderr=subprocess.DEVNULL)
    return done.returncode == 0


def prompts(directory: Path, max_tokens: int) -> Path:
    """Return a file with one job of the toy's."""
    path = directory / "prompts.jsonl"
    path.write_text(json.dumps({"token_ids": PROMPT, "max_tokens": max_tokens}) + "\n")
    return path
