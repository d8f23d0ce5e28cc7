"""The journal's tables, and the steps by which an older file becomes the newest.

    jobs     what was asked for; written once
    active   the jobs that have not ended, the weights that their texts come from, which verifier holds them, and what
             verifiers died of them
    commits  their tokens by position, in the order of time: each group appends a few pages, however many jobs it
             concerns. Rows of jobs that ended are cleared away from time to time
    results  the jobs that ended: how, when, and all their tokens
    meta     whose the journal is (`specq.journal.sqlite.fence`), and its time (`specq.journal.sqlite.times`)

Rule: a step, once released, is never changed; a new version is a new step at the end of `STEPS`. `PRAGMA user_version`
says how many steps a file has behind it; a file with more than this specq knows is refused, never guessed at.
"""

from __future__ import annotations

import sqlite3

from specq.protocol import ConfigError

APPLICATION_ID = 0x73706371  # "spcq": `file` and we tell a journal from other SQLite files

STEPS = (
    """
    CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
    CREATE TABLE jobs (
        job_id INTEGER PRIMARY KEY,
        owner TEXT NOT NULL,
        label TEXT NOT NULL,
        model TEXT NOT NULL,
        params TEXT NOT NULL,
        speculation TEXT NOT NULL,
        priority INTEGER NOT NULL,
        submitted REAL NOT NULL,
        deadline REAL NOT NULL,
        prompt_ids BLOB NOT NULL
    );
    CREATE TABLE active (job_id INTEGER PRIMARY KEY, weights TEXT NOT NULL);
    CREATE TABLE commits (
        number INTEGER PRIMARY KEY,
        job_id INTEGER NOT NULL,
        base_len INTEGER NOT NULL,
        token_ids BLOB NOT NULL,
        accepted BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        rounds INTEGER NOT NULL,
        draft_tokens INTEGER NOT NULL
    );
    CREATE TABLE results (
        job_id INTEGER PRIMARY KEY,
        weights TEXT NOT NULL,
        finish TEXT NOT NULL,
        ended REAL NOT NULL,
        code TEXT NOT NULL,
        reason TEXT NOT NULL,
        stats TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        token_ids BLOB NOT NULL,
        accepted BLOB NOT NULL,
        logprobs BLOB NOT NULL
    );
    CREATE INDEX ended ON results (ended);
    """,
    """
    ALTER TABLE active ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE active ADD COLUMN lone_deaths INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE active ADD COLUMN death_length INTEGER NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE active ADD COLUMN placed INTEGER NOT NULL DEFAULT 0;
    """,
    """
    ALTER TABLE commits RENAME COLUMN accepted TO origins;
    ALTER TABLE results RENAME COLUMN accepted TO origins;
    """,
    """
    ALTER TABLE jobs ADD COLUMN tenant TEXT NOT NULL DEFAULT '';
    """,
    """
    ALTER TABLE jobs ADD COLUMN cache_salt TEXT NOT NULL DEFAULT '';
    ALTER TABLE commits ADD COLUMN cached_tokens INTEGER NOT NULL DEFAULT 0;
    """,
)


def prepare(connection: sqlite3.Connection, steps: tuple[str, ...] = STEPS) -> None:
    """Bring a file up to the newest version, in one transaction; raises ConfigError for one that is no journal of ours.

    The connection commits each statement by itself (`isolation_level=None`).
    """
    version = _version(connection, len(steps))
    if version == len(steps):
        return
    connection.execute("BEGIN EXCLUSIVE")
    try:
        version = _version(connection, len(steps))  # another broker may have been faster
        for step in steps[version:]:
            for statement in filter(str.strip, step.split(";")):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {len(steps)}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _version(connection: sqlite3.Connection, newest: int) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if num_tables and application != APPLICATION_ID:
        raise ConfigError("it is a SQLite file of another program")
    if version > newest:
        raise ConfigError(f"its version is {version}; this specq knows versions up to {newest}")
    return version
