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
"""


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
