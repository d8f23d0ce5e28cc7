"""Jobs: the request, the committed tokens, and the workers, each in its own part; and the states of a job.

A submitted job waits in the queue until a verifier has space. It runs there, and ends once. If its verifier is lost,
leaves, or gives it back, the job waits again. It then continues from its transcript elsewhere. If a verifier held the
job when an earlier broker stopped, the job is absent. It then waits for that verifier to come back first.

Rule: only `BrokerJob.note` changes a state. An event that the table does not have is a bug, and raises. The diagram in
docs/reference/protocol.md is drawn from this table.

The parts of a job:

- `request` (JobRequest): what the client asked for.
- `session` (JobSession): the verifier that holds the job.
- `durable` (Durable): what the journal holds. `state/ledger.py` converts jobs to records and back.
- `transcript` (`state/transcript.py`): prompt, committed tokens, end.
- `stats` (`state/transcript.py`): counts.
- `readers` (`state/transcript.py`): the clients that follow the job.
- `drafters` (`state/transcript.py`): the drafters of the job.
- `explanation` (`specq.protocol.explanation`): the fate of draft nodes, if the client asked for it.
- `crashes` (`specq.broker.workers.assignment`): crashes of verifiers that held the job.
- `trace` (`state/traces.py`), `state`: what happened to the job, and its current state.

Rule: the transcript is the truth once the journal holds it. A client sees a token only after that. Any verifier with
the same weights can continue a job from its transcript. Ended jobs stay in memory for a while. An absent client can
still fetch them. The journal keeps the jobs that the broker has forgotten."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from specq.broker.state.traces import JobTrace
from specq.broker.state.transcript import Drafters, HeartbeatMark, JobStats, Readers, Transcript
from specq.journal import NO_CRASHES, Crashes
from specq.protocol import (
    ALLOWED_TOKENS,
    OWNERS,
    PROMPT_LOGPROBS,
    Explanation,
    Int32Array,
    JobInfo,
    SamplingParams,
    Speculation,
    Submit,
    Tokens,
    grammar_capability,
    grammar_kind,
    num_prompt_bytes,
)


class JobState(StrEnum):
    """The state of a job."""

    NEW = "new"  # made, not in a table yet
    ABSENT = "absent"  # read from the journal; its former verifier may come back
    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # a verifier holds its session
    GIVEN_UP = "given up"  # no verifier can continue it; it fails before the broker handles the next message
    ENDED = "ended"  # it has a finish reason
    DROPPED = "dropped"  # the journal does not hold it for this broker, and will not


class JobEvent(StrEnum):
    """An event in a job's life."""

    QUEUED = "queued"  # it waits for a verifier: submitted, read from the journal, or taken from a verifier
    READ_PLACED = "read, placed"  # read from the journal, which names a verifier for it
    READ_ENDED = "read, ended"  # read from the journal, with its end
    OPENED = "opened"  # its session was opened at a verifier, or opened anew
    GAVE_UP = "gave up"  # too many verifiers failed on it or crashed
    FINISHED = "finished"  # complete, stopped, cancelled, failed
    REFUSED = "refused"  # the journal cannot take it, or another broker has it


Ways = Mapping[JobEvent, JobState]
_ENDS: Ways = {JobEvent.FINISHED: JobState.ENDED, JobEvent.REFUSED: JobState.DROPPED}
TRANSITIONS: Mapping[JobState, Ways] = {
    JobState.NEW: {
        JobEvent.QUEUED: JobState.WAITING,
        JobEvent.READ_PLACED: JobState.ABSENT,
        JobEvent.READ_ENDED: JobState.ENDED,
    },
    JobState.ABSENT: {JobEvent.QUEUED: JobState.WAITING, JobEvent.GAVE_UP: JobState.GIVEN_UP, **_ENDS},
    JobState.WAITING: {JobEvent.OPENED: JobState.RUNNING, **_ENDS},
    JobState.RUNNING: {
        JobEvent.OPENED: JobState.RUNNING,
        JobEvent.QUEUED: JobState.WAITING,
        JobEvent.GAVE_UP: JobState.GIVEN_UP,
        **_ENDS,
    },
    JobState.GIVEN_UP: {JobEvent.FINISHED: JobState.ENDED},
    JobState.ENDED: {},
    JobState.DROPPED: {},
}


