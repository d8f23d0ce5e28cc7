"""Every role by IPv6, in processes: what is asked for over HTTP goes through a broker, a verifier and a drafter of
::1."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import urllib.request

import pytest

from specq import Client
from specq.transport.network import has_ipv6

READY_S = 90.0


def free_ports(count: int) -> list[int]:
    """Return free TCP ports of ::1."""
    probes = [socket.create_server(("::1", 0), family=socket.AF_INET6) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.mark.slow
@pytest.mark.skipif(not has_ipv6(), reason="tests/transport/test_network.py asserts what such a machine says")
def test_all_roles_and_http_work_over_ipv6(spawn):
    broker_port, http_port, target_port = free_ports(3)
    broker = f"tcp://[::1]:{broker_port}"
    spawn("broker", "--bind", broker, "--journal", "none")
    spawn("worker", "--role", "target", "--model", "tiny", "--broker", broker, "--bind", f"tcp://[::1]:{target_port}")
    spawn("worker", "--role", "draft", "--model", "tiny", "--broker", broker)
    spawn("serve", "--broker", broker, "--bind", f"tcp://[::1]:{http_port}")
    with Client(broker, timeout_s=READY_S, wait_s=READY_S) as client:
        client.wait_until_ready(num_drafters=1)
        expected = client.generate("def", max_tokens=8, temperature=0).text
    body = json.dumps({"model": "tiny", "prompt": "def", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://[::1]:{http_port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=READY_S) as answer:
        assert json.load(answer)["choices"][0]["text"] == expected
    shown = subprocess.run(
        [sys.executable, "-m", "specq", "top", "--once", "--interval", "0.1", "--broker", broker],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert "tiny" in shown
