"""Addresses in their text form: tcp://HOST:PORT and ipc://PATH. Only this module parses them. It does no I/O.

HOST is a name, an IPv4 address, or an IPv6 address in brackets. A link-local IPv6 address also names its interface
([fe80::1%eth0]). Three hosts mean all interfaces: * (IPv4, and IPv6 if the machine has it), 0.0.0.0 (IPv4) and [::]
(both). PORT is 1 to 65535, or * for any free port.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from specq.protocol.errors import ConfigError

FORMS = "tcp://HOST:PORT or ipc://PATH"
EVERY = "*"
MAX_PORT = 65_535


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed address.

    - `host`: without brackets. "" for ipc.
    - `port`: 0 for any free port.
    """

    text: str
    host: str = ""
    port: int = 0

    @property
    def is_tcp(self) -> bool:
        return bool(self.host)

    @property
    def is_any_port(self) -> bool:
        return self.is_tcp and not self.port

    @property
    def ip(self) -> IPv4Address | IPv6Address | None:
        """Return the host as a number, or None for a name.

        An IPv4 address inside IPv6 (::ffff:127.0.0.1) counts as IPv4.
        """
        found = _ip(self.host)
        return (found.ipv4_mapped or found) if isinstance(found, IPv6Address) else found

    @property
    def is_ipv6(self) -> bool:
        """Return whether the host is written as IPv6."""
        return ":" in self.host

    @property
    def is_wildcard(self) -> bool:
        """Return whether it means every interface."""
        return self.host == EVERY or (self.ip is not None and self.ip.is_unspecified)

    @property
    def names_one_peer(self) -> bool:
        """Return whether it names one host and one port, so that a socket can connect to it."""
        return not (self.is_wildcard or self.is_any_port)

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach it."""
        if not self.is_tcp or self.host.casefold() == "localhost":
            return True
        return self.ip is not None and self.ip.is_loopback

    def at(self, host: str) -> str:
        """Return the address with another host."""
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self.port or EVERY}"


def parse_address(text: str) -> Address:
    """Parse an address.

    Raises ConfigError with the mistake and the correct form.
    """
    scheme, found, rest = text.partition("://")
    if text.split() != [text]:
        raise _wrong("has spaces" if text else "is empty")
    if not found:
        raise _wrong(f"has no scheme, as in tcp://{text}")
    if scheme == "ipc" and rest:
        return Address(text)
    if scheme != "tcp":
        raise _wrong("has no path" if scheme == "ipc" else f"begins with {scheme}://")
    host, port = split_host(rest)
    return Address(text, _host(host, rest), _port(port))


def split_addresses(text: str) -> tuple[str, ...]:
    """Return the addresses in a list that is separated by commas, each once. They are not checked."""
    first, *others = text.split(",")
    return tuple(dict.fromkeys([first, *(other.lstrip(" ") for other in others)]))


def names_one_peer(text: str) -> bool:
    """Return whether a text is an address, and names one host and one port, or one path."""
    try:
        return parse_address(text).names_one_peer
    except ConfigError:
        return False


def split_host(text: str) -> tuple[str, str | None]:
    """Split HOST:PORT into host without brackets, and port.

    The port is None if it is absent. An IPv6 address without brackets counts as a host without a port.
    """
    if text.startswith("["):
        host, _, after = text[1:].partition("]")
        return host, after[1:] if after.startswith(":") else None
    host, found, port = text.partition(":")
    return (text, None) if ":" in port else (host, port if found else None)


def _host(host: str, rest: str) -> str:
    found = _ip(host)
    if rest.startswith("["):
        if "]" not in rest or not isinstance(found, IPv6Address):
            raise _wrong(f"has brackets around {host!r}, which is not an IPv6 address such as [::1]")
        if found.is_link_local and not found.scope_id:
            raise _wrong(f"names no interface for the link-local address {host}, as in [{host}%eth0]")
    elif ":" in host:
        raise _wrong("has an IPv6 address without brackets; write tcp://[::1]:5750")
    elif not host:
        raise _wrong("has no host; * means every interface")
    elif set(host) & set("/%]@") or (EVERY in host and host != EVERY):
        raise _wrong(f"has the host {host!r}, which is neither a name nor an address")
    elif found is None and host.replace(".", "").isdigit():
        raise _wrong(f"has the host {host}, which is not an IPv4 address such as 127.0.0.1")
    return host


def _port(port: str | None) -> int:
    if port is None:
        raise _wrong("has no port")
    if port == EVERY:
        return 0
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise _wrong(f"has the port {port!r}; ports are 1 to {MAX_PORT}, or * for any free one")
    return int(port)


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"expected {FORMS}: this {what}")
