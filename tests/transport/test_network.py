"""Addresses of both families with real sockets, names that resolve to both, and errors for unavailable ones."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from socket import AF_INET, AF_INET6

import pytest
import zmq

from specq.protocol import ConfigError, parse_address
from specq.transport import bind_router, connect_dealer, drain, listener, listens, why_unreachable
from specq.transport.network import has_ipv6, needs_ipv6, why_not_bound
from specq.transport.sockets import connect_again, try_send

V4, V6 = "127.0.0.1", "[::1]"
ANSWER_MS = 5000


def reaches(router: zmq.Socket[bytes], dealer: zmq.Socket[bytes]) -> bool:
    """Whether a message of the DEALER arrives."""
    dealer.send(b"x")
    return bool(router.poll(ANSWER_MS)) and [frames[-1] for frames in drain(router)] == [b"x"]


@contextmanager
def bound(context: zmq.Context[zmq.Socket[bytes]], host: str) -> Iterator[tuple[zmq.Socket[bytes], int]]:
    router, address = bind_router(context, f"tcp://{host}:*")
    with router:
        yield router, parse_address(address).port


def link_local() -> list[str]:
    """Return this machine's link-local addresses as an address has them."""
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text("ascii").splitlines()] if table.exists() else []
    found = [(bytes.fromhex(row[0]), row[-1]) for row in rows if row[0].startswith("fe80")]
    return [f"[{socket.inet_ntop(AF_INET6, address)}%{interface}]" for address, interface in found]


def test_each_form_of_a_host_accepts_the_matching_peers():
    """On a machine without IPv6, each IPv6 form raises an error that says so."""
    reached = {
        V4: (V4, "localhost"),
        "0.0.0.0": (V4, "localhost"),
        "[::ffff:127.0.0.1]": (V4,),
        "localhost": ("localhost",),
    }
    if has_ipv6():
        reached |= {V6: (V6,), "[::]": (V6, V4), "*": (V6, V4, "localhost"), **{host: (host,) for host in link_local()}}
    else:
        reached["*"] = (V4, "localhost")
        with zmq.Context() as context, pytest.raises(ConfigError, match="this machine has no IPv6"):
            bind_router(context, "tcp://[::1]:*")
        with pytest.raises(ConfigError, match="this machine has no IPv6"):
            listener("tcp://[::1]:*", 1)
    num_reached = 0
    with zmq.Context() as context:
        for host, others in reached.items():
            with bound(context, host) as (router, port):
                for other in others:
                    with connect_dealer(context, f"tcp://{other}:{port}", queue=True) as dealer:
                        assert reaches(router, dealer), (host, other)
                        num_reached += 1
                assert listens(f"tcp://{others[0]}:{port}")
            with closing(listener(f"tcp://{host}:*", 16)) as server:
                port = server.getsockname()[1]
                assert all(listens(f"tcp://{other}:{port}") for other in others), host
    assert num_reached == sum(map(len, reached.values())) >= 8


@pytest.fixture
def both(monkeypatch):
    """A name that stands for both families, IPv6 first, as localhost does on most machines."""
    real = socket.getaddrinfo

    def look_up(host, port, *args, **kwargs):
        if host != "both":
            return real(host, port, *args, **kwargs)
        return [one for literal in ("::1", V4) for one in real(literal, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.skipif(not has_ipv6(), reason="a machine without IPv6 knows one family of each name")
def test_a_name_of_both_families_is_connected_to_where_somebody_listens(both):
    for family, host in ((AF_INET, V4), (AF_INET6, "::1")):
        with socket.create_server((host, 0), family=family) as server:
            address = f"tcp://both:{server.getsockname()[1]}"
            assert needs_ipv6(parse_address(address), connects=True) == (family == AF_INET6)
            assert listens(address)
            assert why_unreachable(address) == ""
        assert not needs_ipv6(parse_address(address), connects=True)  # no peer is there yet: IPv4, as ever
        assert why_unreachable(address) == "nothing listens there"
    assert not needs_ipv6(parse_address("tcp://both:*"), connects=False)


@pytest.mark.skipif(not has_ipv6(), reason="a machine without IPv6 knows one family of each name")
def test_a_peer_that_came_by_the_other_family_is_found_later(monkeypatch, free_port):
    """ZeroMQ asks for names by itself, so the name is one that it knows, and the choice is what is looked at."""
    with zmq.Context() as context:
        port = free_port
        address = f"tcp://localhost:{port}"
        monkeypatch.setattr("specq.transport.sockets.needs_ipv6", lambda *_, **__: True)
        with connect_dealer(context, address) as dealer:
            monkeypatch.undo()
            connect_again(dealer, address)
            assert not dealer.getsockopt(zmq.IPV6)
            router, _ = bind_router(context, f"tcp://{V4}:{port}")
            with router:
                # As a worker repeats its `Hello`: the attempt that is given up may still get the first.
                assert any(
                    try_send(dealer, [b"x"]) and router.poll(100)
                    for _ in iter(lambda: dealer.poll(ANSWER_MS, zmq.POLLOUT), 0)
                )


def test_what_is_wrong_with_an_address_is_said():
    with socket.create_server((V4, 0)) as server:
        taken = f"tcp://{V4}:{server.getsockname()[1]}"
        said = {
            taken: "Address already in use; another",
            "tcp://192.0.2.77:*": "192.0.2.77 is not an address of this machine",
            "tcp://no-such-host.invalid:*": "the name no-such-host.invalid is unknown on this machine",
        }
        if has_ipv6():
            said |= {
                "tcp://[2001:db8::77]:*": "2001:db8::77 is not an address of this machine",
                "tcp://[fe80::77%figs]:*": "this machine has no interface figs",
            }
        for address, reason in said.items():
            with zmq.Context() as context, pytest.raises(ConfigError, match=reason):
                bind_router(context, address)
            with pytest.raises(ConfigError, match=reason):
                listener(address, 1)
    assert why_unreachable(taken) == "nothing listens there"
    assert why_unreachable("tcp://no-such-host.invalid:1") == "the name no-such-host.invalid is unknown on this machine"
    assert why_unreachable("ipc:///nowhere") == ""
    assert "ports below 1024 need root" in why_not_bound(parse_address("tcp://127.0.0.1:80"), errno.EACCES, "")
    assert why_not_bound(parse_address("ipc:///x"), errno.ENOENT, "") == "No such file or directory"
