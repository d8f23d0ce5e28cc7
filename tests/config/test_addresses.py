"""Addresses: which can be listened on, and which can be connected to."""

from __future__ import annotations

import pytest

from specq.config.loading import batch_store, load
from specq.config.sections import BrokerConfig, ClientConfig, DraftConfig, ServeConfig, TargetConfig
from specq.config.values import check_bind, check_connect, connect_address
from specq.protocol.addresses import parse_address, split_addresses, split_host
from specq.protocol.errors import ConfigError
from tests.each import each

BEYOND = (
    "tcp://0.0.0.0:5750", "tcp://*:5750", "tcp://10.1.2.3:5750", "tcp://[::]:5750", "tcp://[0::0]:5750",
    "tcp://[::ffff:0.0.0.0]:5750", "tcp://[::ffff:10.1.2.3]:5750", "tcp://[fe80::1%eth0]:5750", "tcp://eth0:5750",
)  # fmt: skip


@each("bind", BEYOND)
def test_binds_beyond_this_machine_are_refused(bind):
    """Without a request, no socket listens beyond loopback."""
    with pytest.raises(ConfigError, match="insecure"):
        BrokerConfig(bind=bind)
    with pytest.raises(ConfigError, match=r"docs/security\.md"):
        TargetConfig(bind=bind, advertise="tcp://gpu:5751")
    assert BrokerConfig(bind=bind, insecure=True).bind == bind
    assert BrokerConfig(bind=bind, keys="keys").bind == bind
    assert TargetConfig(bind=bind, keys="keys", advertise="tcp://gpu:5751").bind == bind


@each(
    "bind",
    [
        *("tcp://127.0.0.1:1", "tcp://127.8.8.8:1", "tcp://localhost:1", "tcp://LocalHost:1", "tcp://[::1]:1"),
        *("tcp://[0:0::1]:1", "tcp://[::ffff:127.0.0.1]:1", "ipc:///tmp/x"),
    ],
)
def test_binds_of_this_machine_are_fine(bind):
    assert parse_address(bind).is_local
    check_bind("broker.bind", bind)
    assert BrokerConfig(bind=bind).bind == bind


WRONG = {
    "127.0.0.1:5750": "has no scheme, as in tcp://127.0.0.1:5750", "tcp://127.0.0.1": "has no port",
    "tcp://[::1]": "has no port", "tcp://[::1]5750": "has no port",
    "tcp://h:99999": "has the port '99999'; ports are 1 to 65535", "tcp://h:0": "has the port '0'",
    "tcp://h:x": "has the port 'x'", "tcp://h:5750/": "has the port '5750/'", "tcp://h:": "has the port ''",
    "udp://h:1": "begins with udp://", "http://h:1": "begins with http://", "ipc://": "has no path", "": "is empty",
    " tcp://h:1": "has spaces", "tcp://a b:1": "has spaces", "tcp://:1": "has no host; * means every interface",
    "tcp://::1:5750": "has an IPv6 address without brackets; write tcp://[::1]:5750",
    "tcp://fe80::1%eth0:5750": "has an IPv6 address without brackets",
    "tcp://[h]:1": "has brackets around 'h', which is not an IPv6 address",
    "tcp://[127.0.0.1]:1": "has brackets around '127.0.0.1'", "tcp://[::1:5750": "has brackets around",
    "tcp://[1::2::3]:1": "has brackets around '1::2::3'",
    "tcp://[fe80::1]:1": "names no interface for the link-local address fe80::1, as in [fe80::1%eth0]",
    "tcp://256.1.1.1:1": "has the host 256.1.1.1, which is not an IPv4 address",
    "tcp://1.2.3:1": "has the host 1.2.3, which is not an IPv4 address",
    "tcp://x/y:1": "has the host 'x/y', which is neither a name",
    "tcp://me@h:1": "has the host 'me@h', which is neither a name",
    "tcp://*.h:1": "has the host '*.h', which is neither a name",
}  # fmt: skip


