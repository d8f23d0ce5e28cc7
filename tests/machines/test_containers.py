"""The containers' commands and probes of the overlay with several brokers run here, as the manifests have them.

Replaced are what a cluster gives: mounted folders, names of hosts, ports. A journal in PostgreSQL, keys, API keys, TLS.
"""

from __future__ import annotations

import base64
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from specq.config import cache_dir, free_address
from specq.testing.waiting import wait_until
from tests.conftest import Spawn
from tests.journal.cluster import running
from tests.machines import manifests
from tests.machines.small_model import write_model

pytestmark = [pytest.mark.machines, pytest.mark.timeout(240)]
OVERLAY = "brokers"
UP_S = 90
USER = "with_password"  # scripts/cluster.sh
SPECQ = shlex.join([sys.executable, "-m", "specq"])


class Pods:
    """A folder for what is mounted, and the processes of containers."""

    def __init__(self, folder: Path, spawn: Spawn) -> None:
        self.folder, self.spawn = folder, spawn
        self.found = manifests.workloads(OVERLAY)
        self.brokers = [free_address() for _ in range(3)]
        self.http = free_address()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.database = running().new_database()
        self._make_secrets()
        (folder / "models").mkdir()
        write_model(folder / "models")
        (folder / "models" / "draft.gguf").symlink_to("target.gguf")

    def _make_secrets(self) -> None:
        """Run the guide's commands that make keys and secrets. What they would send to a cluster becomes folders."""
        self.database.server.run(f"CREATE ROLE {USER} LOGIN SUPERUSER PASSWORD 'secret of \u00e4'")
        (self.folder / "pgpass").write_text(f"*:*:*:{USER}:secret of \u00e4\n", "utf-8")
        guide = (manifests.ROOT / "docs" / "guides" / "cluster.md").read_text("utf-8").splitlines()
        lines = [line.strip() for line in guide if re.match(r" {8}(specq keys|cp|kubectl create) ", line)]
        script = [
            "set -e; echo authority > ca.crt",
            "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=gateway -keyout tls.key -out tls.crt 2>/dev/null",
            f'specq() {{ {SPECQ} "$@" >> told; }}',
            f'made() {{ echo ---; {manifests.kubectl()} "$@" --dry-run=client -o yaml; }}',
            'kubectl() { [ $2 != secret ] || made "$@"; }',
            *lines,
        ]
        command = ["bash", "-c", "\n".join(script)]
        ended = subprocess.run(command, check=True, cwd=self.folder, capture_output=True, text=True, timeout=100)
        told = (self.folder / "told").read_text().split()
        self.api_key = next(word for word in told if word.startswith("sk-specq-"))
        for secret in yaml.safe_load_all(ended.stdout):
            place = self.folder / "secrets" / secret["metadata"]["name"]
            place.mkdir(parents=True)
            for name, value in secret["data"].items():
                (place / name).write_bytes(base64.b64decode(value))
                (place / name).chmod(0o400)

    def _place(self, pod: str, volume: dict[str, Any]) -> Path:
        """Return where a volume is here."""
        if "secret" in volume:
            return self.folder / "secrets" / volume["secret"]["secretName"]
        return self.folder / ("models" if "persistentVolumeClaim" in volume else f"scratch-{pod}")

    def _here(self, pod: str, workload: str, text: str) -> str:
        """Return a text of a manifest with the places that it has here."""
        volumes = {volume["name"]: volume for volume in manifests.pod(self.found[workload])["volumes"]}
        for mount in manifests.main_container(self.found[workload])["volumeMounts"]:
            text = text.replace(mount["mountPath"], str(self._place(pod, volumes[mount["name"]])))
        for i, address in enumerate(self.brokers):
            text = text.replace(f"tcp://broker-{i}.broker:5750", address)
        if text.endswith("tcp://0.0.0.0:5750"):
            text = text.replace("tcp://0.0.0.0:5750", self.brokers[int(pod[-1])])
        return text.replace("tcp://0.0.0.0:8000", self.http)

    def _run(self, pod: str, workload: str, command: list[str], env: dict[str, str]) -> list[str]:
        return [self._here(pod, workload, manifests.expanded(part, env)) for part in command]

    def start(self, pod: str) -> None:
        """Run the init containers of a pod, then start its container."""
        workload, _, index = pod.partition("-")
        (self.folder / f"scratch-{pod}").mkdir()
        spec, container = manifests.pod(self.found[workload]), manifests.main_container(self.found[workload])
        env = manifests.environment(OVERLAY, container, POD_NAME=pod, INDEX=index, THREADS="1")
        env["JOURNAL"] = f"postgresql://{USER}@127.0.0.1:{self.database.server.port}/{self.database.name}"
        for init in spec.get("initContainers", []):
            subprocess.run(self._run(pod, workload, init["command"], {}), check=True, timeout=60)
        _, *arguments = self._run(pod, workload, container["command"] + container["args"], env)
        own = {name: self._here(pod, workload, value) for name, value in env.items()}
        usual = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "SPECQ_STATE") if name in os.environ}
        given = [f"{name}={value}" for name, value in (usual | own | {"SPECQ_CACHE": str(cache_dir())}).items()]
        self.processes[pod] = self.spawn(*arguments, program=("env", "-i", *given, *shlex.split(SPECQ)))

    def probe(self, pod: str, kind: str) -> bool:
        """Run a probe once; return whether it succeeds."""
        workload = pod.partition("-")[0]
        probe: dict[str, Any] = manifests.main_container(self.found[workload])[f"{kind}Probe"]
        if "exec" in probe:
            command = self._run(pod, workload, probe["exec"]["command"], {})
            return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0
        try:
            answer = self.get(probe["httpGet"]["path"], timeout=probe["timeoutSeconds"])
        except httpx2.TransportError:
            return False
        return answer.status_code == 200

    def get(self, path: str, **options: Any) -> httpx2.Response:
        url = self.http.replace("tcp", "https") + path
        return httpx2.get(url, verify=False, trust_env=False, **options)

    def wait(self, pod: str, kind: str = "readiness") -> None:
        wait_until(lambda: self.processes[pod].poll() is not None or self.probe(pod, kind), UP_S)
        assert self.processes[pod].poll() is None, self.processes[pod].output.read_text()

    def asked(self, **options: Any) -> dict[str, Any]:
        """Return the arguments of a request for a completion."""
        (model,) = self.get("/v1/models", headers=self.headers).json()["data"]
        body = {"model": model["id"], "prompt": "a day", "max_tokens": 24, "temperature": 0, **options}
        url = self.http.replace("tcp", "https") + "/v1/completions"
        return {"url": url, "json": body, "headers": self.headers, "timeout": 60}

    def complete(self) -> dict[str, Any]:
        return httpx2.post(**self.asked(), verify=False, trust_env=False).raise_for_status().json()

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"}

    def end(self, pod: str) -> None:
        """Send SIGTERM. The process must end in good order within the grace period."""
        process = self.processes.pop(pod)
        process.send_signal(signal.SIGTERM)
        assert process.wait(self.grace(pod)) == 0, process.output.read_text()

    def grace(self, pod: str) -> int:
        return manifests.pod(self.found[pod.partition("-")[0]])["terminationGracePeriodSeconds"]


