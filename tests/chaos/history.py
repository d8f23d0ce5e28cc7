"""Histories of clients, and what must hold of them, in the manner of Jepsen (https://jepsen.io).

A history is a list of operations. Each has the times of its start and end on the machine's monotonic clock, and the
broker that answered. Kinds:

begin   a job is submitted: `prompt`, `num` tokens, `seed`
ack     a broker has accepted it
tokens  its own client received these `tokens` behind the first `base`
read    somebody looked at it: all `tokens` so far, `finish` if it has ended, `error` if there was one
cancel  somebody asked for its end
http    a request with an Idempotency-Key: `key`, `text`, and no job

`check` takes a history and returns what is wrong with it. It is a pure function. What an operation without an answer
did is not known, so it says nothing. `moves_apart` is another one, on what the harness did.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.chaos.stubs import MOODS, moody_text_is_right

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Operation:
    """An operation of a client, as in this module's first lines. `end` is infinite if there was no answer."""

    kind: str
    start: float
    end: float
    who: str = ""
    broker: str = ""
    job: int = 0
    prompt: Sequence[int] = ()
    num: int = 0
    seed: int = 0
    base: int = 0
    tokens: Sequence[int] = ()
    finish: str = ""
    error: str = ""
    key: str = ""
    text: str = ""

    def line(self) -> str:
        """Return it as a line of JSON, without what is empty."""
        return json.dumps({name: value for name, value in asdict(self).items() if value or name in ("start", "end")})


def read_history(paths: Iterable[Path]) -> list[Operation]:
    """Return the operations in files. The last line of a client that was killed may be cut off."""
    lines = [line for path in paths for line in path.read_text("ascii").splitlines(keepends=True)]
    found = [Operation(**json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(found, key=lambda one: one.start)


@dataclass
class JobHistory:
    """What happened to one job."""

    begun: Operation | None = None
    acked: float = float("inf")
    cancelled: float = float("inf")  # start of the first request for that
    reads: list[Operation] = field(default_factory=list)  # with tokens; their own client's too
    errors: list[Operation] = field(default_factory=list)

    def add(self, one: Operation) -> None:
        """Note an operation. What its own client has is a read, too: of all that it has by then."""
        if one.kind == "begin":
            self.begun = self.begun or one
        elif one.kind == "cancel":
            self.cancelled = min(self.cancelled, one.start)
        elif one.error:
            self.errors.append(one)
        else:
            self.acked = min(self.acked, one.end)
            if one.kind != "ack":
                self.reads.append(one)


def jobs_of(history: Iterable[Operation]) -> dict[int, JobHistory]:
    """Return what happened to each job."""
    found = defaultdict[int, JobHistory](JobHistory)
    for one in history:
        if one.kind != "http":
            found[one.job].add(one)
    return found


Faults = list[str]


def check(history: Sequence[Operation], *, all_ended: bool = True) -> Faults:
    """Return what is wrong with a history. `all_ended`: each accepted job was read to its end."""
    faults = _answers_by_key(history)
    for job_id, job in jobs_of(history).items():
        for judge in (_wrong_texts, _shorter_reads, _ends, _errors):
            faults += [f"job {job_id}: {fault}" for fault in judge(job)]
        if all_ended and job.acked < float("inf") and not any(read.finish for read in job.reads):
            faults.append(f"job {job_id}: was accepted and never ended")
    return faults


def _answers_by_key(history: Sequence[Operation]) -> Faults:
    """One key, one answer."""
    found: dict[str, str] = {}
    return [
        f"key {one.key}: answered with two texts"
        for one in history
        if one.kind == "http" and not one.error and found.setdefault(one.key, one.text) != one.text
    ]


def _wrong_texts(job: JobHistory) -> Faults:
    """Each read is a part of the longest text, and that is one that the model can say."""
    whole = max((read for read in job.reads if not read.base), key=lambda one: len(one.tokens), default=None)
    text = list(whole.tokens) if whole else []
    faults = [
        f"{read.who} read at {read.broker} what is no part of the text (tokens {read.base} to {_size(read)})"
        for read in job.reads
        if text[read.base : _size(read)] != list(read.tokens) and _size(read) <= len(text)
    ]
    begun = job.begun
    if begun and not moody_text_is_right(begun.prompt, text, begun.seed, set(range(MOODS if begun.seed else 1))):
        faults.append("its text is not one of the model's")
    return faults


def _size(read: Operation) -> int:
    return read.base + len(read.tokens)


def _shorter_reads(job: JobHistory) -> Faults:
    """A read that begins after another has ended is not shorter, and it knows of the end."""
    by_start, by_end = (sorted(job.reads, key=lambda one: getattr(one, name)) for name in ("start", "end"))
    faults, over, ended = Faults(), 0, ""
    longest = Operation("read", 0.0, 0.0)
    for read in by_start:
        while by_end[over].end < read.start:
            longest, ended = max(longest, by_end[over], key=_size), ended or by_end[over].finish
            over += 1
        if read.kind == "read" and _size(read) < _size(longest):
            whose = f"{longest.who} at {longest.broker}"
            faults.append(f"{read.who} read {_size(read)} tokens at {read.broker} after {_size(longest)} of {whose}")
        if read.kind == "read" and ended and not read.finish:
            faults.append(f"{read.who} read at {read.broker} that it runs, after its end")
    return faults


def _ends(job: JobHistory) -> Faults:
    """All see the same end, and nothing is cut off, except by a request for that."""
    ends = {(read.finish, _size(read)): read for read in job.reads if read.finish}
    faults = [f"ended twice: {sorted(ends)}"] if len(ends) > 1 else []
    longest = max((_size(read) for read in job.reads), default=0)
    for (finish, size), read in ends.items():
        if size < longest:
            faults.append(f"ended with {size} tokens, and {longest} were read")
        if finish == "length" and job.begun and size != job.begun.num:
            faults.append(f"ended with {size} of {job.begun.num} tokens")
        if finish == "cancelled" and job.cancelled > read.end:
            faults.append("was cancelled by nobody")
    return faults


def _errors(job: JobHistory) -> Faults:
    """An accepted job is never unknown later, and does not fail."""
    return [
        f"{one.who} was told {one.error!r} at {one.broker}, though it had been accepted"
        for one in job.errors
        if one.start > job.acked or (one.kind == "tokens" and one.end > job.acked)
    ]


def moves_apart(events: Iterable[tuple[float, str]]) -> tuple[list[float], list[tuple[float, float]]]:
    """Return the times in which the jobs of dead brokers moved, those with the database away in the midst apart.

    Args:
        events: (seconds, what), in any order. A broker "died", and its jobs have "moved" before the next one dies. The
            database is "gone", and "back" when all brokers reach it.

    Returns:
        The seconds from each death to its move, if the database was there all the time. For the other moves these
        seconds, and those since the database was last back (0 if it was away until the move).
    """
    there, away = list[float](), list[tuple[float, float]]()
    died = back = 0.0
    is_away = was_away = False
    for at, what in sorted(events):
        if what == "gone":
            is_away = was_away = True
        elif what == "back":
            is_away, back = False, at
        elif what == "died":
            died, was_away = at, is_away
        elif was_away:
            away.append((at - died, 0.0 if is_away else at - back))
        else:
            there.append(at - died)
    return there, away
