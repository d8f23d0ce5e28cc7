"""Transport: ZeroMQ sockets, the keys that protect them, and the loops and links around them.

- `sockets`: bounded, non-blocking sockets, admission of peers, signals and timers, for every process.
- `network`: the meaning of addresses on this machine, and their errors.
- `keys`: CURVE keys, and their roles.
- `broker_links`: a worker's registration and heartbeats, with each broker over its own `broker_link`.

Input: addresses, keys, frames. Output: frames. This package does not know jobs.
"""

from specq.transport.broker_links import BrokerLinks, new_incarnation
from specq.transport.keys import (
    CLIENT_ROLES,
    ROLES,
    AllowList,
    Curve,
    Grant,
    curve_to_broker,
    directory_of,
    keys_of_gateway,
    make_keys,
    own_keys,
)
from specq.transport.network import listener, listens, why_unreachable
from specq.transport.sockets import (
    Beat,
    Stop,
    Zap,
    bind_router,
    broker_identity,
    broker_in,
    calm_collector,
    connect_again,
    connect_dealer,
    drain,
    drain_named,
    try_send,
)

__all__ = [
    "CLIENT_ROLES",
    "ROLES",
    "AllowList",
    "Beat",
    "BrokerLinks",
    "Curve",
    "Grant",
    "Stop",
    "Zap",
    "bind_router",
    "broker_identity",
    "broker_in",
    "calm_collector",
    "connect_again",
    "connect_dealer",
    "curve_to_broker",
    "directory_of",
    "drain",
    "drain_named",
    "keys_of_gateway",
    "listener",
    "listens",
    "make_keys",
    "new_incarnation",
    "own_keys",
    "try_send",
    "why_unreachable",
]
