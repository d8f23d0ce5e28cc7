"""All messages, one frozen dataclass each, filed by receiver.

Rules: integers, floats and short strings travel in the header, arrays in frames of their own; the first field is the
message's key (`session_id` or `job_id`) where it has one, and travels as the first frame, so that the broker routes
without decoding more. A new message is one dataclass here and one line in `MESSAGES`; `specq.protocol.wire` does the rest.

Each names its bound, of `specq.protocol.bounds`: wire and table together refuse what is outside.

Positions are counted from the start of the context, prompt included: `base_len` tokens come before the message's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from specq.protocol import bounds
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.types import Float16Array, Float32Array, Int32Array, ModelInfo, UInt16Array

UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

PROTOCOL_VERSION = 2
LOOKUP_LANE = 255  # of what a verifier looks up itself
COLOCATED_LANE = 254  # of the drafter in its own process; those of other processes have the lanes below

# Array annotations carry the dtype on the wire (little-endian), the number of dimensions and the bound of the elements.
Tokens32 = Annotated[Int32Array, "<i4", 1, bounds.TOKEN_IDS]
NodeTokens = Annotated[Int32Array, "<i4", 1, bounds.NODE_TOKENS]
NodeIds = Annotated[Int32Array, "<i4", 1, bounds.NODE_NAMES]
NodeParents = Annotated[Int32Array, "<i4", 1, bounds.NODE_PARENTS]
NodeLaws = Annotated[Int32Array, "<i4", 1, bounds.NODE_DISTRIBUTIONS]
NodeScores = Annotated[Float16Array, "<f2", 1, bounds.NODE_SCORES]
NodeFlags = Annotated[UInt8Array, "<u1", 1, bounds.NODE_FLAGS]
NodeLanes = Annotated[UInt8Array, "<u1", 1, bounds.NODE_LANES]
References = Annotated[Int32Array, "<i4", 1, bounds.REFERENCES]
Weights = Annotated[UInt16Array, "<u2", 1, bounds.WEIGHTS]
Ids = Annotated[Int64Array, "<i8", 1, bounds.IDS]
Lengths = Annotated[Int32Array, "<i4", 1, bounds.LENGTHS]
Flags = Annotated[UInt8Array, "<u1", 1, bounds.FLAGS]
Bytes = Annotated[UInt8Array, "<u1", 1, bounds.BYTES]
Logprobs32 = Annotated[Float32Array, "<f4", 1, bounds.LOGPROBS]

Id = Annotated[int, bounds.ID]
Count = Annotated[int, bounds.COUNT]
Lane = Annotated[int, bounds.LANE]
Name = Annotated[str, bounds.NAME]
Reason = Annotated[str, bounds.REASON]


def _empty(dtype: str) -> Any:
    return field(default_factory=lambda: np.zeros(0, dtype))


def _equal(left: Any, right: Any) -> bool:
    return bool(np.array_equal(left, right) if isinstance(left, np.ndarray) else left == right)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """Base of all messages; `TYPE` is the name in the header. Messages are equal if all their fields and arrays are."""

    TYPE: ClassVar[str] = ""
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


# --- to the broker, from any worker -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hello(Message):
    """A worker makes itself known; sent again after each reconnection.

    role         "target" or "draft"
    incarnation  random for each start of a process
    endpoint     of a verifier: where the broker's DEALER shall connect; max_sessions: how many it takes at once
    """

    TYPE: ClassVar[str] = "hello"
    role: Annotated[str, bounds.ROLE]
    name: Name
    incarnation: Id
    model: ModelInfo
    endpoint: Annotated[str, bounds.ENDPOINT] = ""
    max_sessions: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heartbeat(Message):
    """State of a worker, and of every session that it holds, so that whatever was lost is noticed.

    state   "loading", "ready", "draining", "leaving" or "failed" (the last beat, the second of one that an error ends);
            load: sessions held
    steps   a counter that a hung worker cannot raise; pending: how many sessions could take part in a step now
    step_ms how long its longest step may take, during which it is silent
    session_ids i64[s], epochs i64[s], lengths i32[s]: committed length that the worker knows of
    """

    TYPE: ClassVar[str] = "heartbeat"
    incarnation: Id
    state: Annotated[str, bounds.STATE]
    load: Count = 0
    steps: Annotated[int, bounds.STEPS] = 0
    pending: Count = 0
    step_ms: Annotated[int, bounds.STEP_MS] = 0
    free_slots: Count = 0
    session_ids: Ids = _empty("<i8")
    epochs: Ids = _empty("<i8")
    lengths: Lengths = _empty("<i4")


# --- to the broker, from clients ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submit(Message):
    """A job. Submitting the same id again attaches to it: `have` tokens are not sent again.

    model        the name of a served model, or "" for the only one; prompt_ids i32[n]; speculation: how to draft for it
    priority     jobs of a higher one are placed first; those of one priority, client by client in turn
    deadline_ms  the job fails if it has not ended so long after it was first submitted; 0: never
    label        the client's own name for the job, at most 1000 characters; nobody else reads it
    """

    TYPE: ClassVar[str] = "submit"
    job_id: Id
    params: SamplingParams
    speculation: Speculation = Speculation()  # noqa: RUF009 - frozen
    model: Name = ""
    have: Count = 0
    priority: Annotated[int, bounds.PRIORITY] = 0
    deadline_ms: Annotated[int, bounds.DEADLINE_MS] = 0
    label: Annotated[str, bounds.LABEL] = ""
    prompt_ids: Tokens32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Follow(Message):
    """Asks for a job by its id: a `JobInfo`, then its tokens beyond the first `have` as they come."""

    TYPE: ClassVar[str] = "follow"
    job_id: Id
    have: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListJobs(Message):
    """Asks for a `JobList`: the jobs that wait and run, and `limit` of those that ended, the last `skip` left out."""

    TYPE: ClassVar[str] = "list_jobs"
    limit: Count = 100
    skip: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cancel(Message):
    """Stops a job; what is committed stays."""

    TYPE: ClassVar[str] = "cancel"
    job_id: Id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GetStatus(Message):
    """Asks for a `Status`."""

    TYPE: ClassVar[str] = "get_status"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchTokenizer(Message):
    """Asks for the tokenizer of a served model ("" for the only one); also broker to verifier."""

    TYPE: ClassVar[str] = "fetch_tokenizer"
    model: Name = ""


# --- to a worker, from the broker ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Welcome(Message):
    """The worker is registered and shall send a `Heartbeat` at least this often."""

    TYPE: ClassVar[str] = "welcome"
    heartbeat_ms: Annotated[int, bounds.HEARTBEAT_MS]


def _cut_reason(message: Refused | SessionFailed | Failed) -> None:
    """Cut a reason that is too long, so that whoever waits for it gets it."""
    if len(message.reason) > bounds.REASON.most:
        object.__setattr__(message, "reason", message.reason[: bounds.REASON.most - 3] + "...")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Refused(Message):
    """The worker cannot be used, and why; `fatal` means that trying again is useless."""

    TYPE: ClassVar[str] = "refused"
    reason: Reason
    fatal: bool = True

    def __post_init__(self) -> None:
        _cut_reason(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Open(Message):
    """To a verifier: continue this context. `tokens_left` of max_tokens remain; penalties need `prompt_len`."""

    TYPE: ClassVar[str] = "open"
    session_id: Id
    epoch: Id
    prompt_len: Count
    tokens_left: Count
    params: SamplingParams
    speculation: Speculation = Speculation()  # noqa: RUF009 - frozen
    token_ids: Tokens32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Close(Message):
    """To a verifier: forget the session."""

    TYPE: ClassVar[str] = "close"
    session_id: Id
    epoch: Id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ack(Message):
    """To a verifier: the journal holds `length` tokens; with `resend`, send what lies beyond them again."""

    TYPE: ClassVar[str] = "ack"
    session_id: Id
    epoch: Id
    length: Count
    resend: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Assign(Message):
    """To a drafter: draft for this session in this lane."""

    TYPE: ClassVar[str] = "assign"
    session_id: Id
    epoch: Id
    lane: Lane
    prompt_len: Count
    params: SamplingParams
    speculation: Speculation = Speculation()  # noqa: RUF009 - frozen
    token_ids: Tokens32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Release(Message):
    """To a drafter: stop drafting for the session."""

    TYPE: ClassVar[str] = "release"
    session_id: Id
    epoch: Id


# --- hot: drafter -> broker -> verifier -> broker -> drafters -----------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draft(Message):
    """Nodes for a session's tree, parents before children.

    lane        the drafter's lane; node ids are scoped to (epoch, lane)
    base_len    the committed length that a parent of -1 means
    first_id    node i has the id first_id + i
    token_ids i32[n], parent_ids i32[n] (node ids, -1: at base_len), scores f16[n] (log-probability given the parent)
    q_ids i32[g * q_size], q_weights u16[g * q_size], q_rows i32[n]   under `probabilistic`, what the nodes were sampled
                from: see `specq.protocol.types.DraftLaws`; q_size 0: all are point masses
    """

    TYPE: ClassVar[str] = "draft"
    session_id: Id
    epoch: Id
    lane: Lane
    base_len: Count
    first_id: Count
    q_size: Count = 0
    token_ids: NodeTokens
    parent_ids: NodeParents
    scores: NodeScores
    q_ids: References = _empty("<i4")
    q_weights: Weights = _empty("<u2")
    q_rows: NodeLaws = _empty("<i4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Verdict(Message):
    """What a verifier committed to a session in one round.

    base_len    committed length before; finish: a finish reason or ""
    worth       in thousandths: how likely a node must be to be worth verifying; above 1000, none is
    seen        (lane, newest node id that the verifier has seen of it, lane, ...)
    us          (the step's time, the time that its oldest verified node had waited for it), microseconds
    stats       with the last verdict: what only the verifier counts (see `specq.protocol.session_stats.SessionStats`)
    token_ids i32[m]  accepted path, then the correction or bonus
    node_ids i32[k]   the nodes verified; mask u8[k]: 1 = accepted
    node_lanes u8[k]  the lane of each; empty where all are of the one lane in `seen`
    logprobs f32[m], top_ids i32[m * n], top_logprobs f32[m * n]   if asked for, as in `specq.protocol.types.Logprobs`
    """

    TYPE: ClassVar[str] = "verdict"
    session_id: Id
    epoch: Id
    base_len: Count
    finish: Annotated[str, bounds.VERDICT_FINISH] = ""
    min_accept_prob: Annotated[int, bounds.MIN_ACCEPT_PROB] = 0
    seen: Annotated[tuple[int, ...], bounds.SEEN] = ()
    us: Annotated[tuple[int, ...], bounds.STEP_US] = ()
    stats: Annotated[dict[str, Any], bounds.STATS] = field(default_factory=dict)
    token_ids: Tokens32
    node_ids: NodeIds = _empty("<i4")
    mask: NodeFlags = _empty("<u1")
    node_lanes: NodeLanes = _empty("<u1")
    logprobs: Logprobs32 = _empty("<f4")
    top_ids: Tokens32 = _empty("<i4")
    top_logprobs: Logprobs32 = _empty("<f4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionFailed(Message):
    """A verifier cannot go on with a session. `retry`: another verifier may."""

    TYPE: ClassVar[str] = "session_failed"
    session_id: Id
    epoch: Id
    reason: Reason
    retry: bool = False

    def __post_init__(self) -> None:
        _cut_reason(self)


# --- to a client --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accepted(Message):
    """The job is in the journal."""

    TYPE: ClassVar[str] = "accepted"
    job_id: Id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobInfo(Message):
    """What a job is, for a client that asked to `Follow` it; fields as in `Submit`.

    ended  it has; elapsed_ms: from its submission to its end, or to now
    """

    TYPE: ClassVar[str] = "job_info"
    job_id: Id
    params: SamplingParams
    model: Name = ""
    label: Annotated[str, bounds.LABEL] = ""
    ended: bool = False
    elapsed_ms: Annotated[int, bounds.ELAPSED_MS] = 0
    prompt_ids: Tokens32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobList(Message):
    """Jobs, as JSON: a list of objects with the names of `specq.broker.jobs.listing.Line`; answers `ListJobs` of this skip."""

    TYPE: ClassVar[str] = "job_list"
    skip: Count = 0
    data: Bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens(Message):
    """New tokens of a job.

    base_len    generated tokens before these (the prompt not counted)
    accepted u8[m]  1 where the token was drafted and accepted, 0 where it is the target's own
    finish      a finish reason or ""; stats come with the last message (names of `specq.broker.jobs.job.JobStats`)
    logprobs, top_ids, top_logprobs   as in `Verdict`
    """

    TYPE: ClassVar[str] = "tokens"
    job_id: Id
    base_len: Count
    finish: Annotated[str, bounds.FINISH] = ""
    stats: Annotated[dict[str, Any], bounds.STATS] = field(default_factory=dict)
    token_ids: Tokens32
    accepted: Flags
    logprobs: Logprobs32 = _empty("<f4")
    top_ids: Tokens32 = _empty("<i4")
    top_logprobs: Logprobs32 = _empty("<f4")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Failed(Message):
    """The job was refused or failed; `code` as in JobError."""

    TYPE: ClassVar[str] = "failed"
    job_id: Id
    code: Annotated[str, bounds.CODE]
    reason: Reason

    def __post_init__(self) -> None:
        _cut_reason(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Status(Message):
    """The broker's state as a JSON-able dict: models, workers, sessions, counters."""

    TYPE: ClassVar[str] = "status"
    report: Annotated[dict[str, Any], bounds.REPORT]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenizerChunk(Message):
    """A piece of a tokenizer, of at most 1 MiB; also verifier to broker.

    The pieces, joined in order, are a JSON object of file names ("tokenizer.json", "tokenizer_config.json") to texts.
    """

    TYPE: ClassVar[str] = "tokenizer_chunk"
    model: ModelInfo
    index: Annotated[int, bounds.PIECE]
    count: Annotated[int, bounds.PIECES]
    data: Bytes


MESSAGES: dict[str, type[Message]] = {
    cls.TYPE: cls
    for cls in (
        Hello, Heartbeat, Submit, Follow, ListJobs, Cancel, GetStatus, FetchTokenizer,
        Welcome, Refused, Open, Close, Ack, Assign, Release,
        Draft, Verdict, SessionFailed,
        Accepted, JobInfo, JobList, Tokens, Failed, Status, TokenizerChunk,
    )
}  # fmt: skip
