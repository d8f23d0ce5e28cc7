"""What a job gathers: its tokens, its counts, and the peers beside its verifier (clients that follow it, drafters).

Each verdict adds to tokens and counts. Rule: tokens are only appended. A verdict that does not fit the present tokens
has no effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from specq.broker.state.rights import NOBODY, Bucket, Shown
from specq.protocol import COUNTED_DEPTHS, LEAST_OWN_LANE, Failed, Int32Array, LogprobRecord, SamplingParams


@dataclass(slots=True)
class Commit:
    """The broker's part of a verdict, with the fields of `Verdict`.

    `raw` is the frame of its tokens. `origins` has the code of each token. `lanes` has the lane of each accepted node.
    """

    session_id: int
    epoch: int
    base_len: int
    finish: str
    min_accept_prob: int
    us: tuple[int, ...]
    stats: dict[str, Any]
    cached_tokens: int
    token_ids: list[int]
    raw: bytes
    origins: bytes
    num_nodes: int
    lanes: bytes
    num_bytes: int

    @property
    def num_accepted(self) -> int:
        return len(self.lanes)


class Transcript:
    """The committed text of a job.

    - `origins`: the code of each token's origin (`specq.protocol.origins`).
    - `finish`: "" until the job ends.
    - `prompt_rows`: log-probabilities of the prompt (`specq.protocol.logprobs`), from the first verdict.
    - `failure`: the message that the client receives for a failed job.
    - `ended_at`: by the journal's time. 0.0: it has not ended.
    """

    __slots__ = (
        "ended_at",
        "failure",
        "finish",
        "logprobs",
        "max_tokens",
        "origins",
        "prompt_ids",
        "prompt_len",
        "prompt_rows",
        "token_ids",
    )

    def __init__(self, prompt_ids: Int32Array, params: SamplingParams) -> None:
        self.prompt_ids, self.prompt_len = prompt_ids, len(prompt_ids)
        self.max_tokens = params.max_tokens
        self.token_ids: list[int] = []
        self.origins = bytearray()
        self.logprobs = LogprobRecord(params.logprobs)
        self.prompt_rows = b""
        self.finish = ""
        self.failure: Failed | None = None
        self.ended_at = 0.0

    @property
    def num_tokens(self) -> int:
        """Return the number of generated tokens."""
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Return the committed length, prompt included: the length that `base_len` counts."""
        return self.prompt_len + len(self.token_ids)

    @property
    def tokens_left(self) -> int:
        return self.max_tokens - len(self.token_ids)

    def context(self) -> Int32Array:
        """Return the prompt and the committed tokens, i32[length]."""
        return np.concatenate([self.prompt_ids, np.array(self.token_ids, np.int32)])

    def since(self, length: int) -> Int32Array:
        """Return the generated tokens beyond a committed length, i32[self.length - length]."""
        return np.array(self.token_ids[length - self.prompt_len :], np.int32)

    def is_next(self, base_len: int, num_tokens: int) -> bool:
        """Return whether this number of tokens, from a committed length on, begins where the text ends and has room."""
        start = base_len - self.prompt_len
        return start == len(self.token_ids) and start + num_tokens <= self.max_tokens

    def commit(self, commit: Commit) -> int:
        """Append a verdict's new tokens. Return how many of its tokens were known, or -1 if it does not fit.

        A verdict does not fit if it leaves a gap or contradicts known tokens. It must not exceed the requested number
        of tokens.
        """
        tokens = commit.token_ids
        start = commit.base_len - self.prompt_len
        known = len(self.token_ids) - start
        if known < 0 or start < 0 or self.token_ids[start:] != tokens[:known]:
            return -1
        if start + len(tokens) > self.max_tokens:
            return -1
        self.token_ids.extend(tokens[known:])
        self.origins.extend(commit.origins[known:])
        self.finish = self.finish or commit.finish
        return known


@dataclass(slots=True)
class JobStats:
    """Counts of one job. A round is one step of one session, plain or not.

    - `accepted_lengths`: [i] is the number of rounds in which i nodes were accepted.
    - `cached_tokens`: prompt tokens with cached KV when the session opened that gave the first token.
    - `verifier`: the verifier's counts, `specq.protocol.stats.SessionStats`.
    - `final`: all counts of a job that ended before the broker started. They do not change.
    """

    rounds: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    draft_bytes: int = 0
    verdict_bytes: int = 0
    forward_us: int = 0
    queue_us: int = 0
    verifier: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)

    def add(self, commit: Commit) -> None:
        """Count one verdict."""
        accepted = commit.num_accepted
        self.rounds += 1
        self.draft_tokens += commit.num_nodes
        self.accepted_tokens += accepted
        if accepted >= len(self.accepted_lengths):
            self.accepted_lengths.extend([0] * (accepted + 1 - len(self.accepted_lengths)))
        self.accepted_lengths[accepted] += 1
        self.verdict_bytes += commit.num_bytes
        if commit.us:
            self.forward_us += commit.us[0]
            self.queue_us += commit.us[1]
        if commit.stats:
            self.verifier = commit.stats

    def to_dict(self) -> dict[str, Any]:
        """Return the counts under the names of `Tokens.stats`."""
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("verifier", "final")}
        return self.final or self.verifier | own