def after(state: JobState, event: JobEvent) -> JobState:
    """Return the state after an event.

    Raises AssertionError if the event cannot happen in this state.
    """
    following = TRANSITIONS[state].get(event)
    assert following is not None, f"a job that is {state} cannot be {event}"
    return following


def diagram() -> str:
    """Return the table as a Mermaid diagram."""
    lines = [
        f"    {_id(state)} --> {_id(following)}: {event}"
        for state, ways in TRANSITIONS.items()
        for event, following in ways.items()
    ]
    return "\n".join(["stateDiagram-v2", *lines])


def _id(state: JobState) -> str:
    return state.value.replace(" ", "_")


AGED_S = 300.0  # seconds since submission after which a job is placed in spite of higher priorities
PREFIX_LENGTHS = (16, 64, 256, 1024)  # numbers of prompt tokens at which prompts are compared
QUARANTINE_CRASHES = 2  # a job runs alone after this number of crashes of verifiers that held it
CLEARED_AFTER = 16  # new tokens since the last crash, after which the job runs alone no more
GRAMMAR_CHARACTERS = BYTES_OF_A_TOKEN = 4  # of a grammar, or of log-probabilities, take as much memory as a token
NO_CAPABILITIES: frozenset[str] = frozenset()


@dataclass(slots=True)
class Durable:
    """What the journal holds: the job (`is_registered`), its first `num_tokens` tokens, its end (`has_ended`)."""

    is_registered: bool = False
    num_tokens: int = 0
    has_ended: bool = False

    def note(self, num_tokens: int, *, ended: bool) -> None:
        """Note that the journal holds the job with its first `num_tokens` generated tokens, and perhaps its end."""
        self.is_registered, self.has_ended = True, self.has_ended or ended
        self.num_tokens = max(self.num_tokens, num_tokens)


@dataclass(slots=True)
class Unconfirmed:
    """The `Open`s of a job that its verifier's heartbeats do not confirm: see `specq.broker.workers.presence`.

    - `num_opens`: number sent in a row.
    - `since`: time of the first heartbeat that lacked the session.
    """

    verifier: bytes = b""
    num_opens: int = 0
    since: float = 0.0


class JobSession:
    """Where a job is placed. Times are in seconds of the broker's clock.

    - `verifier`: identity of the verifier that holds the session. b"": none.
    - `base_epoch`, `weights`: its epochs are above this; the weights that its tokens come from, "" until decided.
    - `incarnation`: of the verifier that holds it, as in the journal. 0: none.
    - `was_placed`: a verifier has held the job at some time.
    - `num_failures`: number of times that a verifier gave it back.
    - `avoided`: verifiers that never confirmed it.
    - `moved_at`: when it last moved between verifiers.
    """

    __slots__ = (
        *("avoided", "base_epoch", "epoch", "incarnation", "mark", "moved_at", "num_failures", "unconfirmed"),
        *("verifier", "was_placed", "weights"),
    )

    def __init__(self) -> None:
        self.verifier, self.epoch, self.base_epoch = b"", 0, 0
        self.weights, self.incarnation = "", 0
        self.was_placed = False
        self.num_failures = 0
        self.avoided: frozenset[bytes] = frozenset()
        self.moved_at = float("-inf")
        self.mark, self.unconfirmed = HeartbeatMark(), Unconfirmed()

    def open(self, verifier: bytes, epoch: int) -> None:
        """Begin anew at a verifier."""
        self.verifier, self.epoch, self.was_placed = verifier, epoch, True
        self.mark = HeartbeatMark()

    def is_at(self, verifier: bytes, epoch: int) -> bool:
        """Return whether this is the current session: this verifier and this epoch."""
        return self.verifier == verifier and self.epoch == epoch


