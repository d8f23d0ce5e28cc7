"""The journal: its records, its interface, and the table of its kinds.

Records about a job, and the values that are read back, are plain values. Rule: records are written in the order of
events. The `TokensAdded` of one job follow each other without a gap.

Log-probabilities are stored as bytes, one row per token. So rows of two rounds are joined by appending. A row is f32
log-probability of the token, i32[n] the likeliest tokens, f32[n] theirs, little-endian.

A kind is a class with the constructor and the methods of `Journal`. To add one, write a package beside `sqlite`. Add a
line in `JOURNALS`. Add a line in `tests/journal/kinds.py` to run the conformance suite over it.

The journal's time is the only time that is stored and compared. It never decreases, and changes of the wall clock do
not affect it.

    journal time = the monotonic clock + an offset, which each broker finds when it opens the journal

It begins near the seconds since 1970. It advances while a broker runs, and between two brokers while the machine is up.
For that the journal notes the time together with the machine's uptime. After a reboot it continues from the last note.
So at most NOTE_S seconds are lost. Linux names its boots. On other systems, each start of a broker counts as a boot.

Rule: when a broker opens a journal, no stored time is after the journal's time. Later times are corrected to that
(`specq.journal.sqlite.connection`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from specq.protocol import LogprobRecord, Submit
from specq.runtime import resolve


def pack(record: LogprobRecord, start: int) -> bytes:
    """Return the rows of the tokens from `start` on. Empty if the record is off."""
    arrays = record.arrays(start)
    if not arrays:
        return b""
    shape = (len(arrays["logprobs"]), record.num_top)
    columns = (
        arrays["logprobs"].astype("<f4").view("<i4").reshape(-1, 1),
        arrays["top_ids"].astype("<i4").reshape(shape),
        arrays["top_logprobs"].astype("<f4").view("<i4").reshape(shape),
    )
    return np.hstack(columns).tobytes()


def unpack(rows: bytes, num_top: int) -> LogprobRecord:
    """Return the record that the rows were packed from."""
    record = LogprobRecord(num_top)
    if num_top >= 0:
        table = np.frombuffer(rows, "<i4").reshape(-1, 1 + 2 * num_top)
        record.tokens = table[:, :1].copy().view("<f4").ravel().tolist()
        record.top_ids = table[:, 1 : 1 + num_top].ravel().tolist()
        record.top = table[:, 1 + num_top :].copy().view("<f4").ravel().tolist()
    return record


class JobTaken(NamedTuple):
    """A job was accepted.

    Times are the journal's (`specq.journal.interface`). `deadline` 0: none. `owner`: its submitter.
    """

    submit: Submit
    owner: str
    submitted: float
    deadline: float

    @property
    def job_id(self) -> int:
        return self.submit.job_id


class JobBound(NamedTuple):
    """The weights that the job's text comes from. Only a verifier with the same weights may continue it.

    `placed` is the incarnation of the verifier that holds the job. 0: none, or the verifier gave it back in good order.
    """

    job_id: int
    weights: str
    placed: int = 0


class Crashes(NamedTuple):
    """The crashes that count against a job: see `specq.broker.workers.assignment`.

    - `total`: verifiers that crashed while they held the job.
    - `lone`: crashes since the job runs alone.
    - `length`: number of generated tokens of the job at the last crash.
    """

    total: int = 0
    lone: int = 0
    length: int = 0


NO_CRASHES = Crashes()


class JobCrashed(NamedTuple):
    """The crashes that count against a job from now on."""

    job_id: int
    crashes: Crashes


class TokensAdded(NamedTuple):
    """One round's tokens, after `base_len` generated ones. All arrays as bytes, little-endian.

    - `token_ids`: i32[m].
    - `origins`: u8[m] (`specq.protocol.logprobs`).
    - `logprobs`: rows of `specq.journal.interface`, or empty. Those of the prompt come first, with the first tokens.
    - `num_nodes`: number of draft nodes that the round verified.
    - `cached_tokens`: with the first tokens, as in `JobStats`.
    """

    job_id: int
    base_len: int
    token_ids: bytes
    origins: bytes
    logprobs: bytes
    num_nodes: int
    cached_tokens: int = 0


class JobEnded(NamedTuple):
    """A job ended, with all its tokens. `code` and `reason` describe its failure, if any. `ended` as in JobTaken."""

    job_id: int
    finish: str
    code: str
    reason: str
    stats: dict[str, Any]
    ended: float
    token_ids: bytes
    origins: bytes
    logprobs: bytes


class JobDropped(NamedTuple):
    """A job was refused after it had been taken. Its id is free again."""

    job_id: int


Record = JobTaken | JobBound | JobCrashed | TokensAdded | JobEnded | JobDropped


def num_bytes(record: Record) -> int:
    """Return about how many bytes a record adds to a journal: those of its arrays, and of a job's grammar."""
    if isinstance(record, JobTaken):
        return record.submit.prompt_ids.nbytes + len(record.submit.params.grammar)
    if isinstance(record, (TokensAdded, JobEnded)):
        return len(record.token_ids) + len(record.origins) + len(record.logprobs)
    return 0


