"""Addresses: which can be listened on, and which can be connected to."""

from __future__ import annotations

import pytest

from specq.config.addresses import check_connect, connect_address, is_local
from specq.config.sections import BrokerConfig, ClientConfig, TargetConfig
from specq.protocol.errors import ConfigError


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:5750", "tcp://*:5750", "tcp://10.1.2.3:5750", "tcp://[::]:5750"])
def test_binds_beyond_this_machine_are_refused(bind):
    """Nothing listens beyond loopback unless it was asked for."""
    with pytest.raises(ConfigError, match="insecure"):
        BrokerConfig(bind=bind)

    with pytest.raises(ConfigError, match=r"docs/security\.md"):
        TargetConfig(bind=bind, advertise="tcp://gpu:5751")

    assert BrokerConfig(bind=bind, insecure=True).bind == bind
    assert BrokerConfig(bind=bind, keys="keys").bind == bind
    assert TargetConfig(bind=bind, keys="keys", advertise="tcp://gpu:5751").bind == bind


@pytest.mark.parametrize(
    "bind", ["tcp://127.0.0.1:1", "tcp://127.8.8.8:1", "tcp://localhost:1", "tcp://[::1]:1", "ipc:///tmp/x"]
)
def test_binds_of_this_machine_are_fine(bind):
    assert is_local(bind)
    assert BrokerConfig(bind=bind).bind == bind


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5750", "tcp://127.0.0.1", "tcp://h:99999", "tcp://h:0", "udp://h:1", "ipc://", ""]
)
def test_malformed_addresses(address):
    with pytest.raises(ConfigError, match="tcp://HOST:PORT or ipc://PATH"):
        ClientConfig(broker=address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", "tcp://*:5750", "tcp://0.0.0.0:5750"])
def test_addresses_that_cannot_be_connected_to(address):
    with pytest.raises(ConfigError, match="must name a host and a port"):
        check_connect("client.broker", address)


def test_a_wildcard_needs_an_address_to_advertise():
    with pytest.raises(ConfigError, match="set advertise"):
        TargetConfig(bind="tcp://0.0.0.0:5751", insecure=True)

    assert TargetConfig(bind="tcp://0.0.0.0:5751", insecure=True, advertise="tcp://gpu.lan:5751").insecure


def test_connect_address_of_a_wildcard_is_loopback():
    assert connect_address("tcp://*:5750") == connect_address("tcp://0.0.0.0:5750") == "tcp://127.0.0.1:5750"
    assert connect_address("tcp://[::]:5750") == "tcp://[::1]:5750"
    assert connect_address("ipc:///tmp/x") == "ipc:///tmp/x"
