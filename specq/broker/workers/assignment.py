"""Which workers a job gets: decisions about sessions of verifiers, and drafters for sessions.

Placement, moves, quarantine and the meaning of heartbeats are pure functions.

Placement. Jobs with a common prompt prefix go to one verifier, which computes the prefix once. This holds while that
verifier has not many more jobs than the others. Otherwise the verifier with the fewest jobs takes the job. Verifiers
without KV space come last. The new verifier computes the KV of a moved job again. So jobs move only to a newly joined
verifier, or if the difference is large. Only a few move at once, and none twice within MOVE_INTERVAL_S.

Quarantine. A job that two crashed verifiers held runs alone on its verifier. If necessary, the other jobs of a verifier
wait meanwhile. A job that crashes a verifier alone, twice, is given up. A job that gets well past its position at the
last crash is cleared. So harmless jobs do not delay others for long.

Heartbeats. Sessions are compared by id, epoch and two committed lengths: now, and at the worker's last heartbeat
(`HeartbeatMark`). What was sent after that may still be on its way.

- close: the worker has a session that is not its own, or has another epoch.
- keep: it has what it should have.
- ahead: it has tokens that the broker lacks and missed since the last heartbeat. They were lost on the way to
  the broker.
- behind: it lacks tokens that the broker had at the last heartbeat. They were lost on the way to the worker.
- missing: it lacks a session for the first time. The session may be on its way.
- lost: it lacks a session again.

Drafters: which drafters a job gets, what they missed, and the hidden states that they need.

Rules:
- Two drafters of a job never have the same model.
- While a verifier asks drafters to be silent, its new jobs get no drafters. These would receive messages and have no
  work. The jobs get drafters when the verifier asks for drafts again.
- Hidden states are forwarded unchanged after a check of their form. Only the drafter reads them.
- A silent drafter receives no hidden states, so that few queue up for it.
- If a verifier sends states for a removed lane, the broker asks it to stop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, cast

from specq.broker.state.job import BrokerJob
from specq.broker.state.memory import BrokerState, Send
from specq.broker.state.registry import Worker, least_loaded
from specq.broker.state.transcript import HeartbeatMark
from specq.journal import Crashes
from specq.protocol import (
    Activations,
    Assign,
    GetActivations,
    Release,
    SamplingParams,
    Verdict,
    decode,
    grammar_capability,
    grammar_kind,
)
from specq.verification import strategy

AFFINITY_SLACK = 8  # more jobs than the least loaded verifier, up to which a common prefix decides
FRESH_S = 10.0  # a verifier counts as just joined for this long
GROSS = 16  # difference in jobs at which they also move to an older verifier
MOVES_AT_ONCE = 8
MOVE_INTERVAL_S = 10.0  # least time between two moves of a job
MIN_TOKENS_LEFT = 16  # for a job to move
LONE_CRASHES = 2  # after which a job is given up


class Move(NamedTuple):
    """A job to move to another verifier."""

    job: BrokerJob
    to: Worker


def choose(able: Sequence[Worker], num_tokens: int, keys: Sequence[int]) -> Worker:
    """Return the verifier for a job with these prompt keys that may need `num_tokens` tokens of KV.

    `able` must not be empty.
    """
    roomy = [worker for worker in able if worker.free_slots >= num_tokens] or able
    least = min(worker.load for worker in roomy)
    near = [worker for worker in roomy if worker.load <= least + AFFINITY_SLACK]
    return min(near, key=lambda worker: (-worker.num_known(keys), worker.load, -worker.free_slots, worker.order))


def moves(alike: Sequence[Worker], jobs: Iterable[BrokerJob], now: float) -> list[Move]:
    """Return the jobs to move between verifiers of equal weights. `jobs` are the movable ones."""
    movable: dict[bytes, list[BrokerJob]] = {}
    for job in sorted(jobs, key=lambda job: job.transcript.length, reverse=True):  # the shortest and cheapest last
        if job.transcript.tokens_left >= MIN_TOKENS_LEFT and now >= job.session.moved_at + MOVE_INTERVAL_S:
            movable.setdefault(job.session.verifier, []).append(job)
    loads = {worker.identity: len(worker.job_ids) for worker in alike}
    found: list[Move] = []
    for to in sorted((w for w in alike if w.has_room), key=lambda w: loads[w.identity]):
        room = to.hello.max_sessions - to.num_sessions if to.hello.max_sessions else MOVES_AT_ONCE
        gap = 2 if now < to.joined_at + FRESH_S else GROSS
        while room > 0 and len(found) < MOVES_AT_ONCE:
            giver = max((i for i in loads if movable.get(i)), key=lambda i: loads[i], default=to.identity)
            if loads[giver] - loads[to.identity] < gap:
                break
            found.append(Move(movable[giver].pop(), to))
            loads[giver] -= 1
            loads[to.identity] += 1
            room -= 1
    return found


def after_crash(job: BrokerJob, num_jobs: int) -> Crashes:
    """Return the crashes that count against a job after a crash of a verifier with `num_jobs` jobs."""
    is_lone = job.is_quarantined and num_jobs == 1
    return Crashes(job.crashes.total + 1, job.crashes.lone + is_lone, job.transcript.num_tokens)


def is_given_up(crashes: Crashes) -> bool:
    return crashes.lone >= LONE_CRASHES


def open_to(able: Sequence[Worker], isolated: set[bytes], *, alone: bool, wanted: set[bytes]) -> list[Worker]:
    """Return the verifiers that may take a job, among those with space that meet its requirements.

    - `isolated`: verifiers that run a job in quarantine. They take no other job.
    - `alone`: the job is in quarantine. It needs a verifier without other jobs.
    - `wanted`: verifiers that could run a waiting job in quarantine. While none runs, the one of them with the fewest
      jobs takes no other jobs.
    """
    free = [worker for worker in able if worker.identity not in isolated]
    if alone:
        return [worker for worker in free if not worker.job_ids]
    kept = [worker for worker in free if worker.identity in wanted]
    if kept and len(free) == len(able):
        free.remove(min(kept, key=lambda worker: len(worker.job_ids)))
    return free


def to_clear(able: Iterable[Worker], isolated: set[bytes]) -> Worker | None:
    """Return the verifier to free for a job in quarantine.

    None: such a job already runs, or a verifier is already free.
    """
    ready = [worker for worker in able if worker.state == "ready"]
    if any(worker.identity in isolated or not worker.job_ids for worker in ready):
        return None
    return min(ready, key=lambda worker: len(worker.job_ids), default=None)


Kind = Literal["close", "keep", "ahead", "behind", "missing", "lost"]


class Expected(NamedTuple):
    """A session as the broker has it: its committed length, and its state in the worker's last heartbeat."""

    epoch: int
    length: int
    mark: HeartbeatMark


