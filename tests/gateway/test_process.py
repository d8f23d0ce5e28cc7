"""`specq serve` as a process, and the commands around it."""

from __future__ import annotations

import signal
import socket
import stat

import httpx2
import pytest
from click.testing import CliRunner

from specq.cli import main
from specq.config import BrokerConfig, Config, ServeConfig, UpConfig
from specq.gateway import ApiKeys
from specq.processes.up import members
from specq.protocol import Cancel, ConfigError, Submit
from specq.testing.fake_broker import answer
from specq.testing.waiting import wait_until


def is_up(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx2.TransportError:
        return False


@pytest.fixture
def serve(spawn, broker, free_address, own_cache):
    """A gateway's process, and its URL."""
    process = spawn("serve", "--broker", broker.address, "--bind", free_address, "--drain-seconds", "1")
    url = free_address.replace("tcp", "http")
    wait_until(lambda: is_up(url), 30)
    return process, url


def test_it_serves_and_ends(serve):
    """SIGTERM ends it with status 0, and it has said where it was."""
    process, url = serve
    answered = httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False)
    process.send_signal(signal.SIGTERM)

    assert answered.status_code == 200
    assert process.wait(60) == 0
    assert f"address={url}" in process.output.read_text()


def test_what_runs_is_stopped_after_a_while(serve, broker):
    """A stream that does not end by itself is cut, and the broker learns of it."""
    broker.reply = lambda m: list(answer(m))[:2] if isinstance(m, Submit) else answer(m)
    process, url = serve
    body = {"prompt": "a", "stream": True, "max_tokens": 90}
    with (
        httpx2.Client(trust_env=False, timeout=20) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as stream,
    ):
        next(stream.iter_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    broker.wait_for(Cancel)


def test_an_address_that_is_taken(spawn, serve):
    _, url = serve
    second = spawn("serve", "--bind", url.replace("http", "tcp"))

    assert second.wait(60) == 2
    assert "another server may use it" in second.output.read_text()


def test_up_starts_no_process_when_its_http_address_is_taken(spawn, free_address):
    """Otherwise the other listener would count as its own gateway, which would be reported as ready."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        taken = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        up = spawn("up", "--serve", "--bind", taken, "--model", "tiny", "--broker", free_address)
        status = up.wait(60)

    said = up.output.read_text()
    assert status == 2
    assert f"cannot bind {taken}" in said
    assert "choose another address with --bind, or `bind` in [serve] of a --config" in said
    assert "gateway" not in said  # nothing was started, and nothing is said to be ready


def test_keys_api_shows_a_key_once(tmp_path):
    path = tmp_path / "api.toml"
    made = CliRunner().invoke(main, ["keys", "api", "alice", "--file", str(path), "--max-priority", "3"])
    again = CliRunner().invoke(main, ["keys", "api", "alice", "--file", str(path)])

    caller = ApiKeys(path).caller(made.stdout.strip())
    assert (caller.name, caller.max_priority) == ("alice", 3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert again.exit_code == 2
    assert "already has a key of alice" in again.stderr


def test_keys_of_a_gateway_may_name_tenants(tmp_path):
    CliRunner().invoke(main, ["keys", str(tmp_path), "web", "--role", "client", "--tenants"])
    refused = CliRunner().invoke(main, ["keys", str(tmp_path), "gpu", "--role", "target", "--tenants"])

    assert "tenants = true" in (tmp_path / "web.pub").read_text()
    assert "only clients have tenants" in refused.stderr


def test_up_starts_it_too():
    config = Config(up=UpConfig(drafters=0, serve=True), serve=ServeConfig(api_keys="x"))
    *_, gateway = members(config)

    assert gateway.arguments[0] == "serve"
    assert "--api-keys x" in " ".join(gateway.arguments)
    with pytest.raises(ConfigError, match="specq up needs a fixed port"):
        members(Config(up=UpConfig(serve=True), serve=ServeConfig(bind="tcp://127.0.0.1:*")))
    with pytest.raises(ConfigError, match=r"both at tcp://127\.0\.0\.1:6000; use different ports"):
        members(
            Config(
                up=UpConfig(serve=True),
                broker=BrokerConfig(bind="tcp://*:6000", insecure=True),
                serve=ServeConfig(bind="tcp://127.0.0.1:6000"),
            )
        )
