"""A PostgreSQL journal where the server asks for TLS, the user lacks rights, or the disk is full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from specq.journal.postgres.store import PostgresJournal
from specq.protocol import ConfigError, JournalBusyError
from specq.testing.fake_journal import added, taken
from tests.certificates import make_certificate
from tests.journal.cluster import BIN, Cluster, Database, Server, as_server, texts

pytestmark = pytest.mark.cluster

Open = Callable[..., PostgresJournal]


@pytest.fixture
def serve_tls(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Let the primary have a certificate for a host; return the certificate."""
    primary = cluster.primary

    def serve(host: str) -> Path:
        certificate, key = make_certificate(tmp_path, "server", host)
        for source, name in ((certificate, "server.crt"), (key, "server.key")):
            place = primary.folder / primary.name / name
            script = f"cat > {place}.new && chmod 600 {place}.new && mv {place}.new {place}"
            as_server(primary.folder, ["sh", "-c", script], source.read_bytes())
        primary.run("ALTER SYSTEM SET ssl = on")
        primary.control("reload")
        return certificate

    yield serve
    primary.run("ALTER SYSTEM RESET ssl")
    primary.control("reload")


def verified(database: Database, root: Path) -> str:
    return f"{database.through(database.server.port)}?sslmode=verify-full&sslrootcert={root}"


def test_a_server_with_tls(open_it: Open, database: Database, serve_tls: Callable[[str], Path]) -> None:
    """The connections of writer and reader are encrypted."""
    journal = open_it(verified(database, serve_tls("IP:127.0.0.1")))
    journal.write([taken(1)])
    reader = journal.reader()
    assert reader.find(1) is not None
    query = "SELECT a.datname, s.ssl FROM pg_stat_activity a JOIN pg_stat_ssl s USING (pid) WHERE a.client_port > 0"
    assert [is_encrypted for name, is_encrypted in database.run(query) if name == database.name] == [True, True]
    reader.close()


@pytest.mark.parametrize(
    ("host", "trusts"), [("IP:127.0.0.2", True), ("DNS:db.example", True), ("IP:127.0.0.1", False)]
)
def test_a_server_that_cannot_be_verified_is_refused(
    open_it: Open, database: Database, serve_tls: Callable[[str], Path], tmp_path: Path, host: str, trusts: bool
) -> None:
    """Its certificate is for another host, or of somebody else. With the reason."""
    served = serve_tls(host)
    root = served if trusts else make_certificate(tmp_path, "other", host)[0]
    with pytest.raises(ConfigError, match="does not match host name" if trusts else "certificate verify failed"):
        open_it(verified(database, root))
    assert database.run("SELECT count(*) FROM pg_namespace WHERE nspname = 'specq'") == [(0,)]


def test_a_server_without_tls_is_refused(open_it: Open, database: Database, tmp_path: Path) -> None:
    root, _ = make_certificate(tmp_path, "root", "IP:127.0.0.1")
    with pytest.raises(ConfigError, match="does not support SSL"):
        open_it(verified(database, root))


@pytest.fixture
def guest(database: Database) -> Iterator[str]:
    """A user without rights, by the address of the database."""
    name = f"guest_of_{database.name}"
    database.run(f"CREATE USER {name}")
    yield database.address.replace("postgres@", f"{name}@")
    database.run(f"DROP OWNED BY {name}; DROP USER {name}")


def test_a_user_without_rights(open_it: Open, database: Database, guest: str) -> None:
    """It is said which rights are needed: to create the tables, or to write them. With these it works."""
    with pytest.raises(ConfigError, match=r"permission denied for database .*CREATE"):
        open_it(guest)
    open_it().close()
    with pytest.raises(ConfigError, match=r"permission denied for schema specq.* schema specq"):
        open_it(guest)
    user = guest.partition("//")[2].partition("@")[0]
    database.run(f"GRANT USAGE ON SCHEMA specq TO {user}; GRANT SELECT ON ALL TABLES IN SCHEMA specq TO {user}")
    with pytest.raises(ConfigError, match="permission denied"):
        open_it(guest)
    database.run(f"GRANT ALL ON ALL TABLES IN SCHEMA specq TO {user}")
    database.run(f"GRANT ALL ON ALL SEQUENCES IN SCHEMA specq TO {user}")
    journal = open_it(guest)
    assert journal.write([taken(1)]) == frozenset()


@pytest.fixture
def small(cluster: Cluster) -> Iterator[Server]:
    """A server whose files may have 17 MB: to write more fails as on a full disk."""
    server = Server(cluster.folder, "small", cluster.primary.port + 1)
    command = [str(BIN / "initdb"), "--pgdata=small", "--username=postgres", "--auth=trust", "--encoding=UTF8", "-N"]
    as_server(cluster.folder, [*command, "--locale=C"])
    settings = f"listen_addresses = ''\\nunix_socket_directories = '{cluster.folder}'\\nport = {server.port}\\n"
    as_server(cluster.folder, ["sh", "-c", f'printf "{settings}" >> small/postgresql.conf'])
    start = f"ulimit -f {17 << 10} && exec {BIN / 'pg_ctl'} start --silent --wait -D small -l small.log"
    as_server(cluster.folder, ["bash", "-c", start])
    yield server
    server.control("stop", "-m", "immediate")


def test_a_full_disk(open_it: Open, small: Server) -> None:
    """Groups are refused with the reason, and written once there is room. Nothing is lost."""
    journal = open_it(small.address("postgres"))
    journal.write([taken(1)])
    length, size, refused = 0, 40_000, None
    while refused is None and length < 30 * size:
        try:
            journal.write([added(1, length, list(range(size)))])
            length += size
        except JournalBusyError as error:
            refused = error
    assert "File too large" in str(refused)
    assert 10 * size < length
    with pytest.raises(JournalBusyError):
        journal.write([added(1, length, list(range(size)))])
    small.control("restart", "-m", "fast")
    assert journal.write([added(1, length, list(range(size)))]) == frozenset()
    assert texts(journal)[1] == [*range(size)] * (length // size + 1)


def test_brokers_that_share_an_address_are_warned(open_it: Open) -> None:
    """Workers would find one of them only. A broker that starts again is alone."""
    address = "tcp://10.0.0.1:5750"
    with capture_logs() as logs:
        open_it(address=address)
        second = open_it(address=address)
        assert second.renew() == (address,)
        assert logs == []
        first = open_it(address=address)
        for journal in (second, first):
            assert journal.renew() == (address,)
            journal.renew()
    assert [line["event"] for line in logs] == ["broker_address_shared"] * 2
