"""The broker: routes drafts and verdicts, places sessions on workers, and keeps every job's transcript.

- `core`: messages in, effects out. It is the broker without its sockets.
- `gate`: decides what the broker admits. It checks roles, limits and revoked keys.
- `jobs/`: admits jobs, commits their tokens and sends these to the readers.
- `workers/`: registers verifiers and drafters, gives them sessions, and notices their loss.
- `state/`: the data that all components share. `validation` checks its invariants.
- `links`: the sockets of clients and workers, and the two threads of the journal.

Input: frames of clients, drafters and verifiers. Output: effects, which are frames and records for the journal.
To handle a new message, add one line in `Broker._front` or `Broker._back`.

Rules: the broker moves integers only. It has no text, no model and no torch. Time is an argument.
Imports go one way: core, gate and jobs, workers, state.
"""

from specq.broker.core import Broker
from specq.broker.links import Front, JournalLink
from specq.broker.state.job import diagram
from specq.broker.state.memory import Connect, Disconnect, Effect, Find, FindFinished, Send, Write

__all__ = [
    "Broker",
    "Connect",
    "Disconnect",
    "Effect",
    "Find",
    "FindFinished",
    "Front",
    "JournalLink",
    "Send",
    "Write",
    "diagram",
]
