"""ZeroMQ addresses as configurations name them: tcp://HOST:PORT and ipc://PATH; and origins of web pages.

Rule: nothing listens beyond this machine without keys unless it was asked for with `insecure`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection

from specq.protocol import ConfigError

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>\*|\d{1,5})")
_IPC = re.compile(r"ipc://\S+")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")
_WILDCARDS = ("*", "0.0.0.0", "[::]")  # noqa: S104 - named in order to be refused
_MAX_PORT = 65_535


def check_bind(key: str, address: str, *, insecure: bool = False) -> None:
    """Raise ConfigError unless `address` can be listened on, and is of this machine only or `insecure` (or has keys)."""
    _check_form(key, address)
    if not insecure and not is_local(address):
        raise ConfigError(
            f"{key} is {address}, which others can reach, and without keys nothing is encrypted or signed: give --keys "
            "(docs/security.md), bind 127.0.0.1 (and use an SSH tunnel or a VPN), or allow it with --insecure"
        )


def check_connect(key: str, address: str) -> None:
    """Raise ConfigError unless `address` names one place to connect to."""
    _check_form(key, address)
    if is_wildcard(host_of(address)) or address.endswith(":*"):
        raise ConfigError(f"{key} is {address}; it must name a host and a port, as in tcp://127.0.0.1:5750")


def is_local(address: str) -> bool:
    """Tell whether only this machine can reach `address`."""
    host = host_of(address)
    if address.startswith("ipc://") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def connect_address(bind: str) -> str:
    """Return the address at which this machine reaches what is bound to `bind`."""
    host = host_of(bind)
    return bind.replace(host, "[::1]" if host == "[::]" else "127.0.0.1", 1) if is_wildcard(host) else bind


def free_address() -> str:
    """Return a TCP address of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def host_of(address: str) -> str:
    """Return the host of a TCP address, in its brackets if it is of IPv6; else the empty string."""
    match = _TCP.fullmatch(address)
    return match["host"] if match else ""


def host_and_port(address: str) -> tuple[str, int]:
    """Return the host of a TCP address as sockets take it, and its port; 0: any free one."""
    host, port = host_of(address).strip("[]"), address.rpartition(":")[2]
    return ("0.0.0.0" if host == "*" else host), (0 if port == "*" else int(port))  # noqa: S104 - asked for


def is_wildcard(host: str) -> bool:
    """Tell whether `host` stands for every interface."""
    return host in _WILDCARDS


def _check_form(key: str, address: str) -> None:
    match = _TCP.fullmatch(address)
    port = match["port"] if match else ""
    in_range = port == "*" or (port.isdigit() and 0 < int(port) <= _MAX_PORT)
    if not in_range and not _IPC.fullmatch(address):
        raise ConfigError(f"{key} is {address!r}; it must be tcp://HOST:PORT or ipc://PATH")


def check_origins(key: str, origins: Collection[str]) -> None:
    """Raise ConfigError unless each is an origin as browsers send it: a scheme, a host and perhaps a port; or `*`."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{key} has {origin!r}, which is not an origin; one is http(s)://HOST or http(s)://HOST:PORT, in small letters and without a "
                "path, or * for all"
            )
