"""Every error that specq raises on purpose.

    SpecqError
    ├── ConfigError      an option, a file or a model that cannot be used; names the place and the correct form
    ├── ProtocolError    a message that breaks the protocol; the receiver counts and drops it
    ├── EngineError      the model engine cannot do what was requested
    ├── EngineLostError  the model engine cannot continue in this process, which must end
    ├── JournalBusyError the broker's journal cannot be written or read now; the caller may try again
    ├── JournalLostError the journal belongs to another broker now; this broker must stop
    ├── JobError         a job was refused or failed; carries a machine-readable `code`
    └── BatchStoreError  the store of batches cannot do what was asked (`specq.batches.interface`); carries a `code`

Raise at the edge. Name the mistake, the place and the correct form. For an unknown name, an error suggests a similar
name and lists all known names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class SpecqError(Exception):
    """Base of all errors that specq raises on purpose."""


class ConfigError(SpecqError):
    """An option, configuration file or model that cannot be used."""


class ProtocolError(SpecqError):
    """A message that breaks the protocol. It is counted and dropped, and never stops a loop."""


class EngineError(SpecqError):
    """The model engine cannot do what was requested."""


class EngineLostError(SpecqError):
    """The model engine cannot continue in this process. Its device has an error, or a step was interrupted."""


class JournalBusyError(SpecqError):
    """The journal cannot be written or read now. The disk is full, or another program holds it."""


class JournalLostError(SpecqError):
    """The journal belongs to another broker now."""


BROKER_GONE = ("no_broker", "lost")  # codes of JobError for a broker that did not answer; the job's state is unknown


class JobError(SpecqError):
    """A job was refused or failed.

    - `code`: one of `invalid`, `conflict` (the job exists with other content), `no_verifier`, `no_broker`, `busy`,
      `deadline`, `engine`, `unknown`, `lost`, `forbidden`.
    - `field`: the wrong argument of the request, or "".
    """

    def __init__(self, message: str, code: str = "invalid", field: str = "") -> None:
        super().__init__(message)
        self.code, self.field = code, field


MOST_CHARACTERS = 64  # of a compared name: the time of a comparison grows with the square of this
ALIKE = 0.6  # similarity of two names; 1: equal


def did_you_mean(name: str, known: Iterable[str], alike: float = ALIKE, most: int = 1) -> str:
    """Return "did you mean 'x' or 'y'?" for at most `most` similar known names, or ""."""
    near = get_close_matches(name[:MOST_CHARACTERS], list(known), n=most, cutoff=alike)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def known_names(name: str, known: Collection[str], alike: float = ALIKE) -> str:
    """Return the end of an error message for an unknown name: a suggestion, and all known names."""
    hint = did_you_mean(name, known, alike)
    return f"{hint}{' ' if hint else ''}known: {', '.join(known) or 'none'}"
