"""Who may connect: libzmq asks this handler before it accepts a CURVE connection (ZAP, rfc.zeromq.org/27).

The handler is one more socket in a process's Poller loop; there is no thread. Its answer for a key
(`AllowList.user_id`) becomes the `User-Id` of every message of that connection (`specq.transport.sockets.drain_named`).
libzmq asks once for each connection, so the receiver of a message asks `AllowList.who` whether the key still is on the
list.

Rule: make the handler before a socket is bound; a CURVE socket without it admits nobody.
"""

from __future__ import annotations

import structlog
import zmq
from zmq.utils import z85

from specq.protocol import ConfigError
from specq.transport.keys import AllowList

log = structlog.get_logger(__name__)

ENDPOINT = "inproc://zeromq.zap.01"  # fixed by the protocol
_VERSION = b"1.0"


class Zap:
    """The one handler of a context; `socket` is readable when there are requests to `answer`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: AllowList) -> None:
        self.allowed = allowed
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ENDPOINT)

    def refresh(self) -> None:
        """Read the allow-list again if it has changed; a malformed one changes nothing."""
        try:
            self.allowed.refresh()
        except ConfigError as error:
            log.warning("allow_list_unreadable", reason=str(error))

    def answer(self) -> None:
        """Admit or refuse the keys of the waiting requests."""
        self.refresh()
        while self.socket.poll(0, zmq.POLLIN):
            request = self.socket.recv_multipart()
            request_id, user_id = request[1] if len(request) > 1 else b"", self._user_id(request)
            status = [b"200", b"OK", user_id.encode()] if user_id else [b"400", b"unknown key", b""]
            self.socket.send_multipart([_VERSION, request_id, *status, b""])

    def _user_id(self, request: list[bytes]) -> str:
        """Return the mark of a request's key, "" if it is not on the list; frames: version, id, domain, address,
        identity, mechanism, public key."""
        if len(request) != 7 or request[0] != _VERSION or request[5] != b"CURVE" or len(request[6]) != 32:
            return ""
        user_id = self.allowed.user_id(z85.encode(request[6]))
        if not user_id:
            log.warning("key_refused", address=request[3].decode("ascii", "replace"))
        return user_id
