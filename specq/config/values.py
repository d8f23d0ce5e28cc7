"""Parsing and checks of structured option values: addresses, web origins, draft trees.

Rule: specq listens on non-local addresses without keys only if option `insecure` is set.

A draft tree is a list of paths of ranks, or a file with one. Medusa publishes its choices as such lists, for example
`[(0,), (0, 0), (1,)]` or `[[0], [0, 0], [1]]`. Both forms are valid.
"""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

from specq.protocol import Address, ConfigError, parse_address, split_addresses

_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")


def read_address(key: str, address: str) -> Address:
    """Return the parsed address. Raises ConfigError that names the key."""
    try:
        return parse_address(address)
    except ConfigError as error:
        raise ConfigError(f"{key} is {address!r}; {error}") from None


def check_bind(key: str, address: str, *, insecure: bool = False) -> None:
    """Raise ConfigError unless `address` is valid, and is local or `insecure` (or has keys)."""
    if not read_address(key, address).is_local and not insecure:
        raise ConfigError(
            f"{key} is {address}, which other machines can reach without encryption and keys: give --keys "
            "(docs/security.md), bind 127.0.0.1 (with an SSH tunnel or a VPN), or allow it with --insecure"
        )


def check_connect(key: str, address: str) -> None:
    """Raise ConfigError unless `address` names one host and one port."""
    if not read_address(key, address).names_one_peer:
        raise ConfigError(f"{key} is {address}; expected a host and a port, as in tcp://127.0.0.1:5750")


def check_brokers(key: str, addresses: str) -> None:
    """Raise ConfigError unless `addresses` is an address to connect to, or several, separated by commas."""
    for address in split_addresses(addresses):
        check_connect(key, address)


def connect_address(bind: str) -> str:
    """Return the address for local clients of a socket that is bound to `bind`."""
    found = parse_address(bind)
    if not found.is_wildcard:
        return bind
    return found.at("::1" if found.ip is not None and found.ip.version == 6 else "127.0.0.1")


def free_address() -> str:
    """Return a local TCP address that is currently free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def check_origins(key: str, origins: Collection[str]) -> None:
    """Raise ConfigError unless each is `*` or an origin: scheme, host and optional port, as browsers send it."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"{key} has {origin!r}, which is not an origin; expected http(s)://HOST or http(s)://HOST:PORT in "
                f"lower case without a path, or * for all"
            )


MOST_BYTES = 1 << 20  # size limit of a tree file


def read_tree(said: str) -> Any:
    """Return the list of paths in `said`, or in the file of this name.

    `Speculation` checks the value. Raises ConfigError for text that is neither a list nor a readable file.
    """
    text = said.strip()
    if not text.startswith(("[", "(")):
        text = _content(Path(said).expanduser())
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(
            f"{_shown(said)} is neither a list of paths such as [[0],[0,0],[1]] nor a file with one"
        ) from None


def _content(path: Path) -> str:
    try:
        if path.stat().st_size <= MOST_BYTES:
            return path.read_text("utf-8-sig").strip()
    except (OSError, ValueError):
        raise ConfigError(
            f"{_shown(str(path))} is neither a list of paths such as [[0],[0,0],[1]] nor a file with one"
        ) from None
    raise ConfigError(f"{path} is not a draft tree: it has more than {MOST_BYTES} bytes")


def _shown(said: str) -> str:
    return repr(said if len(said) <= 80 else said[:77] + "...")
