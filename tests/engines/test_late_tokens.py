"""Drafted tokens on their way to worker processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specq.engines.vllm.late_tokens import HELLO, TokenReceiver, TokenSender
from specq.protocol import EngineError
from specq.verification import DeviceTokens

SOME, OTHERS, NONE = (np.array(tokens, np.int32) for tokens in ([5, -1, 151_935], [7], []))


@pytest.fixture
def sender() -> Iterator[TokenSender]:
    made = TokenSender(2)
    yield made
    made.close()


@pytest.fixture
def receivers(sender: TokenSender) -> Iterator[list[TokenReceiver]]:
    made = [TokenReceiver(address, 5.0) for address in sender.addresses]
    sender.connect()
    for receiver in made:
        assert not len(receiver.take(HELLO))
    sender.hide()
    yield made
    for receiver in made:
        receiver.close()


@pytest.mark.parametrize("tokens", [SOME, NONE], ids=["some", "none"])
def test_each_worker_takes_what_was_sent(
    sender: TokenSender, receivers: list[TokenReceiver], tokens: np.ndarray
) -> None:
    number = sender.next_number()
    sender.send(number, tokens)
    for receiver in receivers:
        found = receiver.take(number)
        assert found.dtype == np.int32
        assert found.tolist() == tokens.tolist()


def test_tokens_of_steps_that_failed_are_dropped(sender: TokenSender, receivers: list[TokenReceiver]) -> None:
    """A step whose drafts could not be read may be sent them twice."""
    first, second = sender.next_number(), sender.next_number()
    assert HELLO < first < second
    for number, tokens in ((first, SOME), (first, NONE), (second, OTHERS)):
        sender.send(number, tokens)
    assert receivers[1].take(second).tolist() == OTHERS.tolist()


@pytest.mark.parametrize(("patience_s", "is_host_gone"), [(0.05, False), (60.0, True)])
def test_a_step_does_not_wait_for_ever_nor_for_a_host_that_is_gone(
    monkeypatch: pytest.MonkeyPatch, sender: TokenSender, patience_s: float, *, is_host_gone: bool
) -> None:
    receiver = TokenReceiver(sender.addresses[0], patience_s)
    if is_host_gone:
        monkeypatch.setattr("specq.engines.vllm.late_tokens.os.getppid", lambda: 1 << 30)
    with pytest.raises(EngineError, match="did not arrive"):
        receiver.take(1)
    receiver.close()


def test_the_socket_folder_is_private_and_removed() -> None:
    """Others of this machine may not look into the folder either."""
    made = TokenSender(1)
    folder = Path(made.addresses[0].removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o077 == 0
    made.hide()
    assert not folder.exists()
    made.close()
    made.close()


def test_a_lost_worker_blocks_no_sender(sender: TokenSender, receivers: list[TokenReceiver]) -> None:
    """Unread messages do not block, either. Other code detects the loss of the worker."""
    receivers[1].close()
    for _ in range(3000):
        number = sender.next_number()
        sender.send(number, SOME)
        assert receivers[0].take(number).tolist() == SOME.tolist()


def test_names_that_are_too_long_for_sockets_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(EngineError, match="TMPDIR"):
        TokenSender(2)
    assert not list(folder.iterdir())


def test_waiters_are_notified_when_tokens_are_read() -> None:
    told, tokens = list[list[int]](), DeviceTokens(None)
    tokens.awaiting += [lambda values: told.append(values.tolist())] * 2
    tokens.read(SOME)
    assert told == [SOME.tolist()] * 2
    assert tokens.values is SOME
