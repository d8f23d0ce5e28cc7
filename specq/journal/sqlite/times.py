"""The journal's time in a SQLite file: see `specq.journal.clock`.

In `meta`: `boot` and `offset` of the last owner, and `latest`, the last time that was noted.
"""

from __future__ import annotations

import sqlite3

from specq.journal.clock import Noted, Reading, offset_of

KEEP_ORDER = 1e-5  # times that are brought back lie apart by this part of what they did, so that they keep their order
_NEWEST = (
    "SELECT max((SELECT coalesce(max(ended), 0) FROM results), "
    "(SELECT coalesce(max(submitted), 0) FROM jobs JOIN active USING (job_id)))"
)
_BRING_BACK = (
    f"UPDATE results SET ended = :now - {KEEP_ORDER} * (:newest - ended) WHERE ended > :now",  # noqa: S608 - a constant
    "UPDATE jobs SET deadline = deadline - submitted + :now WHERE submitted > :now AND deadline > 0",
    f"UPDATE jobs SET submitted = :now - {KEEP_ORDER} * (:newest - submitted) WHERE submitted > :now",  # noqa: S608
)


def go_on(connection: sqlite3.Connection, clocks: Reading) -> float:
    """Let the journal's time go on for a new owner, within its transaction; return the offset."""
    (newest,) = connection.execute(_NEWEST).fetchone()
    offset = offset_of(clocks, _noted(connection), newest)
    now = clocks.monotonic + offset
    if newest > now:
        for statement in _BRING_BACK:
            connection.execute(statement, {"now": now, "newest": newest})
    _write(connection, {"boot": clocks.boot, "offset": offset, "latest": now})
    return offset


def note(connection: sqlite3.Connection, now: float) -> None:
    """Note that the journal's time has come to this."""
    _write(connection, {"latest": now})


def _noted(connection: sqlite3.Connection) -> Noted | None:
    meta = dict(
        connection.execute("SELECT name, value FROM meta WHERE name IN ('boot', 'offset', 'latest')").fetchall()
    )
    return Noted(**meta) if len(meta) == len(Noted._fields) else None


def _write(connection: sqlite3.Connection, values: dict[str, str | float]) -> None:
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())
