"""What a message takes of a core at either end: the socket's own threads and the system included."""

from __future__ import annotations

import time

import zmq

from specq.bench.stubs import draft_frames

COUNT = 2000


def end_us(count: int = COUNT) -> float:
    """Return microseconds of one end of a message: half of what this process takes to send itself one over TCP.

    It must stay on one core, so that nothing of it is done meanwhile on another.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as near, context.socket(zmq.DEALER) as far:
        port, frames = near.bind_to_random_port("tcp://127.0.0.1"), draft_frames(1, 1, 0)
        far.connect(f"tcp://127.0.0.1:{port}")
        far.send_multipart(frames)
        near.recv_multipart()
        began = time.perf_counter()
        for _ in range(count):
            far.send_multipart(frames)
            near.poll()
            near.recv_multipart()
        return 1e6 * (time.perf_counter() - began) / count / 2
