"""Which addresses a configuration may name: to listen on, to connect to; and origins of web pages.

Rule: nothing listens beyond this machine without keys unless it was asked for with `insecure`.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection

from specq.protocol import Address, ConfigError, parse_address

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")


def read_address(key: str, address: str) -> Address:
    """Return an address taken apart; ConfigError names the key."""
    try:
        return parse_address(address)
    except ConfigError as error:
        raise ConfigError(f"{key} is {address!r}; {error}") from None


def check_bind(key: str, address: str, *, insecure: bool = False) -> None:
    """Raise ConfigError unless `address` can be listened on, and is of this machine only or `insecure` (or has
    keys)."""
    if not read_address(key, address).is_local and not insecure:
        raise ConfigError(
            f"{key} is {address}, which others can reach, and without keys nothing is encrypted or signed: give --keys "
            "(docs/security.md), bind 127.0.0.1 (and use an SSH tunnel or a VPN), or allow it with --insecure"
        )


def check_connect(key: str, address: str) -> None:
    """Raise ConfigError unless `address` names one place to connect to."""
    found = read_address(key, address)
    if found.is_wildcard or found.is_any_port:
        raise ConfigError(f"{key} is {address}; it must name a host and a port, as in tcp://127.0.0.1:5750")


def connect_address(bind: str) -> str:
    """Return the address at which this machine reaches what is bound to `bind`."""
    found = parse_address(bind)
    if not found.is_wildcard:
        return bind
    return found.at("::1" if found.ip is not None and found.ip.version == 6 else "127.0.0.1")


def free_address() -> str:
    """Return a TCP address of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def check_origins(key: str, origins: Collection[str]) -> None:
    """Raise ConfigError unless each is an origin as browsers send it: a scheme, a host and perhaps a port; or `*`."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{key} has {origin!r}, which is not an origin; one is http(s)://HOST or http(s)://HOST:PORT, in small letters and without a "
                "path, or * for all"
            )
