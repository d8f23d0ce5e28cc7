"""A journal's tables in a PostgreSQL database, all in the schema `specq`, and the upgrades of older versions.

- `brokers`: a row for each broker: the end of its lease, its last group, and the bytes that it stored.
- `jobs`: the requests, written once. A job's row is there until the job is forgotten, so an id exists once.
- `active`: the unfinished jobs, with their holders. Also their epochs, weights, verifiers and crashes.
- `groups`: their tokens as they were written: a row for each group of a broker. Rule: the live tokens in a broker's
  groups are of jobs that it holds. A taker folds the groups of a dead broker before it takes jobs.
- `folded`: the tokens of older groups, a row for each job and group. They are deleted when the job ends. Most jobs end
  before their groups are folded.
- `commits`: both, as a view.
- `results`: the ended jobs, with their ends and all their tokens.
- `meta`: the version, and the bytes of results that no broker's row counts.
- `numbers`: numbers of brokers and of takings, which become parts of epochs. A later number is greater.

Rule: a released step never changes. A new version is a new step at the end of `STEPS`. `meta` has the number of steps
that a database has completed. All steps run in one transaction, one program at a time. A database with more steps than
this specq knows is refused, and so is a schema `specq` of another program.
"""

from __future__ import annotations

from specq.journal.postgres.functions import FOLD_LOST, FUNCTIONS
from specq.journal.postgres.session import DatabaseSession
from specq.protocol import ConfigError

APPLICATION_ID = 0x73706371  # as in a SQLite file: identifies a journal
MIGRATION_S = 60.0  # longest time for all steps

TABLES = """
CREATE SCHEMA specq;
CREATE SEQUENCE specq.numbers MINVALUE 0;
CREATE TABLE specq.meta (name text PRIMARY KEY, value bigint NOT NULL);
INSERT INTO specq.meta VALUES ('stored', 0);
CREATE TABLE specq.brokers (
    number bigint PRIMARY KEY,
    token bigint NOT NULL, -- of the broker's connection
    name text NOT NULL,
    address text NOT NULL,
    until timestamptz NOT NULL,
    last_group bigint NOT NULL DEFAULT 0,
    refused bigint[] NOT NULL DEFAULT '{}', -- of the last group, the jobs that the broker did not hold
    refused_before bigint[] NOT NULL DEFAULT '{}', -- of the group before it, if that was under way
    stored bigint NOT NULL DEFAULT 0, -- bytes of results that it wrote
    running bigint NOT NULL DEFAULT 0 -- bytes of its unfinished jobs
) WITH (fillfactor = 20, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
CREATE TABLE specq.jobs (
    job_id bigint PRIMARY KEY,
    owner text NOT NULL,
    tenant text NOT NULL,
    cache_salt text NOT NULL,
    label text NOT NULL,
    model text NOT NULL,
    params text NOT NULL,
    speculation text NOT NULL,
    priority bigint NOT NULL,
    submitted double precision NOT NULL,
    deadline double precision NOT NULL,
    prompt_ids bytea NOT NULL
);
CREATE TABLE specq.active (
    job_id bigint PRIMARY KEY,
    broker bigint, -- NULL: nobody
    epoch bigint, -- of a job that was taken from another broker
    since bigint NOT NULL DEFAULT 0, -- earlier groups are of a former job with this id
    weights text NOT NULL DEFAULT '',
    placed bigint NOT NULL DEFAULT 0,
    deaths bigint NOT NULL DEFAULT 0,
    lone_deaths bigint NOT NULL DEFAULT 0,
    death_length bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 40, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 1000);
CREATE SEQUENCE specq.commit_numbers;
CREATE TABLE specq.groups (
    number bigint PRIMARY KEY,
    broker bigint NOT NULL,
    size bigint NOT NULL, -- about its bytes
    job_id bigint[] NOT NULL,
    base_len bigint[] NOT NULL,
    token_ids bytea[] NOT NULL,
    origins bytea[] NOT NULL,
    logprobs bytea[] NOT NULL,
    rounds bigint[] NOT NULL,
    draft_tokens bigint[] NOT NULL,
    cached_tokens bigint[] NOT NULL
);
CREATE TABLE specq.folded (
    number bigint NOT NULL,
    job_id bigint NOT NULL,
    base_len bigint NOT NULL,
    token_ids bytea NOT NULL,
    origins bytea NOT NULL,
    logprobs bytea NOT NULL,
    rounds bigint NOT NULL,
    draft_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    PRIMARY KEY (job_id, number)
) WITH (autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_threshold = -1);
CREATE VIEW specq.unfolded AS
    SELECT g.broker, g.number, u.* FROM specq.groups g CROSS JOIN LATERAL unnest(g.job_id, g.base_len, g.token_ids,
        g.origins, g.logprobs, g.rounds, g.draft_tokens, g.cached_tokens) AS u(job_id, base_len, token_ids, origins,
        logprobs, rounds, draft_tokens, cached_tokens)
    JOIN specq.active a ON a.job_id = u.job_id AND a.since <= g.number;
CREATE VIEW specq.commits AS
    SELECT number, job_id, base_len, token_ids, origins, logprobs, rounds, draft_tokens, cached_tokens
        FROM specq.unfolded
    UNION ALL SELECT * FROM specq.folded;
CREATE TABLE specq.results (
    job_id bigint PRIMARY KEY,
    weights text NOT NULL,
    finish text NOT NULL,
    ended double precision NOT NULL,
    code text NOT NULL,
    reason text NOT NULL,
    stats text NOT NULL,
    num_bytes bigint NOT NULL, -- with the job's request
    token_ids bytea NOT NULL,
    origins bytea NOT NULL,
    logprobs bytea NOT NULL
);
CREATE INDEX ended ON specq.results (ended, job_id);
-- Arrays of tokens are stored as they are: to compress them takes longer than to write them.
ALTER TABLE specq.jobs SET (toast_tuple_target = 8160);
ALTER TABLE specq.jobs ALTER prompt_ids SET STORAGE EXTERNAL;
ALTER TABLE specq.results SET (toast_tuple_target = 8160);
ALTER TABLE specq.results
    ALTER token_ids SET STORAGE EXTERNAL, ALTER origins SET STORAGE EXTERNAL, ALTER logprobs SET STORAGE EXTERNAL;
ALTER TABLE specq.folded SET (toast_tuple_target = 8160);
ALTER TABLE specq.folded
    ALTER token_ids SET STORAGE EXTERNAL, ALTER origins SET STORAGE EXTERNAL, ALTER logprobs SET STORAGE EXTERNAL;
ALTER TABLE specq.groups SET (toast_tuple_target = 8160);
ALTER TABLE specq.groups
    ALTER job_id SET STORAGE EXTERNAL, ALTER base_len SET STORAGE EXTERNAL, ALTER token_ids SET STORAGE EXTERNAL,
    ALTER origins SET STORAGE EXTERNAL, ALTER logprobs SET STORAGE EXTERNAL, ALTER rounds SET STORAGE EXTERNAL,
    ALTER draft_tokens SET STORAGE EXTERNAL, ALTER cached_tokens SET STORAGE EXTERNAL;
"""

