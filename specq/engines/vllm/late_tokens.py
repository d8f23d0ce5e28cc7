"""Send draft tokens to worker processes that have prepared everything else of the step.

A step may have drafts that the host has not read (`specq.verification.DeviceTokens`). The workers then first receive
the places of its tokens. So they prepare everything else meanwhile. Each worker has its own socket on this machine, in
a private folder. The folder is removed once all are connected.
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
HELLO = 0  # the number of the first message, which checks that later ones will arrive
LOOK_MS = 500  # interval between checks that the host process exists


class TokenSender:
    """The host's end. Each message of tokens carries the number of its step.

    `connect` connects to the workers' `addresses` once the workers listen.
    """

    def __init__(self, num_workers: int) -> None:
        """Prepare the addresses. Raises EngineError if the temporary folder's name is too long for a socket."""
        self._folder = TemporaryDirectory(prefix="specq-")
        self._context = zmq.Context(io_threads=1)
        self._sockets: list[zmq.Socket[bytes]] = []
        self.addresses = [f"ipc://{self._folder.name}/{rank}" for rank in range(num_workers)]
        self._newest = HELLO
        if len(self.addresses[-1]) - len("ipc://") > zmq.IPC_PATH_MAX_LEN:
            self.close()
            raise EngineError(f"{self._folder.name} is too long a path for sockets; set TMPDIR to a shorter path")

    def connect(self) -> None:
        """Connect to the workers and send HELLO, which each must `take`."""
        for address in self.addresses:
            self._sockets.append(self._context.socket(zmq.PUSH))
            self._sockets[-1].connect(address)
        self.send(HELLO, np.zeros(0, np.int32))

    def hide(self) -> None:
        """Remove the folder, once all are connected."""
        self._folder.cleanup()

    def next_number(self) -> int:
        """Return the number of the next step, HELLO + 1 or more."""
        self._newest += 1
        return self._newest

    def send(self, number: int, token_ids: Int32Array) -> None:
        """Send the tokens i32[n] of the step with this number, -1 where there is none.

        A message to a worker that is gone is dropped. The error appears when the step is collected.
        """
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
        """Listen. `patience_s`: the longest wait of a step, in seconds."""
        self._patience_s, self._host = patience_s, os.getppid()
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PULL)
        self._socket.bind(address)

    def take(self, number: int) -> Int32Array:
        """Wait for the tokens i32[n] of the step with this number.

        Tokens of earlier steps, which failed, are dropped. Raises EngineError if the tokens do not arrive, or if the
        parent process is gone.
        """
        end = monotonic() + self._patience_s
        while (left_s := end - monotonic()) > 0 and os.getppid() == self._host:
            if not self._socket.poll(min(LOOK_MS, int(1000 * left_s) + 1)):
                continue
            message = self._socket.recv()
            if int.from_bytes(message[:NUMBER_BYTES], "little") >= number:
                return np.frombuffer(message, "<i4", offset=NUMBER_BYTES).astype(np.int32)
        raise EngineError("the draft tokens of a step did not arrive")

    def close(self) -> None:
        """Close the socket. Not needed at process exit."""
        self._context.destroy(linger=0)