@dataclass(slots=True)
class StoredJob:
    """A job as the journal holds it, with the fields of the records.

    `rounds`, `draft_tokens` and `cached_tokens` count up to its last tokens. `misfit` names values that are now out of
    bounds, although an earlier broker accepted them. It is usually "". In `submit` these values have their defaults,
    and no verifier receives the job.
    """

    submit: Submit
    owner: str = ""
    submitted: float = 0.0
    deadline: float = 0.0
    weights: str = ""
    placed: int = 0
    crashes: Crashes = NO_CRASHES
    token_ids: bytes = b""
    origins: bytes = b""
    logprobs: bytes = b""
    rounds: int = 0
    draft_tokens: int = 0
    cached_tokens: int = 0
    finish: str = ""
    code: str = ""
    reason: str = ""
    stats: dict[str, Any] = field(default_factory=dict)
    ended: float = 0.0
    misfit: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


class JobSummary(NamedTuple):
    """A line of a list of jobs. `finish` is empty until the job ends. Times are the journal's."""

    job_id: int
    label: str
    model: str
    owner: str
    priority: int
    finish: str
    num_tokens: int
    submitted: float
    ended: float


NOTE_S = 60.0  # seconds between two notes of the time
_BOOT, _UPTIME = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/uptime")


class MachineClock(NamedTuple):
    """The machine's uptime in seconds, and its boot. "": unknown boot."""

    boot: str
    uptime: float


class Clocks(NamedTuple):
    """Clock readings in seconds: the monotonic clock, the wall clock (since 1970), and the machine's uptime."""

    monotonic: float
    wall: float
    machine: MachineClock


class Noted(NamedTuple):
    """A note in a journal: its time, and the machine's boot and uptime at that moment."""

    time: float
    machine: MachineClock


def read_clocks() -> Clocks:
    """Return the present readings of the system's clocks."""
    return Clocks(time.monotonic(), time.time(), read_machine())


def read_machine() -> MachineClock:
    """Return the machine's boot and uptime, from the kernel, since processes may have other clocks."""
    try:
        return MachineClock(_BOOT.read_text("ascii").strip(), float(_UPTIME.read_text("ascii").split()[0]))
    except (OSError, ValueError, IndexError):
        return MachineClock("", 0.0)


def offset_of(clocks: Clocks, noted: Noted | None, newest: float) -> float:
    """Return the offset of the journal's time for a broker that starts now.

    - `noted`: None if the journal is new, or of a version that stored wall-clock times. Its time then continues from
      the newest such time, or from now, whichever is earlier. So no stored job appears older than it is.
    - `newest`: the newest time stored with a job. 0: none.
    """
    if noted is None:
        return min(newest or clocks.wall, clocks.wall) - clocks.monotonic
    return noted.time + _up_between(noted.machine, clocks.machine) - clocks.monotonic


def _up_between(before: MachineClock, now: MachineClock) -> float:
    """Return how long the machine was up between two moments, if known.

    The uptime of a container may restart within the same boot.
    """
    return max(0.0, now.uptime - before.uptime) if now.boot and now.boot == before.boot else 0.0