GROUPS_BY_BROKER = "CREATE INDEX groups_by_broker ON specq.groups (broker, number);"

STEPS = (TABLES + FUNCTIONS, GROUPS_BY_BROKER + FOLD_LOST)

# From the tables of the catalog: functions such as to_regclass may remember what another program has changed since.
_VERSION = """
SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = %s),
    (SELECT count(*) FROM pg_attribute a JOIN pg_class c ON c.oid = attrelid JOIN pg_namespace n ON n.oid = relnamespace
        WHERE nspname = %s AND relname = 'meta' AND attname IN ('name', 'value')) = 2,
    current_setting('server_encoding')
"""


_META = "SELECT name, value FROM {}.meta"
_NOTE = "INSERT INTO {}.meta VALUES (%s, %s) ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value"


def prepare(session: DatabaseSession, steps: tuple[str, ...] = STEPS, schema: str = "specq") -> None:
    """Upgrade a database to the newest version, in one transaction.

    Raises ConfigError for a schema that is not a journal, or that is newer.
    """
    if version(session, len(steps), schema) == len(steps):
        return
    with session.transaction(MIGRATION_S):
        session.query("SELECT pg_advisory_xact_lock(%s)", (APPLICATION_ID,))
        done = version(session, len(steps), schema)  # another broker may have been faster
        for step in steps[done:]:
            session.script(step)
        if done < len(steps):
            for name, value in (("application", APPLICATION_ID), ("version", len(steps))):
                session.query(_NOTE.format(schema), (name, value))


def version(session: DatabaseSession, newest: int = len(STEPS), schema: str = "specq") -> int:
    """Return the version of a database. 0: it has no journal. Raises ConfigError as `prepare` does."""
    ((has_schema, has_meta, encoding),) = session.query(_VERSION, (schema, schema))
    if encoding != "UTF8":
        raise ConfigError(f"the database's encoding is {encoding}; a journal needs UTF8 (CREATE DATABASE ... ENCODING)")
    if not has_schema:
        return 0
    meta: dict[str, int] = dict(session.query(_META.format(schema))) if has_meta else {}
    if meta.get("application") != APPLICATION_ID:
        raise ConfigError(f"its schema {schema} is of another program")
    if meta["version"] > newest:
        raise ConfigError(f"its version is {meta['version']}; this specq reads versions up to {newest}")
    return int(meta["version"])