@each(("address", "said"), WRONG.items())
def test_what_is_wrong_with_an_address_is_said_with_its_key(address, said):
    for section, key in ((ClientConfig, "broker"), (BrokerConfig, "bind")):
        with pytest.raises(ConfigError) as refusal:
            section(**{key: address})
        named = f"{section.__name__.removesuffix('Config').lower()}.{key}"
        expected = f"{named} is {address!r}; expected tcp://HOST:PORT or ipc://PATH: this {said}"
        assert str(refusal.value).startswith(expected)


def test_every_form_is_taken_apart_and_put_together():
    hosts = (
        "h", "a-b.c_d.example", "eth0.100", "127.0.0.1", "::1", "fe80::1%eth0", "2001:db8::1", "::ffff:1.2.3.4",
        "bücher.example",
    )  # fmt: skip
    for host in hosts:
        written = f"[{host}]" if ":" in host else host
        for port in (1, 5750, 65_535):
            found = parse_address(f"tcp://{written}:{port}")
            assert (found.host, found.port, found.at(host)) == (host, port, found.text)
            assert split_host(f"{written}:{port}") == (host, str(port))
            assert connect_address(found.text) == found.text
        assert split_host(written) == (host, None)
        assert parse_address(f"tcp://{written}:*").is_any_port
    assert split_host("::1") == ("::1", None)  # a Host header of a sloppy client


def test_workers_may_have_several_brokers_and_the_wrong_address_is_named():
    assert split_addresses("tcp://a:1,tcp://b:2, tcp://a:1") == ("tcp://a:1", "tcp://b:2")
    for section, name in ((TargetConfig, "target"), (DraftConfig, "draft")):
        section(broker="tcp://a:1,ipc:///run/b, tcp://[::1]:3")
        for wrong, said in (("tcp://b", "has no port"), ("", "is empty"), ("tcp://b:1 tcp://c:1", "has spaces")):
            with pytest.raises(ConfigError, match=f"{name}.broker is '{wrong}'; expected .*: this {said}"):
                section(broker=f"tcp://a:1,{wrong},tcp://c:1")
        with pytest.raises(ConfigError, match=rf"{name}.broker is tcp://\*:2; expected a host and a port"):
            section(broker="tcp://a:1,tcp://*:2")


@each("address", ["tcp://127.0.0.1:*", "tcp://*:5750", "tcp://0.0.0.0:5750"])
def test_addresses_that_cannot_be_connected_to(address):
    with pytest.raises(ConfigError, match="expected a host and a port"):
        check_connect("client.broker", address)


def test_several_brokers_are_separated_by_commas(monkeypatch):
    """The message names the wrong one."""
    both = "tcp://a:1, tcp://b:2,tcp://a:1"
    assert ServeConfig(broker=both).broker == both
    assert split_addresses(both) == ("tcp://a:1", "tcp://b:2")
    assert batch_store(ServeConfig(broker=both)) == batch_store(ServeConfig(broker="tcp://a:1"))
    for wrong, said in (("tcp://a:1,tcp://b", "'tcp://b'; expected"), ("tcp://a:1,", "''; expected")):
        with pytest.raises(ConfigError, match=rf"client\.broker is {said}"):
            ClientConfig(broker=wrong)
        monkeypatch.setenv("SPECQ_BROKER", wrong)
        with pytest.raises(ConfigError, match=f"SPECQ_BROKER is {said}"):
            load(None)


def test_a_wildcard_needs_an_address_to_advertise():
    with pytest.raises(ConfigError, match=r"set target\.advertise"):
        TargetConfig(bind="tcp://0.0.0.0:5751", insecure=True)

    assert TargetConfig(bind="tcp://0.0.0.0:5751", insecure=True, advertise="tcp://gpu.lan:5751").insecure


def test_a_verifier_without_an_address_advertises_none():
    """And listening beyond this machine is not what it asks for, so it needs no keys."""
    assert TargetConfig(bind="none").bind == "none"
    with pytest.raises(ConfigError, match="set only one of them"):
        TargetConfig(bind="none", advertise="tcp://gpu.lan:5751")


def test_connect_address_of_a_wildcard_is_loopback():
    assert connect_address("tcp://*:5750") == connect_address("tcp://0.0.0.0:5750") == "tcp://127.0.0.1:5750"
    assert connect_address("tcp://[::]:5750") == "tcp://[::1]:5750"
    assert connect_address("ipc:///tmp/x") == "ipc:///tmp/x"
