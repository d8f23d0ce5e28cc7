"""The broker's front: the ROUTER to which all others connect, and whose key is behind each message.

With keys, its directory is the list of those that may connect; it is looked at again at each tick, so that keys are
added and taken away while the broker runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import zmq

from specq.config import BrokerConfig
from specq.transport import AllowList, Curve, Grant, Zap, bind_router, directory_of, drain, drain_named, own_keys

AT_ONCE = 64  # messages that are taken before verdicts get their turn
MOST_QUEUED = 2000  # messages that wait for a peer, or of it


class Front:
    """Raises ConfigError for keys that cannot be used; after `bind`, also for an address that cannot be bound."""

    def __init__(self, config: BrokerConfig) -> None:
        self._bind = config.bind
        self._own = own_keys(config.keys, "broker") if config.keys else None
        self._allowed = AllowList(directory_of(config.keys)) if config.keys else None
        self._zap: Zap | None = None

    @property
    def grants(self) -> Mapping[str, Grant] | None:
        """The keys that may connect, by name, as they are at any time; None: there are no keys."""
        return self._allowed.grants if self._allowed is not None else None

    def bind(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        """Open the sockets."""
        if self._allowed is not None:
            self._zap = Zap(context, self._allowed)
            poller.register(self._zap.socket, zmq.POLLIN)
        self.router, self.address = bind_router(context, self._bind, self._own, most_queued=MOST_QUEUED)
        poller.register(self.router, zmq.POLLIN)

    def messages(self, ready: Mapping[object, int]) -> Iterator[tuple[bytes, list[bytes], str]]:
        """Yield what has arrived: whose socket, frames, and the name of the key."""
        if self._zap is not None and self._zap.socket in ready:
            self._zap.answer()
        if self.router not in ready:
            return
        if self._allowed is None:
            for identity, *frames in drain(self.router, AT_ONCE):
                yield identity, frames, ""
        else:  # a key that is not on the list any more is called by its mark, which is nobody's name
            for user_id, (identity, *frames) in drain_named(self.router, AT_ONCE):
                yield identity, frames, self._allowed.who(user_id) or user_id

    def tick(self) -> None:
        """Look whether the list of keys has changed."""
        if self._zap is not None:
            self._zap.refresh()

    def curve_to(self, public_key: bytes) -> Curve | None:
        """Return what it takes to connect to the peer that has this key; None where there are no keys."""
        return Curve(self._own, public_key) if self._own is not None else None
