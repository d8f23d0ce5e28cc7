"""A draft worker that changes networks, in network namespaces (as root)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specq.runtime.usage import reap
from specq.testing.waiting import wait_until

BROKER = "tcp://10.9.0.1:5750"
NEW_PEER = " 0700090A:"  # 10.9.0.7, as the system lists it
LIVENESS = ("--liveness-ms", "20000")


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
def specq(place: Namespace, log: Path, *options: str) -> Iterator[None]:
    """Run a process of specq in a network, and write its log to a file."""
    command = place.command(sys.executable, "-m", "specq", *options, "--log-level", "info")
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        reap(process, 20)


def heard_s_ago(hub: Namespace) -> float:
    """Return when the broker last heard its only worker."""
    report = json.loads(hub.run(f"{sys.executable} -m specq status --json --broker {BROKER}"))
    (worker,) = report["workers"]
    return float(worker["heard_s_ago"])


def test_a_draft_worker_that_changes_networks_stays_registered(tmp_path: Path) -> None:
    """Its old address is gone without a word to the broker. It connects from the new one as the same worker."""
    hub, laptop = Namespace(), Namespace()
    hub_log, log = tmp_path / "hub", tmp_path / "laptop"
    try:
        hub.run("ip link set lo up", f"ip link add h0 type veth peer name w0 netns {laptop.pid}")
        hub.run("ip addr add 10.9.0.1/24 dev h0", "ip link set h0 up")
        laptop.run("ip addr add 10.9.0.2/24 dev w0", "ip link set w0 up")
        served = specq(hub, hub_log, "broker", "--bind", BROKER, "--insecure", "--journal", "none", *LIVENESS)
        with served, specq(laptop, log, "worker", "--role", "draft", "--proposer", "ngram", "--broker", BROKER):
            wait_until(lambda: "worker_welcomed" in log.read_text())
            laptop.run("ip addr del 10.9.0.2/24 dev w0", "ip addr add 10.9.0.7/24 dev w0")
            wait_until(lambda: NEW_PEER in hub.run("cat /proc/net/tcp"), 15)
            wait_until(lambda: heard_s_ago(hub) < 1.0, 15)
        said = hub_log.read_text()
        assert (said.count("worker_registered"), said.count("worker_lost")) == (1, 0)
    finally:
        hub.close()
        laptop.close()