class Reported(NamedTuple):
    """A session as a heartbeat lists it."""

    epoch: int
    length: int


class Action(NamedTuple):
    """What to do about a session. `length`: the reported length, or -1."""

    kind: Kind
    session_id: int
    epoch: int
    length: int = -1


def reconcile(expected: Mapping[int, Expected], reported: Mapping[int, Reported]) -> list[Action]:
    """Return an action for each session of a worker, by id: first the reported ones, then the missing ones."""
    actions = [
        Action(_kind(expected.get(session_id), found), session_id, found.epoch, found.length)
        for session_id, found in reported.items()
    ]
    for session_id in expected.keys() - reported.keys():
        wanted = expected[session_id]
        actions.append(Action("lost" if wanted.mark.is_missing else "missing", session_id, wanted.epoch))
    return actions


def _kind(expected: Expected | None, reported: Reported) -> Kind:
    """Return what to do about a reported session."""
    if expected is None or expected.epoch != reported.epoch:
        return "close"
    if expected.mark.length == expected.length < reported.length:
        return "ahead"
    return "behind" if reported.length < expected.mark.length else "keep"


class DrafterAssignment:
    """Gives placed jobs the drafters that they lack."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state

    def assign_all(self) -> None:
        for job in self.state.jobs.active.values():
            if job.session.verifier:
                self.assign_drafters(job)

    def hear(self, verifier: Worker, *, wants_silence: bool) -> None:
        """Note whether a verifier asks drafters to be silent. If not, assign the missing drafters."""
        verifier.wants_silence = wants_silence
        if not wants_silence:
            for job in self.state.jobs.among(verifier.job_ids):
                self.assign_drafters(job)

    def assign_drafters(self, job: BrokerJob) -> None:
        """Give a placed job the drafters that it lacks, each with a different model."""
        verifier = self.state.workers.get(job.session.verifier)
        if verifier is None or len(job.drafters) >= self.state.settings.drafters_per_job:
            return
        speculation = job.request.speculation
        if not is_drafted(speculation.mode, job.request.params.strategy):
            return
        if verifier.wants_silence and not speculation.waits:
            return
        by_model = self.state.workers.drafters_for(verifier.model)
        if len(job.drafters) >= len(by_model):  # one of each
            return
        drafting = {worker.model.fingerprint for worker in self._drafters_of(job)}
        fitting = [worker for model, workers in by_model.items() if model not in drafting for worker in workers]
        if self.state.sharers(job.request):  # older drafters share their cached texts between all owners
            fitting = [worker for worker in fitting if worker.knows_owners]
        if job.request.params.grammar:  # older drafters refuse verdicts with tokens that the grammar forced
            fitting = [worker for worker in fitting if worker.knows_grammars]
        while len(job.drafters) < self.state.settings.drafters_per_job:
            drafter = least_loaded(w for w in fitting if w.model.fingerprint not in drafting)
            if drafter is None:
                return
            drafting.add(drafter.model.fingerprint)
            self.assign(job, drafter)

    def _drafters_of(self, job: BrokerJob) -> list[Worker]:
        return [worker for d in job.drafters.identities() if (worker := self.state.workers.get(d)) is not None]

    def assign(self, job: BrokerJob, worker: Worker) -> None:
        """Give a drafter a new lane of a job, and the text so far."""
        request, transcript = job.request, job.transcript
        lane = job.drafters.add(worker.identity, transcript.length)
        worker.job_ids.add(job.job_id)
        trace = job.trace
        if trace is not None:
            trace.expect(worker.identity, worker.name, "draft")
            trace.note("assigned", self.state.clock.now, drafter=worker.name, lane=lane)
        self.state.outbox.send_front(
            worker.identity,
            Assign(
                session_id=job.job_id,
                epoch=job.session.epoch,
                lane=lane,
                prompt_len=transcript.prompt_len,
                params=drafting_params(request.params, worker.capabilities),
                speculation=request.speculation,
                trace=trace is not None and trace.in_all_processes,
                owner=self.state.sharers(request) if worker.knows_owners else "",
                token_ids=transcript.context(),
            ),
        )
        self._ask_activations(job, worker)

    def _ask_activations(self, job: BrokerJob, worker: Worker) -> None:
        """Ask the verifier to send a trusted drafter the hidden states that it needs, unless it does already.

        A verifier ignores a repeated request.
        """
        hello, lanes = worker.hello, job.drafters.lanes
        if not hello.tap_layers or not worker.is_trusted:
            return
        number = next(number for number, lane in lanes.items() if lane.drafter == worker.identity)
        is_fed, lanes[number].is_fed = lanes[number].is_fed, False
        if is_fed:
            return
        asked = GetActivations(
            session_id=job.job_id,
            epoch=job.session.epoch,
            lane=number,
            tap_layers=hello.tap_layers,
            tap_form=hello.tap_form,
            tap_window=hello.tap_window,
        )
        self.state.outbox.send_back(job.session.verifier, asked)

    def resume(self, job: BrokerJob) -> None:
        """Let a job's drafters continue with its new session."""
        for worker in self._drafters_of(job):
            self.assign(job, worker)

    def release(self, job: BrokerJob) -> None:
        """Free the drafters of an ended job."""
        for worker in self._drafters_of(job):
            worker.job_ids.discard(job.job_id)
            self.state.outbox.send_front(worker.identity, Release(session_id=job.job_id, epoch=job.session.epoch))
        job.drafters.clear()

    # --- heartbeats -------------------------------------------------------------------------------------------------

    def reconcile(self, worker: Worker, reported: Mapping[int, Reported]) -> None:
        """Send a drafter again what its heartbeat lacks, and release the sessions that it should not have."""
        for action in reconcile(self._expected(worker), reported):
            job = self.state.jobs.active.get(action.session_id)
            if action.kind == "close":
                release = Release(session_id=action.session_id, epoch=action.epoch)
                self.state.outbox.send_front(worker.identity, release)
            elif job is not None:
                self._apply(job, worker, action)

    def _expected(self, worker: Worker) -> dict[int, Expected]:
        """Return the sessions that a drafter should have."""
        return {
            job.job_id: Expected(job.session.epoch, job.transcript.length, lane.mark)
            for job in self.state.jobs.among(worker.job_ids)
            if (lane := job.drafters.lane_of(worker.identity)) is not None
        }

    def _apply(self, job: BrokerJob, worker: Worker, action: Action) -> None:
        lane = job.drafters.lane_of(worker.identity)
        assert lane is not None, "only sessions of the drafter are expected of it"
        if action.kind == "lost":
            self.assign(job, worker)
        elif action.kind == "missing":
            lane.mark.is_missing = True
        else:
            if action.kind == "behind" and action.length >= job.transcript.prompt_len:
                self._send_tokens_since(action.length, job, worker)
            lane.mark.confirm(job.transcript.length)
            self._ask_activations(job, worker)

    def _send_tokens_since(self, length: int, job: BrokerJob, worker: Worker) -> None:
        """Send a drafter the tokens beyond this committed length as one verdict. A silent drafter stays silent."""
        verdict = Verdict(
            session_id=job.job_id,
            epoch=job.session.epoch,
            base_len=length,
            min_accept_prob=job.drafters.held.asked,
            token_ids=job.transcript.since(length),
        )
        self.state.outbox.send_front(worker.identity, verdict)


