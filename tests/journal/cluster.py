"""A PostgreSQL primary and its synchronous standby, which `scripts/cluster.sh` started, and databases in them."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

from specq.journal import StoredJob
from specq.journal.postgres.store import PostgresJournal
from specq.testing import wait_until

BIN = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name), default=Path())
_numbers = itertools.count()


def as_server(folder: Path, command: list[str], data: bytes = b"", **environment: str) -> None:
    """Run a command as the user of the servers. `data`: its standard input."""
    before = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
    subprocess.run(before + command, check=True, cwd=folder, timeout=60, env=os.environ | environment, input=data)


@dataclass(frozen=True)
class Server:
    """One of the two servers."""

    folder: Path
    name: str
    port: int

    def connect(self, database: str = "postgres", **options: Any) -> psycopg.Connection[Any]:
        """Return a connection that commits each statement by itself."""
        place = {"host": str(self.folder), "port": self.port, "user": "postgres", "dbname": database}
        return psycopg.connect(**place, autocommit=True, **options)

    def run(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run a statement."""
        with self.connect(database) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def control(self, *arguments: str) -> None:
        """Run pg_ctl, as the server's user."""
        command = [str(BIN / "pg_ctl"), *arguments, "--silent", "-D", str(self.folder / self.name)]
        if arguments[0] in ("start", "restart"):
            command += ["-l", str(self.folder / f"{self.name}.log")]
        as_server(self.folder, command)

    def die(self) -> None:
        """Kill all its processes."""
        pid = int((self.folder / self.name / "postmaster.pid").read_text("ascii").split()[0])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
        for one in (pid, *map(int, children)):
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())

    def address(self, database: str, **parameters: str) -> str:
        """Return the address of a journal, through the server's socket."""
        more = "".join(f"&{name}={value}" for name, value in parameters.items())
        return f"postgresql://postgres@/{database}?host={self.folder}&port={self.port}{more}"


@dataclass(frozen=True)
class Database:
    """A database of its own, for one test."""

    server: Server
    name: str

    @property
    def address(self) -> str:
        return self.server.address(self.name)

    def through(self, port: int) -> str:
        """Return its address by another port."""
        return f"postgresql://postgres@127.0.0.1:{port}/{self.name}"

    def run(self, statement: str) -> list[Any]:
        """Run a statement, not as a broker."""
        return self.server.run(statement, self.name)

    def expire(self, journal: PostgresJournal) -> None:
        """Let a broker's lease run out."""
        self.run(f"UPDATE specq.brokers SET until = now() - interval '1 s' WHERE number = {journal._number}")

    def fold(self) -> None:
        """Have a row for each job and group, so that a test can change one."""
        columns = "number, job_id, base_len, token_ids, origins, logprobs, rounds, draft_tokens, cached_tokens"
        self.run(f"INSERT INTO specq.folded ({columns}) SELECT {columns} FROM specq.unfolded; DELETE FROM specq.groups")

    def holders(self) -> dict[int, int]:
        """Return the number of the holder of each unfinished job."""
        return dict(self.run("SELECT job_id, broker FROM specq.active"))


class Cluster:
    """Both servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        first, second = map(int, (folder / "ports").read_text("ascii").split())
        both = Server(folder, "primary", first), Server(folder, "standby", second)
        has_failed_over = (folder / "primary" / "standby.signal").exists()
        self.primary, self.standby = both[::-1] if has_failed_over else both

    def new_database(self) -> Database:
        """Create a database in the primary."""
        name = f"journal_{os.getpid()}_{next(_numbers)}"
        self.primary.run(f"CREATE DATABASE {name}")
        return Database(self.primary, name)

    def fail_over(self) -> None:
        """Kill the primary, let the standby take its place, and make a new synchronous standby of a copy of it."""
        old, new = self.primary, self.standby
        old.die()
        new.control("promote", "--wait")
        shutil.rmtree(self.folder / old.name)
        copy = [str(BIN / "pg_basebackup"), "--checkpoint=fast", "--write-recovery-conf", f"--pgdata={old.name}"]
        place = f"host={self.folder} port={new.port} user=postgres"
        as_server(self.folder, [*copy, f"--dbname={place}"], PGOPTIONS="-c synchronous_commit=local")
        own = f"echo port = {old.port} >> {old.name}/postgresql.conf"
        as_server(self.folder, ["sh", "-c", own])
        self.primary, self.standby = new, old
        old.control("start", "--wait")

    def wait_replicated(self) -> None:
        """Wait until the standby is connected."""
        wait_until(lambda: self.primary.run("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'") != [])


def running() -> Cluster:
    """Return the cluster of `make test-cluster`."""
    folder = os.environ.get("SPECQ_CLUSTER")
    assert folder, "these tests need servers: make test-cluster"
    return Cluster(Path(folder))


def texts(journal: PostgresJournal) -> dict[int, list[int]]:
    """Return the tokens of each unfinished job."""
    return {job.submit.job_id: np.frombuffer(job.token_ids, "<i4").tolist() for job in journal.unfinished()}


def ids(jobs: list[StoredJob]) -> list[int]:
    """Return the ids of jobs."""
    return [job.submit.job_id for job in jobs]
