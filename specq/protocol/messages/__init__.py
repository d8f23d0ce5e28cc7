"""All messages: one frozen dataclass per message, one file per receiver.

- `base`: their base class, and the types and bounds of their fields.
- `to_broker`: from workers and from clients.
- `to_worker`: from the broker.
- `hot_path`: drafts and verdicts, in each round.
- `to_client`: from the broker.

Rules: integers, floats and short strings travel in the header, arrays in frames of their own. The first field of a
message is its key (`session_id` or `job_id`), if it has one. The key travels as the first frame, so the broker routes
without decoding the rest. For a new message, add one dataclass and one line in `MESSAGES`. `specq.protocol.wire` does
the rest.

Positions are counted from the start of the context, prompt included. `base_len` is the number of tokens before the
message's own.
"""

from specq.protocol.messages.base import Message
from specq.protocol.messages.hot_path import Activations, Draft, Drafts, SessionFailed, Verdict, Verdicts
from specq.protocol.messages.to_broker import (
    Cancel,
    FetchTokenizer,
    Follow,
    GetClock,
    GetStatus,
    GetTrace,
    Heartbeat,
    Hello,
    ListJobs,
    Submit,
    TraceEvents,
)
from specq.protocol.messages.to_client import (
    Accepted,
    Failed,
    JobInfo,
    JobList,
    JobTokens,
    Moved,
    Status,
    TokenizerChunk,
    Tokens,
    Trace,
)
from specq.protocol.messages.to_worker import (
    Ack,
    Assign,
    Brokers,
    Clock,
    Close,
    GetActivations,
    Open,
    Refused,
    Release,
    Welcome,
)
from specq.protocol.origins import COLOCATED_LANE
from specq.protocol.versions import PROTOCOL_VERSION

MESSAGES: dict[str, type[Message]] = {
    cls.TYPE: cls
    for cls in (
        Hello, Heartbeat, Submit, Follow, ListJobs, Cancel, GetStatus, GetTrace, GetClock, TraceEvents, FetchTokenizer,
        Welcome, Brokers, Refused, Clock, Open, Close, Ack, GetActivations, Assign, Release,
        Draft, Drafts, Verdict, Verdicts, Activations, SessionFailed,
        Accepted, Moved, JobInfo, JobList, Tokens, JobTokens, Failed, Status, Trace, TokenizerChunk,
    )
}  # fmt: skip

__all__ = [
    "COLOCATED_LANE",
    "MESSAGES",
    "PROTOCOL_VERSION",
    "Accepted",
    "Ack",
    "Activations",
    "Assign",
    "Brokers",
    "Cancel",
    "Clock",
    "Close",
    "Draft",
    "Drafts",
    "Failed",
    "FetchTokenizer",
    "Follow",
    "GetActivations",
    "GetClock",
    "GetStatus",
    "GetTrace",
    "Heartbeat",
    "Hello",
    "JobInfo",
    "JobList",
    "JobTokens",
    "ListJobs",
    "Message",
    "Moved",
    "Open",
    "Refused",
    "Release",
    "SessionFailed",
    "Status",
    "Submit",
    "TokenizerChunk",
    "Tokens",
    "Trace",
    "TraceEvents",
    "Verdict",
    "Verdicts",
    "Welcome",
]
