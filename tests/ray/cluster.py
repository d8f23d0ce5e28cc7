"""A real Ray cluster of several nodes on this machine, with token authentication; each node can be killed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from specq.config.values import free_address
from specq.testing import wait_until

# Ray reads these once in a process, so they are set before it is imported.
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
os.environ.update(TOKEN)

RAY = Path(sys.executable).with_name("ray")
STORE_BYTES = str(80 << 20)
# Ray's defaults notice a silent node after about 13 s; these after about 4 s.
NOTICE = json.dumps(
    {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 1000,
        "health_check_timeout_ms": 1000,
        "health_check_failure_threshold": 3,
    }
)
START_S = 60.0


class RayCluster:
    """A head without CPUs, and worker nodes with 8 each. `token`: whether Ray asks for one.

    `redis`: HOST:PORT of a Redis that keeps the head's state.
    """

    def __init__(self, nodes: int, *, token: bool = True, redis: str = "") -> None:
        self.num_nodes = nodes
        self.port = free_address().rpartition(":")[2]
        self.folder = Path(tempfile.mkdtemp(prefix="ray"))  # short: paths of sockets have 107 bytes
        self.raylets: list[int] = []
        self.head = 0
        self.sessions: list[int] = []  # of the operating system: one for each node
        auth = TOKEN if token else {"RAY_AUTH_MODE": "disabled"}
        self.environment = {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            **auth,
            **({"RAY_REDIS_ADDRESS": redis} if redis else {}),
        }
        self.address = ""

    def __enter__(self) -> Self:
        self.start_head()
        for _ in range(self.num_nodes):
            self.add_node()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for session in self.sessions:
            kill_all(session)
        os.environ.pop("RAY_ADDRESS", None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def environment_now(self) -> dict[str, str]:
        """Return the environment of this cluster's processes and of those that connect to it."""
        return os.environ | self.environment

    def start_head(self) -> None:
        """Start the head, at the same port each time."""
        # Here the other nodes are on this machine too, and Ray would take them for the former head.
        (self.folder / "ray_current_cluster").unlink(missing_ok=True)
        self.head = self._ray("start", "--head", "--port", self.port, "--num-cpus", "0", "--include-dashboard", "false",
                  "--temp-dir", str(self.folder), "--system-config", NOTICE, "--ray-client-server-port",
                  free_address().rpartition(":")[2])  # fmt: skip
        gcs = next(_line(pid) for pid in processes_of(self.head) if "gcs_server" in _line(pid))
        host = next(part.partition("=")[2] for part in gcs.split("\0") if part.startswith("--node-ip-address="))
        self.address = f"{host}:{self.port}"
        os.environ["RAY_ADDRESS"] = self.environment["RAY_ADDRESS"] = self.address

    def add_node(self) -> int:
        """Start a worker node; return its raylet's process id."""
        session = self._ray("start", "--address", self.address, "--num-cpus", "8")
        (found,) = _raylets(session)
        self.raylets.append(found)
        return found

    def kill_node(self, raylet: int) -> None:
        """Kill all processes of a node, as if its machine died."""
        self.raylets.remove(raylet)
        kill_all(os.getsid(raylet))

    def kill_head(self) -> None:
        """Kill all processes of the head."""
        kill_all(self.head)

    @property
    def all_raylets(self) -> list[int]:
        """The raylets of all nodes, the head's too."""
        return [*self.raylets, *_raylets(self.head)]

    @staticmethod
    def is_alive(pid: int) -> bool:
        return bool(_line(pid))

    def _ray(self, *arguments: str) -> int:
        """Run `ray`; return the session of the processes that it leaves."""
        command = [str(RAY), *arguments, "--object-store-memory", STORE_BYTES, "--disable-usage-stats"]
        for _ in range(3):  # a start may find a port taken, or the machine stand still
            ours = {"env": self.environment_now(), "start_new_session": True}
            with (
                tempfile.TemporaryFile() as said,
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, **ours) as process,
            ):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(START_S)
                if process.returncode == 0:
                    self.sessions.append(process.pid)
                    return process.pid
                kill_all(process.pid)
                said.seek(0)
                reason = said.read().decode("utf-8", "replace")[-4000:]
            time.sleep(0.5)
        raise AssertionError(reason)


def processes_of(session: int) -> list[int]:
    """Return the processes of a session of the operating system."""
    found = []
    for pid in (int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()):
        with suppress(ProcessLookupError):
            if os.getsid(pid) == session:
                found.append(pid)
    return found


def kill_all(session: int) -> None:
    """Kill the processes of a session, and wait until they are gone."""

    def is_empty() -> bool:
        found = [pid for pid in processes_of(session) if _line(pid)]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_until(is_empty, START_S)


def _raylets(session: int) -> list[int]:
    return [pid for pid in processes_of(session) if "/raylet\0" in _line(pid)]


def _line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace")
    return ""


def socket_of(raylet: int) -> str:
    """Return the socket of a raylet, which `ray.nodes()` has too."""
    parts = _line(raylet).split("\0")
    return next(part.partition("=")[2] for part in parts if part.startswith("--raylet_socket_name="))
