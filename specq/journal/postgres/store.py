"""The journal in a database: groups of records in, jobs out (see `specq.journal.Journal`). For several brokers.

Rule: a group is one transaction, and the fence is checked in it (`specq.journal.postgres.functions`).

A call that fails raises JournalBusyError: the database is gone, read-only, full, slow, or failed over to another
server. The next call connects again. Sometimes it is not known whether a group was written. The same
group is then given again, and the database knows its number.

`durability`: "full" waits at each group, as long as the database's `synchronous_commit` says, and at least for its
disk. Only a synchronous standby keeps all groups if the disk is lost. "process" does not wait: the groups of the last
moments may be lost with the server. A late standby that becomes the primary has the same effect.

The journal's time is the database's clock, in seconds since 1970. A broker measures its offset when it opens the
journal. If that clock jumps, brokers that run keep their time, and leases end earlier or later by the jump, once. A
broker that loses its jobs early is fenced, so no token is lost. Later brokers have the new time. If it is earlier,
stored times after it are corrected at the next opening (`bring_back`).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import structlog
from psycopg.types.numeric import Int8

from specq.journal import rows
from specq.journal.interface import HELD_S, LEASE_S, MOST_TAKEN, SILENT_S, Journal, Kept, Noted, Opening
from specq.journal.postgres.address import parse
from specq.journal.postgres.arrays import ints
from specq.journal.postgres.group import NUM_ARGUMENTS, RecordGroup
from specq.journal.postgres.reader import JOB, PostgresReader, readable
from specq.journal.postgres.schema import prepare
from specq.journal.postgres.session import DatabaseSession
from specq.journal.records import Crashes, Record, StoredJob
from specq.protocol import ConfigError, JournalBusyError

log = structlog.get_logger(__name__)

MOST_SENT = 2  # groups under way
MOST_UNFOLDED = 32 << 20  # bytes of tokens in this broker's groups: with little text, 300,000 rows
FOLDED = 1 << 19  # about the bytes that one step folds: 10 ms
FOLDED_FIRST = 8 << 20  # the same for a lost broker, before its jobs are taken: half a second
KEEP_S = 1.0  # between two looks at the size, if nothing was to be forgotten
STEP_ROWS = 200  # maximum number of results that a step forgets
STEP_BYTES = 8 << 20  # and about their bytes
MOST_TOKENS = 8  # a late standby may know an earlier one only
SLACK_S = 5.0  # stored times may be this much later than now: brokers measure their offsets separately
GONE_AGAIN = "the broker's row is deleted again and again"
_WRITE = f"SELECT specq.write_group({', '.join(f'${place}' for place in range(1, 6 + NUM_ARGUMENTS))})"
_TAKE = "SELECT specq.take(%s, %s, %s, %s, %s)"
_FOLD_LOST = "SELECT specq.fold_lost(%s, %s, %s)"
_KEEP = "SELECT num_forgotten, is_full FROM specq.keep_to(%s, %s, %s, %s, %s, %s, %s)"
_CLOSE = "UPDATE specq.brokers SET until = clock_timestamp() WHERE number = %s AND token = %s"
_RELEASE = "UPDATE specq.active SET broker = NULL WHERE broker = %s AND job_id = ANY(%s)"
_UNKNOWN = "SELECT job_id FROM specq.active WHERE broker = %s AND epoch IS NOT NULL AND job_id <> ALL(%s)"
_OWN = "SELECT job_id FROM specq.active WHERE broker = %s AND job_id = ANY(%s)"
_ACTIVE = (
    f"SELECT {JOB}, weights, placed, deaths, lone_deaths, death_length, coalesce(epoch, 0) "  # noqa: S608
    "FROM specq.active JOIN specq.jobs USING (job_id)"
)
_COMMITS = f"SELECT {rows.COMMIT}, number FROM specq."  # noqa: S608
_CUT_OFF = (
    "DELETE FROM specq.folded c USING specq.active a WHERE c.job_id = ANY(%s) AND c.number = ANY(%s) "
    "AND a.job_id = c.job_id AND a.broker = %s"
)


class _Numbered(NamedTuple):
    """A group, and its number among the broker's groups."""

    number: int
    group: RecordGroup


