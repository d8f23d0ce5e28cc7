"""The client: prompts in, text out, over one socket to a broker.

core      the protocol: messages in, events out; no socket, no clock
    events    what it tells
link      the I/O thread that drives it
    pending, stops  what waits for its answer, and the jobs that shall stop
request   what the user asks for, checked at the edge
    batch     several prompts in one call
result    pieces and results
sync, aio the two faces: `Client` and `AsyncClient`
"""

from specq.client.aio import AsyncClient, AsyncJob
from specq.client.result import Piece, Result
from specq.client.sync import Client, Job

__all__ = ["AsyncClient", "AsyncJob", "Client", "Job", "Piece", "Result"]
