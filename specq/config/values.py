"""Values of options that have a form of their own: addresses, trees.

Which addresses a configuration may name: to listen on, to connect to; and origins of web pages.

Rule: nothing listens beyond this machine without keys unless it was asked for with `insecure`.

Trees of drafts as people write them down: a list of paths of ranks, or a file that holds one.

Medusa's published choices are such lists, as `[(0,), (0, 0), (1,)]` or `[[0], [0, 0], [1]]`; both are read.
"""

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Any

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
                f"{key} has {origin!r}, which is not an origin; one is http(s)://HOST or http(s)://HOST:PORT, in "
                f"small letters and without a path, or * for all"
            )


MOST_BYTES = 1 << 20  # of a file


def read_tree(said: str) -> Any:
    """Return the value that a list of paths spells, or that the file of this name holds; what it must be is checked by
    `Speculation`. Raises ConfigError for what is neither."""
    text = said.strip()
    if not text.startswith(("[", "(")):
        text = _content(Path(said).expanduser())
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise ConfigError(f"{_shown(said)} is not a list of paths such as [[0],[0,0],[1]], nor a file of one") from None


def _content(path: Path) -> str:
    try:
        if path.stat().st_size <= MOST_BYTES:
            return path.read_text("utf-8-sig").strip()
    except (OSError, ValueError):
        raise ConfigError(
            f"{_shown(str(path))} is neither a list of paths such as [[0],[0,0],[1]] nor a file of one"
        ) from None
    raise ConfigError(f"{path} has more than {MOST_BYTES} bytes, which is no tree of drafts")


def _shown(said: str) -> str:
    return repr(said if len(said) <= 80 else said[:77] + "...")
