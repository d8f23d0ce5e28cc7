"""Drafted tokens on their way to worker processes that have launched the step already, but for the model: they wait for
these tokens alone.

A step whose drafts the host has not read (`specq.verification.DeviceTokens`) is told of with the places of its tokens,
so that workers make all else ready meanwhile. Each worker has a socket of its own, on this machine, in a folder that
nobody else may read, and that is gone once all are connected.
"""

from __future__ import annotations

import os
from contextlib import suppress
from tempfile import TemporaryDirectory
from time import monotonic

import numpy as np
import zmq

from specq.protocol import EngineError, Int32Array

NUMBER_BYTES = 8
HELLO = 0  # the number of what is sent first, to see that the others will arrive
LOOK_MS = 500  # between looks whether the host is there


class TokenSender:
    """The host's end: `addresses` of the workers', which `connect` connects to once these listen. Tokens have the
    number of their step."""

    def __init__(self, num_workers: int) -> None:
        """Raises EngineError where the names of files for temporary ones are too long for sockets."""
        self._folder = TemporaryDirectory(prefix="specq-")
        self._context = zmq.Context(io_threads=1)
        self._sockets: list[zmq.Socket[bytes]] = []
        self.addresses = [f"ipc://{self._folder.name}/{rank}" for rank in range(num_workers)]
        self._newest = HELLO
        if len(self.addresses[-1]) - len("ipc://") > zmq.IPC_PATH_MAX_LEN:
            self.close()
            raise EngineError(f"{self._folder.name} is too long a path for sockets; set TMPDIR to a shorter path")

    def connect(self) -> None:
        """Connect to the workers, and greet them; each shall `take` HELLO."""
        for address in self.addresses:
            self._sockets.append(self._context.socket(zmq.PUSH))
            self._sockets[-1].connect(address)
        self.send(HELLO, np.zeros(0, np.int32))

    def hide(self) -> None:
        """Let the folder go: all are connected."""
        self._folder.cleanup()

    def next_number(self) -> int:
        """Return the number of the next step, HELLO + 1 or more."""
        self._newest += 1
        return self._newest

    def send(self, number: int, token_ids: Int32Array) -> None:
        """Send the tokens i32[n] of the step with this number, -1 where there is none; to whom is gone, nothing, which
        is found out when the step is collected."""
        message = number.to_bytes(NUMBER_BYTES, "little") + token_ids.astype("<i4").tobytes()
        for socket in self._sockets:
            with suppress(zmq.Again):
                socket.send(message, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets; may be called again."""
        self._context.destroy(linger=0)
        self._folder.cleanup()


class TokenReceiver:
    """A worker's end."""

    def __init__(self, address: str, patience_s: float) -> None:
        """`patience_s`: how long a step waits at most."""
        self._patience_s, self._host = patience_s, os.getppid()
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._socket.bind(address)

    def take(self, number: int) -> Int32Array:
        """Wait for the tokens i32[n] of the step with this number; those of earlier ones, which failed, are dropped.
        Raises EngineError if they do not come, or the process that started this one is gone."""
        end = monotonic() + self._patience_s
        while (left_s := end - monotonic()) > 0 and os.getppid() == self._host:
            if not self._socket.poll(min(LOOK_MS, int(1000 * left_s) + 1)):
                continue
            message = self._socket.recv()
            if int.from_bytes(message[:NUMBER_BYTES], "little") >= number:
                return np.frombuffer(message, "<i4", offset=NUMBER_BYTES).astype(np.int32)
        raise EngineError("the draft tokens of a step did not arrive")

    def close(self) -> None:
        """Close the socket; a process that ends need not."""
        self._context.destroy(linger=0)
