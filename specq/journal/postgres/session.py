"""A connection to the database that is opened again after each error.

Rule: no call takes longer than the times below, also if the server, the network or a standby fails.

- The server ends a statement after STATEMENT_S, a wait for a lock after LOCK_S, and a transaction without statements
  after IDLE_S.
- A partition is noticed after SILENCE_S.
- A call that has no answer after ANSWER_S is given up, with its connection. Whether it was carried out is not known
  then. So it is when the server warns that a commit did not wait for its standby.

`send` and `receive` are for calls that do not wait for each other (libpq's pipeline mode). Each is a transaction, and
the server begins the next one when it has committed the one before. An error ends all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.abc import PQGen
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus, PipelineStatus
from psycopg.waiting import Ready, Wait

from specq.journal.postgres.arrays import ARRAYS

CONNECT_S = 3  # for each host
ANSWER_S = 8.0
STATEMENT_S = 5
LOCK_S = 1
IDLE_S = 2
SILENCE_S = 5
NOT_REPLICATED = ("01000", "57P01")  # warnings of a commit that did not wait for its standby
RIGHTS = "the user needs CREATE in the database for the tables, then all rights in the schema specq"
DURABILITIES = {  # "full": as the database says, but at least `on`
    "full": "CASE WHEN current_setting('synchronous_commit') = 'remote_apply' THEN 'remote_apply' ELSE 'on' END",
    "process": "'off'",
}
# Statements with arrays of groups find a few rows by their keys. The planner cannot know how few, and to plan each call
# anew takes longer than the call.
_SETTINGS = {
    "statement_timeout": STATEMENT_S * 1000,
    "lock_timeout": LOCK_S * 1000,
    "idle_in_transaction_session_timeout": IDLE_S * 1000,
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
_LIMITS = {
    "connect_timeout": CONNECT_S,
    "keepalives": 1,
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": SILENCE_S - 1,
    "tcp_user_timeout": SILENCE_S * 1000,
    "client_encoding": "utf8",
}

Row = tuple[Any, ...]
Failure = Callable[[str], Exception]


class DatabaseSession:
    """Statements in a database, each a transaction of its own. One thread at a time.

    Raises what `failure` makes of the reason. The connection is then closed, and the next call opens another one.

    - `application`: the name that the database shows for the connection.
    - `begin`: called with each new connection, before other statements.
    """

    def __init__(self, parameters: dict[str, Any], durability: str, failure: Failure) -> None:
        self.application = "specq journal"
        self.begin: Callable[[], None] = lambda: None
        self._parameters, self._durability, self._failure = parameters, durability, failure
        self._connection: psycopg.Connection[Row] | None = None
        self._cursor: psycopg.Cursor[Row]
        self._warning, self._give_up_at, self._in_transaction = "", 0.0, False
        self._sent = ""  # the statement that `send` has prepared

    def fail_with(self, failure: Failure) -> None:
        """Raise from now on what `failure` makes of a reason."""
        self._failure = failure

    def connect(self) -> None:
        """Connect, unless there is a connection."""
        if self._connection is None:
            with self._errors():
                self._connection = self._new_connection()
                self._cursor = self._connection.cursor(binary=True)
                self._sent = ""
            self.begin()

    def query(self, statement: str, values: Sequence[Any] = (), *, prepare: bool = False) -> list[Row]:
        """Run a statement, and return its rows."""
        self.connect()
        with self._errors():
            self._set_pipeline(on=False)
            self._cursor.execute(statement.encode(), values, prepare=prepare)
            return self._cursor.fetchall() if self._cursor.description else []

    def send(self, statement: str, values: Sequence[Any]) -> None:
        """Begin a statement with parameters $1, $2, ... It is the same one each time."""
        self.connect()
        if statement != self._sent:
            self.query(f"PREPARE sent AS {statement}")
            self._sent = statement
        with self._errors() as connection:
            self._set_pipeline(on=True)
            transformer = Transformer(connection)
            dumped = transformer.dump_sequence(values, [PyFormat.BINARY] * len(values))
            connection.pgconn.send_query_prepared(b"sent", dumped, transformer.formats, psycopg.pq.Format.BINARY)
            connection.pgconn.pipeline_sync()
            connection.wait(_flush(connection.pgconn))

    def receive(self) -> list[Row]:
        """Return the rows of the oldest statement that was sent and not received."""
        with self._errors() as connection:
            result = connection.wait(_receive(connection.pgconn))
            if result.status != ExecStatus.TUPLES_OK:
                raise psycopg.errors.error_from_result(result)
            transformer = Transformer(connection)
            transformer.set_pgresult(result)
            return transformer.load_rows(0, result.ntuples, tuple)

    def _set_pipeline(self, *, on: bool) -> None:
        """Change the mode of the connection, without statements under way."""
        assert self._connection is not None, "it is connected"
        pgconn = self._connection.pgconn
        if on != (pgconn.pipeline_status != PipelineStatus.OFF):
            (pgconn.enter_pipeline_mode if on else pgconn.exit_pipeline_mode)()

    def script(self, statements: str) -> None:
        """Run several statements, within a transaction."""
        self.connect()
        with self._errors():
            self._set_pipeline(on=False)
            self._cursor.execute(statements.encode(), binary=False)

    @contextmanager
    def transaction(self, seconds: float) -> Iterator[None]:
        """Run all calls in one transaction, of at most `seconds`."""
        self.connect()
        self._give_up_at, self._in_transaction = time.monotonic() + seconds, True
        try:
            self.script(
                f"BEGIN; SET LOCAL statement_timeout = {int(seconds)}000; SET LOCAL lock_timeout = 0; "
                f"SET LOCAL idle_in_transaction_session_timeout = {int(seconds)}000"
            )
            yield
            self.script("COMMIT")
        except BaseException:
            self.close()  # rolls back
            raise
        finally:
            self._in_transaction = False

    def close(self) -> None:
        """Close the connection, if there is one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(psycopg.Error, OSError):
                connection.close()

    @contextmanager
    def _errors(self) -> Iterator[psycopg.Connection[Row]]:
        """Raise every error of the database as `failure`, and close the connection after it."""
        self._warning = ""
        if not self._in_transaction:
            self._give_up_at = time.monotonic() + ANSWER_S
        try:
            yield self._connection  # type: ignore[misc]  # None only while `connect` makes it
        except (psycopg.Error, OSError) as error:
            self.close()
            hint = [RIGHTS] if isinstance(error, psycopg.errors.InsufficientPrivilege) else []
            raise self._failure("; ".join([*str(error).split("\n"), *hint])) from None
        if self._warning:
            self.close()
            raise self._failure(self._warning)

    def _new_connection(self) -> psycopg.Connection[Row]:
        parameters: dict[str, Any] = {**_LIMITS, **self._parameters}
        ours = " ".join(f"-c {name}={value}" for name, value in _SETTINGS.items())
        parameters["options"] = f"{parameters.get('options', '')} {ours}".strip()
        connection = _Connection.connect(**parameters, autocommit=True, application_name=self.application)
        try:
            connection.give_up_at = lambda: self._give_up_at
            for array_type, kind in ARRAYS.items():
                connection.adapters.register_dumper(array_type, kind)
            connection.add_notice_handler(self._notice)
            commit = DURABILITIES[self._durability]
            connection.execute(f"SELECT set_config('synchronous_commit', {commit}, false)".encode())
        except BaseException:
            connection.close()
            raise
        return connection

    def _notice(self, notice: psycopg.errors.Diagnostic) -> None:
        if notice.severity_nonlocalized == "WARNING" and notice.sqlstate in NOT_REPLICATED:
            self._warning = f"{notice.message_primary}; {notice.message_detail}"


