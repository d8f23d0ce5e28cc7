"""The meaning of an address on this machine now: its families, its listeners, and its errors.

Rule: a caller waits at most LOOKUP_S s for a name, and PROBE_S s for an answer.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from contextlib import suppress
from socket import AF_INET, AF_INET6, AddressFamily
from typing import Any

from specq.protocol import Address, ConfigError, parse_address

LOOKUP_S, PROBE_S = 1.0, 0.25
SERVER_IN_USE = "another server may use it; choose another address with --bind, or `bind` in [serve] of a --config"
_Place = tuple[AddressFamily, Any]  # the arguments of sockets
_UNKNOWN_DEVICE = (errno.ENODEV, errno.EINVAL, errno.ENXIO)


def has_ipv6() -> bool:
    """Return whether this machine supports IPv6."""
    try:
        with socket.socket(AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


def places(address: Address) -> list[_Place]:
    """Return the socket addresses of an address, IPv4 first. Empty if its name is unknown."""
    if address.host == "*":
        # S104: the user asked for every interface.
        return [(AF_INET6, ("::", address.port)) if has_ipv6() else (AF_INET, ("0.0.0.0", address.port))]  # noqa: S104
    found: list[_Place] = []

    def look_up() -> None:
        with suppress(OSError, UnicodeError):  # invalid names
            all_ = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
            found.extend((family, place) for family, _, _, _, place in all_)

    if address.ip is not None:
        look_up()
    else:
        thread = threading.Thread(target=look_up, daemon=True)
        thread.start()
        thread.join(LOOKUP_S)
    return sorted(found, key=lambda place: place[0] != AF_INET)


def needs_ipv6(address: Address, *, connects: bool) -> bool:
    """Return whether ZeroMQ must use IPv6 for an address.

    ZeroMQ uses one family of a name. If a name has both, the family with a listener is used.
    """
    if address.is_ipv6 or not address.is_tcp:
        return address.is_ipv6
    found = places(address)
    families = {family for family, _ in found}
    if len(families) == 1 or not connects:
        return families == {AF_INET6}
    return next((family == AF_INET6 for family, place in found if _refusal(family, place) == 0), False)


def listens(address: str) -> bool:
    """Return whether a process listens at an address."""
    return any(_refusal(family, place) == 0 for family, place in places(parse_address(address)))


def listener(text: str, backlog: int) -> socket.socket:
    """Return a TCP socket that listens at an address.

    Raises ConfigError with the reason if that fails.
    """
    address, reason = parse_address(text), 0
    for family, place in places(address):
        found = socket.socket(family)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == AF_INET6:
                found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            found.bind(place)
            found.listen(backlog)
        except OSError as error:
            found.close()
            reason = reason or error.errno or errno.EIO
        else:
            return found
    raise ConfigError(f"cannot bind {text}: {why_not_bound(address, reason or errno.ENODEV, SERVER_IN_USE)}")


def why_not_bound(address: Address, number: int, in_use: str) -> str:
    """Describe why an address cannot be listened on, for a system error.

    `in_use`: advice if another process uses the address.
    """
    said = os.strerror(number)
    if number == errno.EADDRINUSE:
        return f"{said}; {in_use}"
    if number == errno.EACCES and 0 < address.port < 1024:
        return f"{said}; ports below 1024 need root"
    if address.is_tcp and number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, *_UNKNOWN_DEVICE):
        return f"{_unknown(address) or f'{address.host} is not an address of this machine'}; * means all interfaces"
    return said


def why_unreachable(text: str) -> str:
    """Describe why an address cannot be reached. "" if a process listens there, or the reason is unknown."""
    address = parse_address(text)
    if not address.is_tcp:
        return ""
    if unknown := _unknown(address):
        return unknown
    refusals = [_refusal(family, place) for family, place in places(address)]
    if 0 in refusals:
        return ""
    return (
        "nothing listens there"
        if errno.ECONNREFUSED in refusals
        else f"connecting to it fails: {os.strerror(refusals[0])}"
    )


def _unknown(address: Address) -> str:
    """Describe a host that this machine does not know, or cannot reach without IPv6. "" for others."""
    if address.is_ipv6 and not has_ipv6():
        return "this machine has no IPv6"
    if places(address):
        return ""
    _, _, scope = address.host.partition("%")
    return f"this machine has no interface {scope}" if scope else f"the name {address.host} is unknown on this machine"


def _refusal(family: AddressFamily, place: Any) -> int:
    """Return the number of the system's error when connecting there. 0: success."""
    try:
        with socket.socket(family) as probe:
            probe.settimeout(PROBE_S)
            probe.connect(place)
    except OSError as error:
        return error.errno or errno.ETIMEDOUT
    return 0
