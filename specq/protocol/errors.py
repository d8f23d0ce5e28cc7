"""Every error that specq raises on purpose.

    SpecqError
    ├── ConfigError      an option, a file or a model that cannot be used; names the place and what would be right
    ├── ProtocolError    a message that breaks the protocol; the receiver counts and drops it
    ├── EngineError      the model engine cannot do what it was asked
    ├── EngineLostError  the model engine can do nothing more in this process, which must end
    ├── JournalBusyError the broker's journal cannot be written or read now; the same may be tried again
    ├── JournalLostError the journal belongs to another broker by now; this one must stop
    └── JobError         a job was refused or failed; carries a machine-readable `code`

Raise at the edge. Say what was wrong, where, and what would be right.

What an error says of a name that is unknown: the known one that it is like, and all that are known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class SpecqError(Exception):
    """Base of all errors that specq raises on purpose."""


class ConfigError(SpecqError):
    """An option, configuration file or model that cannot be used."""


class ProtocolError(SpecqError):
    """A message that breaks the protocol; it is counted and dropped, and never stops a loop."""


class EngineError(SpecqError):
    """The model engine cannot do what it was asked."""


class EngineLostError(SpecqError):
    """The model engine can do nothing more in this process: its device is in error, or a step broke off half way."""


class JournalBusyError(SpecqError):
    """The journal cannot be written or read now: the disk is full, another program holds it."""


class JournalLostError(SpecqError):
    """The journal belongs to another broker by now."""


BROKER_GONE = ("no_broker", "lost")  # codes of JobError that say nothing of the job: the broker did not answer


class JobError(SpecqError):
    """A job was refused or failed.

    `code` is one of `invalid`, `conflict` (the job exists with other content), `no_verifier`, `no_broker`, `busy`,
    `deadline`, `engine`, `unknown`, `lost`, `forbidden`. `field` is the argument of the request that is at fault, ""
    where it is none.
    """

    def __init__(self, message: str, code: str = "invalid", field: str = "") -> None:
        super().__init__(message)
        self.code, self.field = code, field


MOST_CHARACTERS = 64  # of a name that is compared: a comparison takes time with the square of them
ALIKE = 0.6  # of two names; 1: the same


def did_you_mean(name: str, known: Iterable[str], alike: float = ALIKE, most: int = 1) -> str:
    """Return "did you mean 'x' or 'y'?" for the `most` known names that are most like this one; "" where none is."""
    near = get_close_matches(name[:MOST_CHARACTERS], list(known), n=most, cutoff=alike)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def known_names(name: str, known: Collection[str], alike: float = ALIKE) -> str:
    """Return the end of what is said of a name that is none: the one that it is like, and all that there are."""
    hint = did_you_mean(name, known, alike)
    return f"{hint}{' ' if hint else ''}known: {', '.join(known) or 'none'}"