class _Connection(psycopg.Connection[Row]):
    """A connection that gives up waiting for an answer at a time of the monotonic clock."""

    give_up_at: Callable[[], float] = staticmethod(lambda: time.monotonic() + ANSWER_S)

    def wait(self, gen: PQGen[Any], *args: Any, **options: Any) -> Any:
        return super().wait(_until(gen, self.give_up_at), *args, **options)


def _flush(pgconn: psycopg.pq.abc.PGconn) -> PQGen[None]:
    """Send all that is waiting. What comes meanwhile is read, so that the server can go on."""
    while pgconn.flush():
        if (yield Wait.RW) & Ready.R:
            pgconn.consume_input()


def _receive(pgconn: psycopg.pq.abc.PGconn) -> PQGen[psycopg.pq.abc.PGresult]:
    """Return the last result of the oldest statement, once its transaction has ended."""
    last = None
    while True:
        while pgconn.is_busy():
            if (yield Wait.R):
                pgconn.consume_input()
        result = pgconn.get_result()
        if result is not None and result.status == ExecStatus.PIPELINE_SYNC:
            assert last is not None, "a statement was sent"
            return last
        last = result or last


def _until(gen: PQGen[Any], give_up_at: Callable[[], float]) -> Generator[Any, Any, Any]:
    """Drive a generator of psycopg. It is resumed several times a second, also without an event."""
    try:
        state = next(gen)
        while True:
            ready = yield state
            if not ready and time.monotonic() > give_up_at():
                raise TimeoutError("the server does not answer")
            state = gen.send(ready)
    except StopIteration as end:
        return end.value