def sharers(owner: str, tenant: str, cache_salt: str) -> str:
    """Return the job group that may share KV of prefixes and earlier texts, as in `Open.owner`.

    Different (owner, tenant, salt) give different results, since no owner's name begins with a plus. A salt is the
    client's secret, so only a digest leaves the broker.
    """
    name = bucket(owner, tenant)
    if not cache_salt:
        return name
    digest = hashlib.blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()
    return f"+{digest} {name}"


def bucket(owner: str, tenant: str) -> str:
    """Return the name under which a job takes turns and uses the queue. An owner's name has no slash."""
    return f"{owner}/{tenant}" if tenant else owner


@dataclass(frozen=True, eq=False)
class JobRequest:
    """A `Submit` with a model's name, the job's owner, and its arrival. Times are the journal's. `deadline` 0: none."""

    submit: Submit
    owner: str = ""
    submitted: float = 0.0
    deadline: float = 0.0

    @property
    def bucket(self) -> str:
        return bucket(self.owner, self.submit.tenant)

    @property
    def model(self) -> str:
        return self.submit.model

    @property
    def params(self) -> SamplingParams:
        return self.submit.params

    @property
    def speculation(self) -> Speculation:
        return self.submit.speculation

    @property
    def priority(self) -> int:
        return self.submit.priority

    def is_background(self, now: float) -> bool:
        """Return whether the job yields to others. `now`: the journal's time."""
        return self.priority < 0 and now - self.submitted < AGED_S

    @property
    def prompt_ids(self) -> Int32Array:
        return self.submit.prompt_ids  # i32[prompt_len]

    @property
    def prompt_len(self) -> int:
        return len(self.submit.prompt_ids)

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens of the finished job, prompt included."""
        return self.prompt_len + self.params.max_tokens

    @property
    def attached_size(self) -> int:
        """Return the memory of the grammar and of the prompt's log-probabilities, in tokens."""
        of_prompt = num_prompt_bytes(self.prompt_len, self.params) // BYTES_OF_A_TOKEN
        return len(self.params.grammar) // GRAMMAR_CHARACTERS + of_prompt

    @cached_property
    def capabilities(self) -> frozenset[str]:
        """Return what a verifier must be able to do: keep owners apart, build grammars of the job's kind, and so on."""
        grammar, needed = self.params.grammar, NO_CAPABILITIES
        if self.params.prompt_logprobs >= 0:
            needed |= {PROMPT_LOGPROBS}
        if self.params.allowed_token_ids:
            needed |= {ALLOWED_TOKENS}
        if grammar:
            needed |= {grammar_capability(grammar_kind(grammar))}
        if self.submit.cache_salt:
            needed |= {OWNERS}
        return needed

    def prefix_keys(self, sharers: str) -> tuple[int, ...]:
        """Return hashes of the prompt's prefixes. Equal prefixes of the same `sharers` have equal hashes.

        `specq.broker.workers.assignment` uses them.
        """
        return tuple(hash((sharers, of_prompt)) for of_prompt in self._prefix_hashes)

    @cached_property
    def _prefix_hashes(self) -> tuple[int, ...]:
        lengths = [length for length in PREFIX_LENGTHS if length < self.prompt_len]
        return tuple(hash(self.prompt_ids[:length].tobytes()) for length in [*lengths, self.prompt_len])

    def has_content(self, message: Submit) -> bool:
        """Return whether the message has the same content and label. A message without a model matches any model."""
        mine, submit = self.submit, message
        if submit.digest:
            return submit.digest == mine.digest and message.model in ("", self.model)
        same = (submit.params, submit.speculation, submit.label) == (mine.params, mine.speculation, mine.label)
        return same and message.model in ("", self.model) and np.array_equal(message.prompt_ids, self.prompt_ids)