@dataclass(slots=True)
class RoundCounts:
    """Counts of committed verdicts since the broker started. Each round counts once.

    - `rounds`, `tokens`: rounds, plain ones included, and their committed tokens.
    - `prompt_tokens`: prompt tokens of jobs that have their first token.
    - `drafted_rounds`: rounds that verified draft nodes.
    - `draft_tokens`, `accepted_tokens`: verified nodes and accepted nodes.
    - `accepted_lengths`: [i] is the number of drafted rounds in which i nodes were accepted. The last counts that
      number or more.
    """

    rounds: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    drafted_rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (COUNTED_DEPTHS + 1))

    def add(self, transcript: Transcript, commit: Commit, num_new: int) -> None:
        """Count a verdict that added `num_new` tokens to a transcript."""
        self.rounds += 1
        self.tokens += num_new
        if transcript.num_tokens == num_new:
            self.prompt_tokens += transcript.prompt_len
        if commit.num_nodes:
            self.drafted_rounds += 1
            self.draft_tokens += commit.num_nodes
            self.accepted_tokens += commit.num_accepted
            self.accepted_lengths[min(commit.num_accepted, COUNTED_DEPTHS)] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the counts by name."""
        return asdict(self)


MAX_READERS = 8  # clients that follow one job
MAX_MISSED = 40  # ticks in a row without a message taken by a reader, before it is dropped


@dataclass(slots=True)
class JobReader:
    """One client that follows a job.

    - `sent`: number of generated tokens sent to it.
    - `shown`: the key that it came with.
    - `info`: it asks for a description of the job.
    - `greeted`: it knows that the broker has accepted the job.
    - `missed`: it did not take the last message. The broker sends it no more until the next tick.
    - `num_missed`: number of ticks in a row before which that happened.
    """

    sent: int
    shown: Shown = NOBODY
    info: bool = False
    greeted: bool = False
    missed: bool = False
    num_missed: int = 0


class Readers:
    """The readers of one job, `by_client`, in order of arrival."""

    __slots__ = ("by_client",)

    def __init__(self) -> None:
        self.by_client: dict[bytes, JobReader] = {}

    def attach(self, client: bytes, have: int, shown: Shown = NOBODY, *, info: bool = False) -> None:
        """Let a client follow the job. If there are too many, drop the first."""
        self.by_client.pop(client, None)
        self.by_client[client] = JobReader(have, shown, info)
        if len(self.by_client) > MAX_READERS:
            del self.by_client[next(iter(self.by_client))]

    def retain(self, is_allowed: Callable[[JobReader], bool]) -> None:
        """Drop the readers that are not allowed."""
        self.by_client = {client: reader for client, reader in self.by_client.items() if is_allowed(reader)}

    def note_undelivered(self, client: bytes, base_len: int) -> None:
        """Note that a client did not take tokens. They are sent again at the next tick, from the same position."""
        reader = self.by_client.get(client)
        if reader is not None:
            reader.sent, reader.missed = min(reader.sent, base_len), True

    def next_tick(self) -> None:
        """Allow each reader to receive again what it did not take.

        A reader that has not taken a message for long is dropped. It may attach again.
        """
        for client, reader in list(self.by_client.items()):
            reader.num_missed = reader.num_missed + 1 if reader.missed else 0
            reader.missed = False
            if reader.num_missed > MAX_MISSED:
                del self.by_client[client]


@dataclass(slots=True)
class HeartbeatMark:
    """The state of a session in its worker's last heartbeat.

    - `length`: the broker's committed length at that time. -1: no heartbeat has listed the session yet.
    - `is_missing`: the heartbeat lacked the session.
    """

    length: int = -1
    is_missing: bool = False

    def confirm(self, length: int) -> None:
        """Note that a heartbeat lists the session, at this committed length."""
        self.length, self.is_missing = length, False


@dataclass(slots=True)
class DrafterLane:
    """A drafter's place at a job.

    - `budget`: what it may still send, see `specq.broker.gate`. None: not used yet.
    - `is_fed`: the broker has forwarded hidden states to it since its last heartbeat.
    """

    drafter: bytes
    mark: HeartbeatMark
    budget: Bucket | None = None
    is_fed: bool = False


@dataclass(slots=True)
class HeldVerdicts:
    """Verdicts that drafters have not received yet: see `specq.broker.jobs.verdicts`.

    - `since`: the committed length at which they begin. -1: none are held.
    - `count`: number of held verdicts.
    - `most`: number of verdicts that go as one.
    - `asked`: `min_accept_prob` of the newest verdict, held back or not.
    """

    since: int = -1
    count: int = 0
    most: int = 1
    asked: int = 0


class Drafters:
    """The drafters of one job. A drafter that is added again gets a new lane, since it starts anew."""

    __slots__ = ("_next_lane", "held", "lanes")

    def __init__(self) -> None:
        self.lanes: dict[int, DrafterLane] = {}
        self.held = HeldVerdicts()
        self._next_lane = 0

    def __len__(self) -> int:
        return len(self.lanes)

    def identities(self) -> list[bytes]:
        return [lane.drafter for lane in self.lanes.values()]

    def lane_of(self, drafter: bytes) -> DrafterLane | None:
        """Return the lane of a drafter, or None."""
        return next((lane for lane in self.lanes.values() if lane.drafter == drafter), None)

    def add(self, drafter: bytes, length: int) -> int:
        """Give a drafter a lane from a committed length on, and return the lane's number."""
        self.drop(drafter)
        number, self._next_lane = self._next_lane, (self._next_lane + 1) % LEAST_OWN_LANE
        self.lanes[number] = DrafterLane(drafter, HeartbeatMark(length))
        return number

    def drop(self, drafter: bytes) -> None:
        self.lanes = {number: lane for number, lane in self.lanes.items() if lane.drafter != drafter}

    def clear(self) -> None:
        self.lanes = {}
