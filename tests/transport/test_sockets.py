"""Sockets as all processes use them."""

import zmq

from specq.transport.sockets import bind_router, connect_dealer, drain

PATIENCE_MS = 5000


def test_a_peer_that_comes_back_under_its_identity_is_heard():
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