@pytest.fixture
def pods(tmp_path: Path, spawn: Spawn) -> Iterator[Pods]:
    started = Pods(tmp_path, spawn)
    yield started
    for process in started.processes.values():  # of a test that failed
        process.kill()
    for statement in (f"DROP DATABASE {started.database.name} WITH (FORCE)", f"DROP ROLE {USER}"):
        started.database.server.run(statement)


def test_the_containers_serve_and_drain(pods: Pods):
    names = ("broker-0", "broker-1", "verifier-x", "drafter-x", "gateway-1")
    pods.start("verifier-x")
    wait_until((pods.folder / "scratch-verifier-x" / "health").exists, UP_S)
    assert not pods.probe("verifier-x", "readiness")
    for name in names:
        if name not in pods.processes:
            pods.start(name)
    for name in names:
        pods.wait(name)
        if not name.startswith("gateway"):
            assert pods.probe(name, "startup")
        assert pods.probe(name, "liveness")

    first = pods.complete()

    assert 0 < first["usage"]["completion_tokens"] <= 24
    series = pods.get("/metrics", headers=pods.headers).text
    assert all(f'worker="{name}"' in series for name in ("verifier-x", "drafter-x"))
    assert pods.get("/metrics").status_code == 401
    os.kill(pods.processes["drafter-x"].pid, signal.SIGSTOP)  # a process that hangs
    health = pods.folder / "scratch-drafter-x" / "health"
    os.utime(health, (time.time() - 120,) * 2)
    assert not pods.probe("drafter-x", "liveness")
    os.kill(pods.processes["drafter-x"].pid, signal.SIGCONT)
    wait_until(lambda: pods.probe("drafter-x", "liveness"))

    pods.end("broker-1")  # the gateway's own
    again = pods.complete()

    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    asked = pods.asked(max_tokens=400, ignore_eos=True, stream=True)
    with httpx2.Client(verify=False, trust_env=False) as http, http.stream("POST", **asked) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        pods.processes["gateway-1"].send_signal(signal.SIGTERM)
        assert "data: [DONE]" in list(lines)  # it first ends its requests
    assert pods.processes.pop("gateway-1").wait(pods.grace("gateway-1")) == 0
    for name in ("verifier-x", "drafter-x", "broker-0"):
        pods.end(name)
