"""The `Host` header: by which names clients may call the gateway; pure.

A page of a foreign site can make a browser send requests here under that site's name (DNS rebinding). So names must be
known; addresses are safe, since no name stands behind them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection

from specq.protocol import split_host

LOCAL = ("localhost",)


def is_known(host: str, names: Collection[str]) -> bool:
    """Return whether a `Host` header (a name or an address, perhaps with a port) is one of ours."""
    name, _ = split_host(host.strip().lower())
    return name in names or name in LOCAL or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
