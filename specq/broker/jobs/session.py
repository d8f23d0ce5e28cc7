"""The session of a job: which verifier holds it, since which epoch, and what that verifier's heartbeats say of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HeartbeatMark:
    """What a worker's last heartbeat said of a session.

    length      the committed length at that time, as the broker had it; -1: no heartbeat has listed the session yet
    is_missing  the heartbeat lacked it
    """

    length: int = -1
    is_missing: bool = False

    def confirm(self, length: int) -> None:
        """Note that a heartbeat lists the session, at this committed length."""
        self.length, self.is_missing = length, False


@dataclass(slots=True)
class Unconfirmed:
    """The `Open`s of a job that this verifier's heartbeats do not confirm: see `specq.broker.workers.confirmation`.

    num_opens  how many were sent in a row; since: when the first heartbeat came that lacked the session
    """

    verifier: bytes = b""
    num_opens: int = 0
    since: float = 0.0


class JobSession:
    """Where a job is placed. Times in seconds of the broker's clock.

    verifier      the one that holds the session; b"": none does
    weights       that the tokens come from; "": none were promised yet
    incarnation   of the verifier that holds it, as the journal has it; 0: none
    was_placed    a verifier has held it at some time
    num_failures  verifiers that gave it back
    avoided       verifiers that never confirmed it
    moved_at      when it went from one verifier to another
    """

    __slots__ = (
        *("avoided", "epoch", "incarnation", "mark", "moved_at", "num_failures", "unconfirmed", "verifier"),
        *("was_placed", "weights"),
    )

    def __init__(self) -> None:
        self.verifier, self.epoch = b"", 0
        self.weights, self.incarnation = "", 0
        self.was_placed = False
        self.num_failures = 0
        self.avoided: frozenset[bytes] = frozenset()
        self.moved_at = float("-inf")
        self.mark, self.unconfirmed = HeartbeatMark(), Unconfirmed()

    def open(self, verifier: bytes, epoch: int) -> None:
        """Begin anew at a verifier."""
        self.verifier, self.epoch, self.was_placed = verifier, epoch, True
        self.mark = HeartbeatMark()

    def is_at(self, verifier: bytes, epoch: int) -> bool:
        """Is this verifier's session of this epoch the one that counts?"""
        return self.verifier == verifier and self.epoch == epoch