class Requirements(NamedTuple):
    """What a job needs from a verifier.

    - `model`: name of the model.
    - `weights`: the weights that its tokens came from, once there are tokens.
    - `alone`: the verifier must not run other jobs.
    - `avoided`: verifiers to use only as a last choice.
    - `capabilities`: what the verifier must be able to do, as in `Hello.capabilities`.
    """

    model: str
    weights: str
    alone: bool = False
    avoided: frozenset[bytes] = frozenset()
    capabilities: frozenset[str] = NO_CAPABILITIES


class BrokerJob:
    """One submitted prompt and its completion.

    - `has_details`: its verdicts and tokens carry more than tokens and their origins.
    """

    __slots__ = (
        *("__weakref__", "_state", "crashes", "drafters", "durable", "explanation", "has_details", "job_id", "readers"),
        *("request", "session", "stats", "trace", "transcript"),
    )

    def __init__(self, request: JobRequest) -> None:
        self.job_id, self.request = request.submit.job_id, request
        self._state = JobState.NEW
        self.transcript = Transcript(request.prompt_ids, request.params)
        self.stats, self.durable, self.readers = JobStats(), Durable(), Readers()
        self.session, self.drafters = JobSession(), Drafters()
        self.crashes: Crashes = NO_CRASHES
        self.trace: JobTrace | None = None
        self.explanation = Explanation() if request.submit.explain else None
        has_logprobs = request.params.logprobs >= 0 or request.params.prompt_logprobs >= 0
        self.has_details = request.submit.explain or has_logprobs

    @property
    def state(self) -> JobState:
        return self._state

    def note(self, event: JobEvent) -> None:
        """Change the state by the table. No other code changes it."""
        self._state = after(self._state, event)

    @property
    def requirements(self) -> Requirements:
        weights = self.session.weights if self.transcript.token_ids else ""
        request = self.request
        return Requirements(request.model, weights, self.is_quarantined, self.session.avoided, request.capabilities)

    @property
    def is_quarantined(self) -> bool:
        """Return whether the job may be the cause of verifier crashes: see `specq.broker.workers.assignment`."""
        return self.crashes.total >= QUARANTINE_CRASHES

    @property
    def is_cleared(self) -> bool:
        """Return whether a quarantined job is past the point that may have crashed the verifier."""
        return self.is_quarantined and self.transcript.num_tokens >= self.crashes.length + CLEARED_AFTER

    def info(self, now: float) -> JobInfo:
        """Return a description of the job at this time of the journal."""
        request = self.request
        return JobInfo(
            job_id=self.job_id,
            params=request.params,
            model=request.model,
            label=request.submit.label,
            ended=self.durable.has_ended,
            elapsed_ms=max(0, int(((self.transcript.ended_at or now) - request.submitted) * 1000)),
            prompt_ids=request.prompt_ids,
        )

    def delta(self, have: int) -> Tokens:
        """Return the journaled tokens that a client with `have` generated tokens lacks."""
        transcript, end = self.transcript, self.durable.num_tokens
        have = min(have, end)
        top = (end - have) * max(transcript.logprobs.num_top, 0)
        lengths = {"logprobs": end - have, "top_ids": top, "top_logprobs": top}
        arrays = transcript.logprobs.arrays(have)
        ended = self.durable.has_ended and not transcript.failure
        return Tokens(
            job_id=self.job_id,
            base_len=have,
            finish=transcript.finish if ended else "",
            stats=self.stats.to_dict() if ended else {},
            token_ids=np.array(transcript.token_ids[have:end], np.int32),
            origins=np.frombuffer(transcript.origins[have:end], np.uint8),
            **{name: array[: lengths[name]] for name, array in arrays.items()},
            prompt_rows=np.frombuffer(b"" if have else transcript.prompt_rows, np.uint8),
            **(self.explanation.arrays(have, end) if self.explanation else {}),
        )
