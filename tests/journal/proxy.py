"""A proxy of a TCP server, which loses what passes it when a test says so."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Listens on a port of this machine. `loses`: "", or "requests" or "answers", which ends the connection."""

    def __init__(self, port: int) -> None:
        self.loses = ""
        self.num_lost = 0
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """End all connections."""
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                for source, sink, what in ((client, server, "requests"), (server, client, "answers")):
                    threading.Thread(target=self._pass, args=(source, sink, what), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, what: str) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.loses == what:
                    self.loses = ""
                    self.num_lost += 1
                    break
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
