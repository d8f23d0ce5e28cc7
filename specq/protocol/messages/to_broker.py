"""Messages to the broker, from workers and from clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np

from specq.protocol import bounds
from specq.protocol.activations import BF16
from specq.protocol.messages.base import (
    Capabilities,
    ClockUs,
    Count,
    Id,
    Ids,
    Lengths,
    Message,
    Name,
    TapForm,
    TapLayers,
    TapWindow,
    Tokens32,
    TraceKinds,
    TraceTimes,
    TraceValues,
    empty,
)
from specq.protocol.params import SamplingParams, Speculation
from specq.protocol.stats import WORKER_METRICS
from specq.protocol.types import ModelInfo
from specq.protocol.versions import since

_DIGEST = re.compile(r'"(?:http|batch_[0-9a-f]{24} \d+/\d+) ([0-9a-f]{64})"')  # see `specq.gateway.serving`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hello(Message):
    """A worker registers. It sends this again after each reconnection.

    - role: "target" or "draft".
    - incarnation: random for each start of a process.
    - endpoint: of a verifier, the address for the broker's DEALER. "": it only dials out, so all its messages pass over
      the connection that this one came over. The broker must name the capability `DIALS_OUT`.
    - max_sessions: of a verifier, its maximum number of sessions at a time.
    - tap_layers, tap_form, tap_window: of a drafter that reads the target's hidden states, see `GetActivations`.
    - capabilities: what the worker can do beyond the oldest version, by name, see `specq.protocol.versions`.
    """

    TYPE: ClassVar[str] = "hello"
    role: Annotated[str, bounds.ROLE]
    name: Name
    incarnation: Id
    model: ModelInfo
    endpoint: Annotated[str, bounds.ENDPOINT] = ""
    max_sessions: Count = 0
    tap_layers: TapLayers = ()
    tap_form: TapForm = BF16
    tap_window: TapWindow = 0
    capabilities: Capabilities = since(6, ())

    def of_before(self) -> Hello:
        """Return it in the form that a broker of the oldest version can read."""
        return replace(self, capabilities=(), model=self.model.of_before())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heartbeat(Message):
    """State of a worker and all its sessions, so that the broker notices lost messages.

    - state: "loading", "ready" or "draining". The last heartbeat has "leaving", or "failed" if an error ends the
      worker.
    - load: number of sessions.
    - steps: a counter that a hung worker cannot raise.
    - pending: number of sessions that could take part in a step now.
    - step_ms: how much longer than `liveness_ms` the worker may be silent, since it runs a step. The broker allows at
      most nine times `liveness_ms`.
    - metrics: its counters since its start, see `specq.protocol.stats`.
    - session_ids i64[s], epochs i64[s], lengths i32[s]: the committed length that the worker knows.
    """

    TYPE: ClassVar[str] = "heartbeat"
    incarnation: Id
    state: Annotated[str, bounds.STATE]
    load: Count = 0
    steps: Annotated[int, bounds.STEPS] = 0
    pending: Count = 0
    step_ms: Annotated[int, bounds.STEP_MS] = 0
    free_slots: Count = 0
    metrics: Annotated[dict[str, Any], WORKER_METRICS] = field(default_factory=dict)
    session_ids: Ids = empty("<i8")
    epochs: Ids = empty("<i8")
    lengths: Lengths = empty("<i4")

    def take(self, places: Sequence[int]) -> Heartbeat:
        """Return it with the sessions at these places only."""
        if len(places) == len(self.session_ids):
            return self
        own = np.array(places, np.intp)
        return replace(self, session_ids=self.session_ids[own], epochs=self.epochs[own], lengths=self.lengths[own])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Submit(Message):
    """A job. Submitting the same id again attaches to it, without sending the first `have` tokens again.

    - model: the name of a served model, or "" for the only one.
    - prompt_ids i32[n].
    - speculation: how to draft for it.
    - priority: jobs of a higher priority are placed first. Within one priority, clients take turns.
      Jobs of a negative one are in the background: they yield to others, also at the verifier.
    - deadline_ms: the job fails this long after its first submission. 0: no limit.
    - label: the client's own name for the job, at most 1000 characters. A label with a `digest` identifies the request.
    - trace: record what happens to the job in every process, see `specq.protocol.trace_events`.
    - explain: report what became of drafts. The report is lost when the broker's process ends.
    - tenant: the gateway's user for whom it submits the job. Among the jobs of one key, each tenant has its own turns
      and its own share of the queue. Without keys this holds for one connection. With keys, only a client's key with
      the right `tenants` may name a tenant.
    - cache_salt: if not "", it limits sharing. The job shares its prompt's KV and earlier texts only with jobs of the
      same owner, tenant and salt.
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
    tenant: Annotated[str, bounds.TENANT] = ""
    cache_salt: Annotated[str, bounds.CACHE_SALT] = since(6, "")
    trace: bool = False
    explain: bool = False
    prompt_ids: Tokens32

    @property
    def digest(self) -> str:
        """Return the digest in the label of a repeatable HTTP request, else "".

        Jobs with the same digest make the same request, though their prompts may differ. A chat template may contain
        today's date.
        """
        found = _DIGEST.fullmatch(self.label)
        return found[1] if found else ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Follow(Message):
    """Asks for a job by its id. The answer is a `JobInfo`, then its tokens beyond the first `have` as they arrive."""

    TYPE: ClassVar[str] = "follow"
    job_id: Id
    have: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ListJobs(Message):
    """Asks for a `JobList`: all waiting and running jobs, and `limit` ended ones after skipping the newest `skip`."""

    TYPE: ClassVar[str] = "list_jobs"
    limit: Count = 100
    skip: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cancel(Message):
    """Stops a job. Its committed tokens stay."""

    TYPE: ClassVar[str] = "cancel"
    job_id: Id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GetStatus(Message):
    """Asks for a `Status` with up to `sessions` of the busiest sessions."""

    TYPE: ClassVar[str] = "get_status"
    sessions: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GetTrace(Message):
    """Asks for the `Trace` of a job. 0: of the newest job."""

    TYPE: ClassVar[str] = "get_trace"
    job_id: Id


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GetClock(Message):
    """Asks for a `Clock`. `sent_us`: by the sender's clock."""

    TYPE: ClassVar[str] = "get_clock"
    sent_us: ClockUs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceEvents(Message):
    """Events of a traced job in a worker or client since the previous message, see `specq.protocol.trace_events`.

    - error_us: the maximum error of the times. It is half of the round trip by which the clocks were compared.
    - dropped: total number of events without space.
    - kinds u8[n], times_us i64[n] (the broker's clock), values i32[n * 8].
    """

    TYPE: ClassVar[str] = "trace_events"
    job_id: Id
    error_us: Count = 0
    dropped: Count = 0
    kinds: TraceKinds
    times_us: TraceTimes
    values: TraceValues


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FetchTokenizer(Message):
    """Asks for the tokenizer of a served model ("" for the only one). Also from broker to verifier."""

    TYPE: ClassVar[str] = "fetch_tokenizer"
    model: Name = ""
