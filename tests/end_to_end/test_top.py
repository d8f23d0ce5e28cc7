"""`specq top` in a terminal of its own, in front of a real broker."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from specq import Client
from specq.cli import main
from specq.transport.keys import make_keys
from tests.end_to_end.terminal import PATIENCE_S, Terminal


@pytest.fixture
def broker(spawn, free_address: str):
    """A broker that answers."""
    process = spawn("broker", "--bind", free_address, "--journal", "none")
    with Client(free_address, timeout_s=PATIENCE_S) as client:
        client.status()
    return process


@pytest.fixture
def terminal(broker, free_address: str) -> Iterator[Terminal]:
    with Terminal("top", "--broker", free_address, "--interval", "0.1", "--timeout-s", "5") as shown:
        shown.wait_for("no workers")
        yield shown


def test_it_watches_until_q(terminal):
    terminal.send("s")
    terminal.wait_for("sorted by TOKENS")
    terminal.send("q")

    assert (terminal.wait(), terminal.left) == (0, [])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_terminal_is_restored_after_a_signal(terminal, number, status):
    terminal.signal(number)

    assert (terminal.wait(), terminal.left) == (status, [])


def test_it_follows_the_terminals_size(terminal):
    """The last line of the screen, wherever that is now."""
    terminal.resize(40, 132)
    assert any(terminal.wait_for("sorted by").count("\r\n") == 39 for _ in range(100))
    terminal.send("q")
    assert terminal.wait() == 0


def test_a_broker_that_goes_is_said_and_waited_for(terminal, spawn, broker, free_address):
    """It is asked on; once another is there, all is as before."""
    broker.terminate()
    broker.wait(PATIENCE_S)
    terminal.wait_for("NO ANSWER")
    spawn("broker", "--bind", free_address, "--journal", "none")
    terminal.wait_for("sorted by")
    while "NO ANSWER" in terminal.wait_for("sorted by"):
        pass
    terminal.send("q")
    assert (terminal.wait(), terminal.left) == (0, [])


def test_without_a_broker_it_fails_as_status_does(free_address):
    """Before the screen is touched, so that the message stays in sight."""
    with Terminal("top", "--broker", free_address, "--timeout-s", "0.2") as terminal:
        assert terminal.wait() == 1
        assert f"specq: no broker answered at {free_address}" in terminal.shown
        assert "\x1b[?1049h" not in terminal.shown


def top(address: str, *options: str):
    return CliRunner().invoke(main, ["top", "--broker", address, *options])


def test_once_prints_plain_text_or_json(broker, free_address):
    shown = top(free_address, "--once", "--interval", "0.1")
    report = json.loads(top(free_address, "--json", "--interval", "0.1").stdout)

    assert "no workers" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert 0.1 <= report["seconds"] < PATIENCE_S
    assert report["sessions"] == {"num": 0, "busiest": []}


def test_no_terminal_is_a_clear_mistake(broker, free_address):
    refused = top(free_address)

    assert refused.exit_code == 2
    assert "--once" in refused.stderr


def test_with_keys(spawn, free_address, tmp_path):
    """Encrypted. A client without a key gets no answer."""
    for name, role in (("broker", "broker"), ("me", "client")):
        make_keys(tmp_path, name, (role,))
    spawn("broker", "--bind", free_address, "--journal", "none", "--keys", str(tmp_path))
    with Client(free_address, timeout_s=PATIENCE_S, keys=tmp_path) as client:
        client.status()
    with_key = top(free_address, "--once", "--interval", "0.1", "--keys", str(tmp_path))
    without = top(free_address, "--once", "--timeout-s", "0.2")

    assert (with_key.exit_code, without.exit_code) == (0, 1)
    assert "no workers" in with_key.stdout
