"""The broker's front: the ROUTER for clients and workers, and the key behind each message.

With keys, a directory lists the peers that may connect. The broker reads it again at each tick. So keys can be added
and removed while it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import zmq

from specq.config import BrokerConfig
from specq.transport import AllowList, Curve, Grant, Zap, bind_router, directory_of, drain, drain_named, own_keys

AT_ONCE = 64  # messages taken before verdicts get their turn
MOST_QUEUED = 2000  # messages queued for a peer or from it


class Front:
    """The front's sockets and allowed keys.

    Raises ConfigError for keys that cannot be used, and in `bind` for an address that cannot be bound.
    """

    def __init__(self, config: BrokerConfig) -> None:
        self._bind = config.bind
        self._own = own_keys(config.keys, "broker") if config.keys else None
        self._allowed = AllowList(directory_of(config.keys)) if config.keys else None
        self._zap: Zap | None = None

    @property
    def grants(self) -> Mapping[str, Grant] | None:
        """Return the keys that may connect now, by name. None: keys are not in use."""
        return self._allowed.grants if self._allowed is not None else None

    def bind(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        """Open the sockets."""
        if self._allowed is not None:
            self._zap = Zap(context, self._allowed)
            poller.register(self._zap.socket, zmq.POLLIN)
        self.router, self.address = bind_router(context, self._bind, self._own, most_queued=MOST_QUEUED)
        poller.register(self.router, zmq.POLLIN)

    def messages(self, ready: Mapping[object, int]) -> Iterator[tuple[bytes, list[bytes], str]]:
        """Yield each message that has arrived: identity of the socket, frames, name of the key."""
        if self._zap is not None and self._zap.socket in ready:
            self._zap.answer()
        if self.router not in ready:
            return
        if self._allowed is None:
            for identity, *frames in drain(self.router, AT_ONCE):
                yield identity, frames, ""
        else:  # a key that was removed from the list goes by its mark, which never is a key's name
            for user_id, (identity, *frames) in drain_named(self.router, AT_ONCE):
                yield identity, frames, self._allowed.who(user_id) or user_id

    def tick(self) -> None:
        """Read the list of keys again if it has changed."""
        if self._zap is not None:
            self._zap.refresh()

    def curve_to(self, public_key: bytes) -> Curve | None:
        """Return the keys for a connection to the peer with this key. None: keys are not in use."""
        return Curve(self._own, public_key) if self._own is not None else None
