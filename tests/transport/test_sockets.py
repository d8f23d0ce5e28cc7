"""Sockets as all processes use them."""

import pytest
import zmq

from specq.protocol import ConfigError
from specq.transport.sockets import bind_router, connect_dealer, drain

PATIENCE_MS = 60_000


def test_a_peer_that_reconnects_with_its_identity_is_received():
    """Its link may have died without a word, so that the router still has the old connection."""
    with zmq.Context() as context:
        router, address = bind_router(context, "tcp://127.0.0.1:*")
        before = connect_dealer(context, address, queue=True)
        before.send(b"before")
        assert router.poll(PATIENCE_MS)
        (identity, _), *_ = drain(router)
        after = context.socket(zmq.DEALER)
        after.setsockopt(zmq.IDENTITY, identity)
        after.connect(address)
        after.send(b"after")
        assert router.poll(PATIENCE_MS), "the second connection is not heard"
        assert list(drain(router)) == [[identity, b"after"]]
        router.send_multipart([identity, b"hello"])
        assert after.poll(PATIENCE_MS)
        for socket in (router, before, after):
            socket.close(0)


def test_an_address_that_is_taken_is_named_once_and_the_way_out_too():
    with zmq.Context() as context:
        router, address = bind_router(context, "tcp://127.0.0.1:*")
        said = f"cannot bind {address}: Address already in use; another broker or worker may use it; choose"
        try:
            with pytest.raises(ConfigError) as refused:
                bind_router(context, address)
        finally:
            router.close(0)
    assert str(refused.value).startswith(said)
