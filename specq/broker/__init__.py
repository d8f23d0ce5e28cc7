"""The broker: routes drafts and verdicts, places sessions on workers, and keeps every job's transcript.

    core                  messages in, effects out: the broker without its sockets
    state                 what its components share; validation: what must hold of it
    effects               what they want done: frames to send, sockets to connect, records to write
    jobs/                 jobs: taken in, kept in order, sent to their readers
    workers/              verifiers and drafters: registered, given sessions, lost
    admission/            what is let in: roles, limits, revoked keys
    front, journal_link   the sockets of clients and workers; the journal's two threads

In: frames of clients, drafters and verifiers. Out: frames, records for the journal. To handle a message: one line in
`Broker._front` or `Broker._back`.

Rule: the broker moves integers only; no text, no model, no torch. Time is an argument.
"""

from specq.broker.core import Broker
from specq.broker.effects import Connect, Disconnect, Effect, Send
from specq.broker.front import Front
from specq.broker.jobs.lifecycle import TRANSITIONS, diagram
from specq.broker.journal_link import JournalLink

__all__ = ["TRANSITIONS", "Broker", "Connect", "Disconnect", "Effect", "Front", "JournalLink", "Send", "diagram"]
