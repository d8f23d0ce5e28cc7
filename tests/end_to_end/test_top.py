"""`specq top` in a terminal of its own, in front of a real broker."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from specq import Client
from specq.cli import main
from specq.transport.keys import make_keys

PATIENCE_S = 30


class Terminal:
    """A pseudo-terminal, and a program that runs in it."""

    def __init__(self, *arguments: str, rows: int = 24, columns: int = 80) -> None:
        self._main, self._side = os.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(self._side)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "specq", *arguments],
            stdin=self._side,
            stdout=self._side,
            stderr=self._side,
            env=environment | {"TERM": "xterm"},
            start_new_session=True,
        )
        self.shown = ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def read_until(self, text: str) -> None:
        """Read what is shown from now on until it contains a text."""
        self.shown, deadline = "", time.monotonic() + PATIENCE_S
        while text not in self.shown:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.shown!r}"
            if select.select([self._main], [], [], left)[0]:
                self.shown += os.read(self._main, 65_536).decode()

    def wait(self) -> int:
        """Wait for the end, and read what is shown until then."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "it does not end"
            if select.select([self._main], [], [], 0.05)[0]:
                self.shown += os.read(self._main, 65_536).decode()
        while select.select([self._main], [], [], 0)[0]:
            self.shown += os.read(self._main, 65_536).decode()
        return self.process.returncode

    @property
    def is_restored(self) -> bool:
        """Whether line editing is on again, the cursor is visible, and the normal screen is back."""
        tail = self.shown[self.shown.rfind("\x1b[?1049l") :]
        return (
            termios.tcgetattr(self._side) == self.before and "\x1b[?1049l" in tail and "\x1b[?25h" in self.shown[-100:]
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._side)


@pytest.fixture
def address(spawn, free_address: str) -> str:
    """A broker that answers."""
    spawn("broker", "--bind", free_address, "--journal", "none")
    with Client(free_address, timeout_s=PATIENCE_S) as client:
        client.status()
    return free_address


@pytest.fixture
def terminal(address: str) -> Iterator[Terminal]:
    shown = Terminal("top", "--broker", address, "--interval", "0.1", "--timeout-s", "1")
    yield shown
    shown.close()


def test_it_watches_until_q(terminal):
    terminal.read_until("no workers")
    terminal.type("s")
    terminal.read_until("sorted by TOKENS")
    terminal.type("q")

    assert (terminal.wait(), terminal.is_restored) == (0, True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_the_terminal_is_restored_after_a_signal(terminal, number, status):
    terminal.read_until("no workers")
    terminal.process.send_signal(number)

    assert (terminal.wait(), terminal.is_restored) == (status, True)


def test_it_follows_the_terminals_size(terminal):
    """The last line of the screen, wherever that is now."""
    terminal.read_until("sorted by")
    terminal.resize(40, 132)
    terminal.read_until("\n" * 0 + " " * 40 + "\r\n")
    terminal.read_until("sorted by")
    assert terminal.shown.count("\r\n") <= 40
    terminal.type("q")
    assert terminal.wait() == 0


def test_a_broker_that_goes_is_said_and_waited_for(spawn, free_address):
    """It is asked on; once another is there, all is as before."""
    broker = spawn("broker", "--bind", free_address, "--journal", "none")
    with Client(free_address, timeout_s=PATIENCE_S) as client:
        client.status()
    terminal = Terminal("top", "--broker", free_address, "--interval", "0.1", "--timeout-s", "0.5")
    try:
        terminal.read_until("no workers")
        broker.terminate()
        broker.wait(PATIENCE_S)
        terminal.read_until("NO ANSWER")
        spawn("broker", "--bind", free_address, "--journal", "none")
        while "NO ANSWER" in terminal.shown:
            terminal.read_until("sorted by")
        terminal.type("q")
        assert (terminal.wait(), terminal.is_restored) == (0, True)
    finally:
        terminal.close()


def test_without_a_broker_it_fails_as_status_does(free_address):
    """Before the screen is touched, so that the message stays in sight."""
    terminal = Terminal("top", "--broker", free_address, "--timeout-s", "0.2")
    try:
        assert terminal.wait() == 1
        assert f"specq: no broker answered at {free_address}" in terminal.shown
        assert "\x1b[?1049h" not in terminal.shown
    finally:
        terminal.close()


def test_once_prints_plain_text_or_json(address):
    runner = CliRunner()
    shown = runner.invoke(main, ["top", "--once", "--interval", "0.1", "--broker", address])
    report = json.loads(runner.invoke(main, ["top", "--json", "--interval", "0.1", "--broker", address]).stdout)

    assert "no workers" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert 0.1 <= report["seconds"] < PATIENCE_S
    assert report["sessions"] == {"num": 0, "busiest": []}


def test_no_terminal_is_a_clear_mistake(address):
    refused = CliRunner().invoke(main, ["top", "--broker", address])

    assert refused.exit_code == 2
    assert "--once" in refused.stderr


def test_with_keys(spawn, free_address, tmp_path):
    """Encrypted; whoever has no key gets no answer."""
    for name, role in (("broker", "broker"), ("me", "client")):
        make_keys(tmp_path, name, (role,))
    spawn("broker", "--bind", free_address, "--journal", "none", "--keys", str(tmp_path))
    with Client(free_address, timeout_s=PATIENCE_S, keys=tmp_path) as client:
        client.status()
    with_key = CliRunner().invoke(
        main, ["top", "--once", "--interval", "0.1", "--broker", free_address, "--keys", str(tmp_path)]
    )
    without = CliRunner().invoke(main, ["top", "--once", "--broker", free_address, "--timeout-s", "0.2"])

    assert (with_key.exit_code, without.exit_code) == (0, 1)
    assert "no workers" in with_key.stdout