EPOCHS = 1 << 32  # epochs that one owner may use; the next owner's are above them
JOURNALS = {
    "sqlite": "specq.journal.sqlite.store:SqliteJournal",
}


class Opening(NamedTuple):
    """How a broker opens a journal.

    - `durability`: "full": a written group survives the loss of power. "process": it survives only the death of the
      process.
    - `owner`: describes this broker to others that open the same journal.
    - `floor`: the epochs must be above this.
    - `take_over`: become the owner even if another live broker is the owner.
    - `clocks`: the readings from which the journal's time continues. None: read the system's clocks.
    """

    durability: str = "full"
    owner: str = ""
    floor: int = 0
    take_over: bool = False
    clocks: Clocks | None = None


class Kept(NamedTuple):
    """The result of one step that keeps a journal within its limit.

    - `num_forgotten`: number of results that were forgotten.
    - `is_full`: the journal exceeds its limit, and every job in it is still needed.
    """

    num_forgotten: int
    is_full: bool


class JournalReader(Protocol):
    """Reads the journal while the owner writes, without delaying it.

    One thread at a time, which may differ from the owner's. Each method raises JournalBusyError if the journal cannot
    be read now.
    """

    def find(self, job_id: int) -> StoredJob | None:
        """Return a job, or None if it is not in the journal. An unfinished job comes without its tokens."""

    def finished(self, limit: int, skip: int = 0, owner: str | None = None) -> list[JobSummary]:
        """Return summaries of the ended jobs, newest first. None as `owner`: the jobs of all owners."""

    def close(self) -> None:
        """Release the reader's resources."""


class Journal(Protocol):
    """An open journal and its ownership. One thread at a time.

    A journal has one owner. Each new owner raises a number, the fence. An owner with an older fence cannot write any
    more.

    - `address`: the opened address, for log lines.
    - `epoch`: the owner's epochs are above this, and above all epochs of its predecessors (`EPOCHS` for each).
    - `is_old`: another broker owned the journal before.
    - `offset`: the journal's time is the monotonic clock + this (`specq.journal.interface.offset_of`).
    """

    address: str
    epoch: int
    is_old: bool
    offset: float

    def __init__(self, address: str, opening: Opening) -> None:
        """Open a journal, create it if necessary, and become its owner.

        Raises ConfigError if it cannot be used, is of a later version, or belongs to a live broker (unless
        `take_over`). In the last case the message has "in use by another broker", the owner's name, and `--take-over`.
        """

    def write(self, records: Sequence[Record]) -> None:
        """Journal a group of records in order, as a whole or not at all.

        Raises JournalBusyError if that is impossible now. The same group may be written later. Raises JournalLostError
        if the journal has another owner ("another broker").
        """

    def check(self) -> None:
        """Check that this broker still owns the journal.

        Raises JournalLostError if it has another owner, and JournalBusyError if that cannot be read.
        """

    def unfinished(self) -> list[StoredJob]:
        """Return the unfinished jobs, oldest first, with all their tokens.

        Raises ConfigError if one is unreadable.
        """

    def keep_to(self, most_bytes: int, before: float = 0.0) -> Kept:
        """Do one small step: forget results from before `before`, and the oldest while the journal is too large.

        `most_bytes`: the limit of the journal.
        """

    def note_time(self, noted: Noted) -> None:
        """Note the journal's time, from which the next owner continues. Raises as `write` does."""

    def give_back(self, most_bytes: int, *, idle: bool) -> bool:
        """Return free space to the file system in one small step.

        `idle`: without other work. False: no step was needed.
        """

    def reader(self) -> JournalReader:
        """Return a new reader of the same journal."""

    def close(self) -> None:
        """Release the journal, so that another broker can open it."""


def open_journal(address: str, opening: Opening) -> Journal:
    """Return the journal at an address, as its owner. KIND://... is of that kind, a path is a SQLite file."""
    scheme, separator, _ = address.partition("://")
    journal: Journal = resolve("kind of journal", JOURNALS, scheme if separator else "sqlite")(address, opening)
    return journal
