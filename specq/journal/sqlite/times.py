"""The journal's time in a SQLite file: see `specq.journal.clock`.

In `meta`: `time`, `boot` and `uptime`, as they were last noted.
"""

from __future__ import annotations

import sqlite3

from specq.journal.clock import Clocks, MachineClock, Noted, offset_of

KEEP_ORDER = 1e-5  # times that are brought back lie apart by this part of what they did, so that they keep their order
_NAMES = ("time", "boot", "uptime")
_NEWEST = (
    "SELECT max((SELECT coalesce(max(ended), 0) FROM results), "
    "(SELECT coalesce(max(submitted), 0) FROM jobs JOIN active USING (job_id)))"
)
_BRING_BACK = (
    f"UPDATE results SET ended = :now - {KEEP_ORDER} * (:newest - ended) WHERE ended > :now",  # noqa: S608 - a constant
    "UPDATE jobs SET deadline = deadline - submitted + :now WHERE submitted > :now AND deadline > 0",
    f"UPDATE jobs SET submitted = :now - {KEEP_ORDER} * (:newest - submitted) WHERE submitted > :now",  # noqa: S608
)


def go_on(connection: sqlite3.Connection, clocks: Clocks) -> float:
    """Let the journal's time go on for a new owner, within its transaction; return the offset."""
    (newest,) = connection.execute(_NEWEST).fetchone()
    offset = offset_of(clocks, _noted(connection), newest)
    now = clocks.monotonic + offset
    if newest > now:
        for statement in _BRING_BACK:
            connection.execute(statement, {"now": now, "newest": newest})
    note(connection, Noted(now, clocks.machine))
    return offset


def note(connection: sqlite3.Connection, noted: Noted) -> None:
    """Note the journal's time."""
    values = zip(_NAMES, (noted.time, *noted.machine), strict=True)
    connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)


def _noted(connection: sqlite3.Connection) -> Noted | None:
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    return Noted(meta["time"], MachineClock(meta["boot"], meta["uptime"])) if meta.keys() >= set(_NAMES) else None
