"""Drafted tokens on their way to worker processes that have launched the step already, but for the model: they wait for these tokens alone.

A step whose drafts the host has not read (`specq.verification.DeviceTokens`) is told of with the places of its tokens, so that workers make all else
ready meanwhile. Each worker has a socket of its own, on this machine, in a folder that nobody else may read.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory

import numpy as np
import zmq

from specq.protocol import EngineError, Int32Array

NUMBER_BYTES = 8


class TokenSender:
    """The host's end. Tokens have the number of their step."""

    def __init__(self, num_workers: int) -> None:
        self._folder = TemporaryDirectory(prefix="specq-")
        self._context = zmq.Context(io_threads=1)
        self.addresses = [f"ipc://{self._folder.name}/{rank}" for rank in range(num_workers)]
        self._sockets = []
        for address in self.addresses:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            self._sockets.append(socket)
        self._newest = 0

    def next_number(self) -> int:
        """Return the number of the next step, 1 or more."""
        self._newest += 1
        return self._newest

    def send(self, number: int, token_ids: Int32Array) -> None:
        """Send the tokens i32[n] of the step with this number, -1 where there is none."""
        for socket in self._sockets:
            socket.send(number.to_bytes(NUMBER_BYTES, "little") + token_ids.astype("<i4").tobytes())

    def close(self) -> None:
        """Close the sockets; may be called again."""
        self._context.destroy(linger=0)
        self._folder.cleanup()


class TokenReceiver:
    """A worker's end."""

    def __init__(self, address: str, patience_s: float) -> None:
        """`patience_s`: how long a step waits at most."""
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, int(patience_s * 1000))
        self._socket.connect(address)

    def take(self, number: int) -> Int32Array:
        """Wait for the tokens i32[n] of the step with this number; those of earlier ones, which failed, are dropped. Raises EngineError if they do not
        come."""
        while True:
            try:
                message = self._socket.recv()
            except zmq.Again as error:
                raise EngineError("the drafted tokens of a step did not come") from error
            if int.from_bytes(message[:NUMBER_BYTES], "little") >= number:
                return np.frombuffer(message, "<i4", offset=NUMBER_BYTES).astype(np.int32)

    def close(self) -> None:
        """Close the socket; a process that ends need not."""
        self._context.destroy(linger=0)
