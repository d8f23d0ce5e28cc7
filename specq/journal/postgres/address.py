"""The address of a PostgreSQL journal: postgresql://[USER@]HOST[:PORT][,HOST...]/DATABASE[?PARAMETER=VALUE&...].

Rules: an address has no password, since it is visible in lists of processes and in log lines. To another machine, the
connection is encrypted, and the server's certificate is verified.
"""

from __future__ import annotations

import ipaddress
from typing import Any
from urllib.parse import quote, urlencode

import psycopg

from specq.protocol import ConfigError

SCHEME = "postgresql://"
PASSWORDS = ("password", "sslpassword")
WEAK = ("allow", "prefer", "require", "verify-ca")
_SHOWN = ("user", "host", "port", "dbname")


def parse(address: str) -> tuple[dict[str, Any], str]:
    """Return the connection's parameters, and the address for log lines.

    Raises ConfigError for a password in the address, and for a connection to another machine that is not verified.
    """
    try:
        found: dict[str, Any] = dict(psycopg.conninfo.conninfo_to_dict(address))
    except (psycopg.Error, UnicodeError):  # their messages quote the address, which may have a password
        raise ConfigError(
            "the journal's address is not valid; a valid one: postgresql://USER@HOST:5432/DATABASE"
        ) from None
    shown = _shown(found)
    if any(name in found for name in PASSWORDS):
        raise ConfigError(
            f"the journal's address {shown} has a password, which other users of the machine can see; put it into "
            f"~/.pgpass, a file that PGPASSFILE or ?passfile= names, or a service file (?service=)"
        )
    mode = found.get("sslmode")
    if not _is_local(found):
        if mode in WEAK:
            raise ConfigError(
                f"the journal's address {shown} has sslmode={mode}, which accepts any server; use sslmode=verify-full "
                f"(the default) with sslrootcert=FILE, or write sslmode=disable for a network that only you use"
            )
        found["sslmode"] = mode or "verify-full"
    return {"target_session_attrs": "read-write"} | found, shown


def _shown(found: dict[str, Any]) -> str:
    """Return an address without its other parameters."""
    user, host, port, name = (str(found.get(key, "")) for key in _SHOWN)
    hosts, ports = host.split(","), port.split(",")
    places = [
        f"{one}:{ports[min(i, len(ports) - 1)]}".rstrip(":") if one and not one.startswith(("/", "@")) else ""
        for i, one in enumerate(hosts)
    ]
    query = urlencode({"host": host, "port": port}, safe="/@,") if "" in places and host else ""
    query = query or (urlencode({"service": found["service"]}) if "service" in found else "")
    before = f"{quote(user)}@" if user else ""
    return f"{SCHEME}{before}{'' if query else ','.join(places)}/{quote(name)}{'?' if query else ''}{query}"


def _is_local(found: dict[str, Any]) -> bool:
    """Return whether all hosts are this machine. A service file may name any host."""
    if "service" in found and not found.keys() & {"host", "hostaddr"}:
        return False
    names = str(found.get("hostaddr") or found.get("host") or _default_host())
    return all(map(_is_local_name, names.split(",")))


def _default_host() -> str:
    """Return the host of PGHOST or of PGSERVICE's file, or "" for a socket."""
    defaults = {option.keyword: option.val for option in psycopg.pq.Conninfo.get_defaults()}
    return (defaults.get(b"hostaddr") or defaults.get(b"host") or b"").decode()


def _is_local_name(name: str) -> bool:
    if not name or name == "localhost" or name.startswith(("/", "@")):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