def drafting_params(params: SamplingParams, capabilities: frozenset[str]) -> SamplingParams:
    """Return the parameters for a drafter with these capabilities.

    The seed is left out if it determines the draws that judge its drafts. The grammar is left out unless the drafter
    can mask: the verifier judges each draft by the grammar. No drafter
    knows `prompt_logprobs` and `allowed_token_ids`.
    """
    if params.grammar and grammar_capability(grammar_kind(params.grammar)) not in capabilities:
        params = replace(params, grammar="")
    if params.prompt_logprobs >= 0 or params.allowed_token_ids:
        params = replace(params, prompt_logprobs=-1, allowed_token_ids=())
    return replace(params, seed=0) if strategy(params.strategy).takes_distributions else params


def is_drafted(mode: str, strategy_name: str) -> bool:
    """Return whether drafts can help a job."""
    return mode != "plain" and strategy(strategy_name).uses_drafts


class ActivationRelay:
    """Forwards hidden states."""

    def __init__(self, state: BrokerState) -> None:
        self.state = state

    def take(self, verifier: bytes, frames: Sequence[bytes]) -> None:
        """Forward hidden states to the drafter of their lane.

        Raises ProtocolError for a malformed message.
        """
        message = cast("Activations", decode(frames))
        job = self.state.jobs.active.get(message.session_id)
        if job is None or not job.session.is_at(verifier, message.epoch):
            return
        lane = job.drafters.lanes.get(message.lane)
        if lane is None:
            stop = GetActivations(session_id=message.session_id, epoch=message.epoch, lane=message.lane)
            self.state.outbox.send_back(verifier, stop)
            return
        lane.is_fed = True
        drafter = self.state.workers.get(lane.drafter)
        if drafter is not None and self.state.clock.now - drafter.last_seen <= self.state.settings.quiet_s:
            self.state.outbox.add(Send("front", lane.drafter, list(frames)))
