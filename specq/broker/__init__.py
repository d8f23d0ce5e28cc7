"""The broker: routes drafts and verdicts, places sessions on workers, and keeps every job's transcript.

    core                  messages in, effects out: the broker without its sockets
    gate                  what is let in: roles, limits, revoked keys
    jobs/                 jobs: taken in, committed, sent to their readers
    workers/              verifiers and drafters: registered, given sessions, lost
    state/                what all of these work on; validation: what must hold of it
    front, journal_link   the sockets of clients and workers; the journal's two threads

In: frames of clients, drafters and verifiers. Out: effects: frames, records for the journal. To handle a message: one
line in `Broker._front` or `Broker._back`.

Rules: the broker moves integers only; no text, no model, no torch. Time is an argument. Imports go one way: core, gate
and jobs, workers, state.
"""

from specq.broker.core import Broker
from specq.broker.front import Front
from specq.broker.journal_link import JournalLink
from specq.broker.state.lifecycle import TRANSITIONS, diagram
from specq.broker.state.memory import Connect, Disconnect, Effect, Find, FindFinished, Send, Write

__all__ = [
    "TRANSITIONS",
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