class PostgresJournal(Journal):
    """A `specq.journal.Journal` in a PostgreSQL database."""

    def __init__(self, address: str, opening: Opening) -> None:
        parameters, self.address = parse(address)
        if opening.address.endswith(":*"):
            raise ConfigError(
                "broker.bind has no fixed port, which other brokers must know; set it, or broker.advertise"
            )
        self._opening, self._parameters = opening, parameters
        self._number, self._tokens = -1, [0]  # the last token is this connection's
        self._next_token = 0  # the next connection's, if it may be claimed
        self._held: dict[int, int] = {}  # unfinished job -> about its bytes
        self._running = 0  # their sum
        self._sure_until = 0.0  # no other broker has taken a job of this one before that
        self._may_have_lost, self._given_up = False, set[int]()  # the jobs of former numbers
        self._last = RecordGroup(), frozenset[int]()  # the last group, and its refused jobs. None: it is not known
        self._sent = deque[_Numbered]()  # under way, in order
        self._unsure = deque[_Numbered]()  # written or not
        self._group_number = 0
        self._take_is_unsure = self._is_shared = False
        self._unreadable: set[int] = set()
        self._unfolded = 0  # bytes in groups
        self._kept, self._kept_until = (0, 0.0), 0.0
        self._session = DatabaseSession(parameters, opening.durability, self._unusable)
        self._session.begin = self._claim
        try:
            self._open()
        except ConfigError as error:
            self._session.close()
            raise ConfigError(f"cannot use the journal {self.address}: {error}") from None
        self._session.fail_with(self._busy)

    def _open(self) -> None:
        prepare(self._session)
        self._register()
        self.epoch = self._number << 32
        self._session.query("SELECT specq.bring_back(%s)", (SLACK_S,))
        sent = time.monotonic()
        ((now, is_synced),) = self._session.query(
            "SELECT extract(epoch FROM clock_timestamp())::float8, current_setting('fsync') = 'on'"
        )
        self.offset = now - (sent + time.monotonic()) / 2
        if not is_synced:
            log.warning("journal_not_durable", journal=self.address, reason="the database has fsync = off")

    def _register(self) -> None:
        """Begin a lease under a new number."""
        opening, token = self._opening, secrets.randbits(63)
        floor = -(-opening.floor >> 32)  # rounded up
        values = (token, opening.owner, opening.address, LEASE_S, floor)
        ((number,),) = self._session.query("SELECT specq.register(%s, %s, %s, %s, %s)", values)
        self._session.application = f"specq journal {number}"
        self._session.query("SELECT set_config('application_name', %s, false)", (self._session.application,))
        self._given_up |= self._held.keys()
        self._number, self._tokens, self._held, self._running = int(number), [token], {}, 0
        self._unfolded = 0

    def _claim(self) -> None:
        """Claim the broker's row for a new connection. What a former one still carries out has no effect then."""
        if self._number >= 0:
            # The same token until there is an answer. Nothing was sent with it before.
            self._next_token = self._next_token or secrets.randbits(63)
            former = ints([*self._tokens, self._next_token])
            self._session.query("SELECT specq.claim(%s, %s, %s)", (self._number, former, self._next_token))
            self._tokens, self._next_token = [*self._tokens[-MOST_TOKENS:], self._next_token], 0

    def _own(self, *values: Any) -> tuple[Any, ...]:
        """Return the arguments of a function that this broker calls."""
        self._session.connect()  # with a token of its own
        return (self._number, self._tokens[-1], *values)

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(reason)

    def _busy(self, reason: str) -> JournalBusyError:
        return JournalBusyError(f"the journal {self.address} cannot be written: {reason}")

    def _call(self, statement: str, *values: Any) -> Any:
        """Call a function of the database as this broker, and return its value.

        A broker whose row is gone held no jobs any more. It goes on under a new number.
        """
        for _ in range(2):
            ((found,),) = self._session.query(statement, self._own(*values), prepare=True)
            if found is not None:
                return found
            self._register_anew()
        raise self._busy(GONE_AGAIN)

    def _register_anew(self) -> None:
        self._register()
        log.warning("broker_registered_anew", number=self._number)

    # --- writing ------------------------------------------------------------------------------------------------------

    def write(self, records: Sequence[Record]) -> frozenset[int]:
        """Journal a group of records, except those of jobs that this broker does not hold. Return these jobs."""
        (refused,) = self.write_all([records])
        return refused

    def write_all(self, groups: Iterable[Sequence[Record]]) -> Iterator[frozenset[int]]:
        """Write groups in order. While the server writes one, the next one is sent."""
        try:
            for records in groups:
                group = RecordGroup.of(records)
                if group == self._last[0] and not self._unsure and not self._sent:  # it was given again
                    yield self._last[1]
                    continue
                self._send(self._numbered(group))
                if len(self._sent) == MOST_SENT:
                    yield self._receive()
            while self._sent:
                yield self._receive()
        finally:
            if self._sent:
                self._session.close()
                self._unsure.extendleft(reversed(self._sent))
                self._sent.clear()

    def _numbered(self, group: RecordGroup) -> _Numbered:
        """Return a group with its number: the same one if it is given again."""
        if self._unsure and self._unsure[0].group == group:
            return self._unsure.popleft()
        self._unsure.clear()
        self._group_number += 1
        return _Numbered(self._group_number, group)

    def _send(self, one: _Numbered) -> None:
        after = self._sent[-1].number if self._sent else 0
        self._sent.append(one)
        head = self._own(one.number, after, self._running)
        self._session.send(_WRITE, (*map(Int8, head), *one.group.arguments()))

    def _receive(self) -> frozenset[int]:
        """Wait for the oldest group that is under way. Return its refused jobs."""
        ((found,),) = self._session.receive()
        if found is None:
            found = self._send_anew()
        group, refused = self._sent.popleft().group, frozenset(found)
        self._last = group, refused
        self._count(group, refused)
        self._unfolded += group.size
        return refused

    def _send_anew(self) -> list[int]:
        """Go on under a new number, since the broker's row is gone. Receive the answer to the oldest group."""
        self._session.close()
        self._register_anew()
        groups, self._sent = [*self._sent], deque()
        for one in groups:
            self._send(one)
        ((found,),) = self._session.receive()
        if found is None:
            raise self._busy(GONE_AGAIN)
        return list(found)

    def _count(self, group: RecordGroup, refused: Collection[int]) -> None:
        """Note the jobs that this broker holds now, and their bytes."""
        for job_id in (*group.dropped, *refused, *(job_id for job_id, life in group.lives.items() if life.ended)):
            self._running -= self._held.pop(job_id, 0)
        for job_id, num_bytes in group.num_bytes():
            if job_id not in refused:
                self._hold(job_id, num_bytes)

    def _hold(self, job_id: int, num_bytes: int) -> None:
        self._held[job_id] = self._held.get(job_id, 0) + num_bytes
        self._running += num_bytes

    # --- leases -------------------------------------------------------------------------------------------------------

    def renew(self) -> tuple[str, ...]:
        """Renew the lease. Return the addresses of all live brokers."""
        sent = time.monotonic()
        addresses = self._call("SELECT specq.renew(%s, %s, %s)", LEASE_S)
        is_shared = addresses.count(self._opening.address) > 1
        if is_shared and not self._is_shared:
            log.warning("broker_address_shared", address=self._opening.address)
        self._is_shared = is_shared
        self._may_have_lost |= time.monotonic() >= self._sure_until
        self._sure_until = sent + HELD_S
        return tuple(dict.fromkeys(addresses))

    def lost(self) -> frozenset[int]:
        """Return the jobs that this broker lost while its lease was not renewed in time."""
        if not self._may_have_lost and not self._given_up:
            return frozenset()
        found = self._session.query(_OWN, (self._number, ints(list(self._held))))
        lost = self._held.keys() - {job_id for (job_id,) in found}
        for job_id in lost:
            self._running -= self._held.pop(job_id)
        lost |= self._given_up - self._held.keys()
        self._may_have_lost, self._given_up = False, set()
        return frozenset(lost)

    def take(self) -> list[StoredJob]:
        """Become the holder of jobs that no live broker holds, the oldest first. Unreadable ones are left alone."""
        ((folded,),) = self._session.query(_FOLD_LOST, (LEASE_S, SILENT_S, FOLDED_FIRST), prepare=True)
        if folded >= FOLDED_FIRST:
            return []  # there is more: first the next renewal
        was_unsure, self._take_is_unsure = self._take_is_unsure, True
        job_ids = self._call(_TAKE, LEASE_S, MOST_TAKEN, ints(list(self._unreadable)))
        if was_unsure:  # an earlier call may have taken jobs, and its answer was lost
            job_ids = [job_id for (job_id,) in self._session.query(_UNKNOWN, (self._number, ints(list(self._held))))]
        jobs = self._read(job_ids) if job_ids else []
        self._take_is_unsure = False
        for job in jobs:
            num_bytes = job.submit.prompt_ids.nbytes + len(job.token_ids) + len(job.logprobs)
            self._hold(job.submit.job_id, num_bytes + rows.ROW_BYTES)
        return jobs

    def _read(self, job_ids: list[int]) -> list[StoredJob]:
        """Return taken jobs. Release unreadable ones, and delete tokens behind a gap."""
        values = (ints(job_ids),)
        order = " WHERE job_id = ANY(%s) ORDER BY submitted, job_id"
        jobs, unreadable = _jobs(self._session.query(_ACTIVE + order, values))
        for job_id, error in unreadable.items():
            log.error("job_unreadable", job_id=job_id, reason=str(error))
        if unreadable:
            self._unreadable |= unreadable.keys()
            self._session.query(_RELEASE, (self._number, ints(list(unreadable))))
        found = self._session.query(f"{_COMMITS}folded WHERE job_id = ANY(%s) ORDER BY number", values)
        cut_off = _add_commits(jobs, found)
        if cut_off:
            self._session.query(_CUT_OFF, (*values, ints(cut_off), self._number))
        return list(jobs.values())

    # --- old results --------------------------------------------------------------------------------------------------

    def keep_to(self, most_bytes: int, before: float = 0.0) -> Kept:
        """Do one small step: forget results from before `before`, and the oldest while the journal is too large.

        The size is the sum of what jobs and results hold, since a table does not shrink when rows are deleted. Only one
        broker at a time does a step.
        """
        if self._unfolded > MOST_UNFOLDED:
            folded = self._call("SELECT specq.fold(%s, %s, %s)", FOLDED)
            self._unfolded = self._unfolded - folded if folded else 0
        now = time.monotonic()
        if before <= 0.0 and (most_bytes, now < self._kept_until) == (self._kept[0], True):
            return Kept(0, is_full=bool(self._kept[1]))
        values = (self._running, most_bytes, before, STEP_ROWS, STEP_BYTES)
        ((num_forgotten, is_full),) = self._session.query(
            _KEEP, (self._number, self._tokens[-1], *values), prepare=True
        )
        self._kept, self._kept_until = (most_bytes, is_full), 0.0 if num_forgotten else now + KEEP_S
        return Kept(num_forgotten, is_full=is_full)

    def note_time(self, noted: Noted) -> None:
        """Do nothing: the journal's time is the database's clock."""

    def give_back(self, most_bytes: int, *, idle: bool) -> bool:
        """Do nothing: PostgreSQL uses free space again by itself (autovacuum)."""
        return False

    # --- reading ------------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[StoredJob]:
        """Return the unfinished jobs of all brokers, oldest first, with all their tokens."""
        jobs, unreadable = _jobs(self._session.query(f"{_ACTIVE} ORDER BY submitted, job_id"))
        for error in unreadable.values():
            raise ConfigError(f"cannot use the journal {self.address}: {error}")
        _add_commits(jobs, self._session.query(f"{_COMMITS}commits ORDER BY number"))
        return list(jobs.values())

    def reader(self) -> PostgresReader:
        """Return a new reader of the same database."""
        return PostgresReader(self.address, self._parameters)

    def close(self) -> None:
        """End the lease, so that other brokers take the jobs at once."""
        with suppress(JournalBusyError):
            self._session.query(_CLOSE, self._own())
        self._session.close()


def _jobs(found: list[tuple[Any, ...]]) -> tuple[dict[int, StoredJob], dict[int, ConfigError]]:
    """Return the jobs in rows of `_ACTIVE`, and the errors of unreadable ones, by their ids."""
    jobs, unreadable = dict[int, StoredJob](), dict[int, ConfigError]()
    for *job, weights, placed, deaths, lone, length, epoch in found:
        try:
            stored = rows.stored_job(readable(job))
        except ConfigError as error:
            unreadable[job[0]] = error
            continue
        jobs[job[0]] = replace(
            stored, weights=weights, placed=placed, crashes=Crashes(deaths, lone, length), epoch=epoch
        )
    return jobs, unreadable


def _add_commits(jobs: dict[int, StoredJob], found: list[tuple[Any, ...]]) -> list[int]:
    """Add rows of `_COMMITS` to their jobs. Return the numbers of rows that add nothing."""
    left_out = []
    for *row, number in found:
        job = jobs.get(row[0])
        if job is not None:
            before = job.num_tokens, job.rounds
            rows.add_commit(job, tuple(row))
            if before == (job.num_tokens, job.rounds):
                left_out.append(number)
    return left_out
