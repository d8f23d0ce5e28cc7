"""What drafts in a service: lookups, heads and draft models of the verifier, and drafters behind a network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

import numpy as np

from specq.drafting import ChainDrafter, Chains, Pending
from specq.drafting.draft_model.source import ColocatedSource
from specq.protocol import (
    COLOCATED,
    COLOCATED_LANE,
    EAGLE,
    LANES,
    SUFFIX,
    SUFFIX_LANE,
    Draft,
    Float32Array,
    Int32Array,
    IntpArray,
    SamplingParams,
    Verdict,
)
from specq.verifier import Budget, ComputedDrafts, DraftBatch, DraftSource, StepCurve, Verifier
from specq.verifier.sources import Rounds, Session, batch_of_chains
from tests.verifier.services.service import Service
from tests.verifier.services.texts import NUM_ROWS, Texts
from tests.verifier.timed_target import INFO, Machine

CLAIM = 0.7  # of drafters that do not know how often they are right
DRAFT_S = 0.00005  # of the verifier's host, to receive a remote draft
SILENT = 1000  # of `Verdict.min_accept_prob`: above it no draft is wanted


class Foresight:
    """What one source foresees now. `started_at` is when it drafted last."""

    def __init__(self, service: Service, number: int, texts: Texts, machine: Machine) -> None:
        self.own, self.machine = service.sources[number], machine
        self._service, self._number, self._texts = service, number, texts
        self._decays: Float32Array = (self.own.decay ** np.arange(self.own.depth)).astype(np.float32)
        self.has_drafted = False  # since the last step was launched

    def chances(self, depth: int) -> Float32Array:
        """Return how likely each token of a chain is right now, given those before it; f32[depth]."""
        phase = self._service.phases[self._service.phase_at(self.machine.now)]
        return np.float32(phase.chances[self._number]) * self._decays[:depth]

    def claims(self, depth: int) -> Float32Array:
        """Return what the source takes for its chances, as logarithms; f32[depth]."""
        chances = self.chances(depth) if self._service.is_honest else CLAIM * self._decays[:depth]
        return np.log(np.maximum(chances, 1e-3)).astype(np.float32)

    def draft(self, session_ids: list[int], lengths: list[int], depth: int) -> tuple[Int32Array, IntpArray]:
        """Return chains, and how many tokens of each are right; see `Texts.draft`."""
        self.has_drafted = True
        return self._texts.draft(self._number, session_ids, lengths, self.chances(depth))


class OwnSource(DraftSource):
    """A lookup on the host, or a head on the device: a chain for each session before each step."""

    def __init__(self, foresight: Foresight, *, knows_chances: bool) -> None:
        """`knows_chances`: what it claims is the truth, and believed."""
        self.name = foresight.own.name  # type: ignore[misc]
        self._foresight, self._knows_chances = foresight, knows_chances
        self._lane = SUFFIX_LANE if self.name == SUFFIX else LANES[EAGLE]

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """See `DraftSource`."""
        return self.name != SUFFIX and bool(sessions)

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """See `DraftSource`."""
        sessions = [one for one in sessions if one.takes_drafts and not one.waits]
        if not sessions:
            return ()
        seconds = self._foresight.own.draft_s(len(sessions), self._foresight.own.depth)
        machine = self._foresight.machine
        if self.name == SUFFIX:
            machine.work(seconds)
        else:
            machine.wait(machine.launch(seconds))
        return drafted_chains(
            self._foresight, sessions, self._foresight.own.depth, self._lane, knows_chances=self._knows_chances
        )


def drafted_chains(
    foresight: Foresight, sessions: Sequence[Session], depth: int, lane: int, *, knows_chances: bool
) -> Sequence[DraftBatch]:
    """Return a chain for each session as a batch."""
    ids, lengths = [one.session_id for one in sessions], [one.length for one in sessions]
    tokens, _ = foresight.draft(ids, lengths, depth)
    claims = np.log(np.maximum(foresight.chances(depth), 1e-3)) if knows_chances else foresight.claims(depth)
    scores = np.broadcast_to(claims.astype(np.float32), tokens.shape)
    return [batch_of_chains(sessions, lane, tokens, np.full(len(ids), depth), scores, is_measured=knows_chances)]


class ModelChains(ChainDrafter):
    """A draft model on the target's device; what it has not computed of a context takes longer."""

    info = INFO

    def __init__(self, foresight: Foresight) -> None:
        self.foresight, self._own = foresight, foresight.own
        self._lengths: IntpArray = np.zeros(NUM_ROWS, np.intp)
        self._computed: IntpArray = np.zeros(NUM_ROWS, np.intp)  # tokens that have KV
        self._num_right: IntpArray = np.zeros(NUM_ROWS, np.intp)  # of the last chain

    def level_curve(self) -> StepCurve:
        """Return the seconds of a level by the number of sessions."""
        sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        return StepCurve(sizes, [self._own.draft_s(size, 1) for size in sizes])

    def open(self, session_id: int, token_ids: Int32Array, params: SamplingParams, owner: str = "") -> None:
        """See `ChainDrafter`."""
        row = session_id % NUM_ROWS
        self._lengths[row], self._computed[row], self._num_right[row] = len(token_ids), 0, 0

    def close(self, session_id: int) -> None:
        """See `ChainDrafter`."""

    def commit(self, session_ids: Sequence[int], num_tokens: IntpArray, token_ids: Int32Array) -> IntpArray:
        """See `ChainDrafter`."""
        rows = np.array(session_ids, np.intp) % NUM_ROWS
        followed: IntpArray = np.minimum(num_tokens, self._num_right[rows])
        self._num_right[rows] = 0
        self._lengths[rows] += num_tokens
        self._computed[rows] += followed
        return followed

    def start(self, session_ids: Sequence[int], depth: int, width: int) -> Pending[Chains]:
        """See `ChainDrafter`."""
        ids = [*session_ids]
        rows = np.array(ids, np.intp) % NUM_ROWS
        lengths = self._lengths[rows]
        behind = int(np.maximum(lengths - self._computed[rows] - 2, 0).sum())
        seconds = self._own.draft_s(len(ids), depth) + behind * self._own.context_ms / 1000
        done_at = self.foresight.machine.launch(seconds)
        self._computed[rows] = lengths
        tokens, self._num_right[rows] = self.foresight.draft(ids, lengths.tolist(), depth)
        scores = np.broadcast_to(self.foresight.claims(depth)[:, None], (*tokens.shape, 1))
        chains = Chains(tokens[:, :, None], scores, [()] * len(ids))

        def collect() -> Chains:
            self.foresight.machine.wait(done_at)
            return chains

        return Pending(collect)


class FixedModel(DraftSource):
    """A draft model that always drafts as many tokens, and knows how often they are right."""

    name = COLOCATED

    def __init__(self, chains: ModelChains, depth: int) -> None:
        self._chains, self._depth = chains, depth
        self._known = set[int]()
        self._begun: list[Session] = []
        self._pending: Pending[Chains]  # of these

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """See `DraftSource`."""
        self._begun = [one for one in sessions if one.takes_drafts]
        for session in self._begun:
            if session.session_id not in self._known:
                self._known.add(session.session_id)
                self._chains.open(session.session_id, np.array(session.token_ids, np.int32), session.params)
        if self._begun:
            self._pending = self._chains.start([one.session_id for one in self._begun], self._depth, 1)
        return bool(self._begun)

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """See `DraftSource`."""
        begun, self._begun = self._begun, []
        if not begun:
            return ()
        chains, foresight = self._pending.collect(), self._chains.foresight
        scores = np.broadcast_to(np.log(np.maximum(foresight.chances(self._depth), 1e-3)), chains.scores.shape[:2])
        counts = np.full(len(begun), self._depth)
        return [batch_of_chains(begun, COLOCATED_LANE, chains.token_ids[:, :, 0], counts, scores, is_measured=True)]

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        """See `DraftSource`."""
        ids = [session.session_id for session in rounds.sessions]
        known = [i for i, session_id in enumerate(ids) if session_id in self._known]
        if known:
            self._chains.commit([ids[i] for i in known], rounds.num_tokens[known], rounds.token_ids)


def draft_model(foresight: Foresight) -> ColocatedSource:
    """Return a draft model as a verifier has it."""
    chains = ModelChains(foresight)
    return ColocatedSource(chains, chains.level_curve(), fan_out=1, chain=foresight.own.depth)


class RemoteDrafters:
    """Draft workers. They answer a verdict by a chain unless they are busy, or it asks for silence; each drafts for
    some of the sessions. What there is no time to receive is dropped, as by the worker's loop."""

    def __init__(self, foresight: Foresight) -> None:
        self._foresight, self._own = foresight, foresight.own
        self._coming: list[tuple[float, int, Draft]] = []  # by arrival
        self._free_at = [0.0] * self._own.num_workers
        self._next_ids: dict[int, int] = {}
        self._num_sent = 0

    def is_busy(self, now: float) -> bool:
        """Return whether one of them is drafting."""
        return max(self._free_at) > now

    def hear(self, verdict: Verdict, now: float) -> None:
        """Take a verdict."""
        session_id = verdict.session_id
        if verdict.finish:
            self._next_ids.pop(session_id, None)
            return
        one_way_s, worker = self._own.round_trip_ms / 2000, session_id % len(self._free_at)
        heard = now + one_way_s
        if verdict.min_accept_prob > SILENT or self._free_at[worker] > heard:
            return
        self._free_at[worker] = sent = heard + self._own.draft_s(1, self._own.depth)
        length, depth = verdict.base_len + len(verdict.token_ids), self._own.depth
        first_id = self._next_ids.get(session_id, 0)
        self._next_ids[session_id] = first_id + depth
        tokens, _ = self._foresight.draft([session_id], [length], depth)
        draft = Draft(
            session_id=session_id, epoch=1, lane=0, base_len=length, first_id=first_id, token_ids=tokens[0],
            parent_ids=np.array([-1, *range(first_id, first_id + depth - 1)], np.int32),
            scores=self._foresight.claims(depth).astype(np.float16),
        )  # fmt: skip
        heappush(self._coming, (sent + one_way_s, self._num_sent, draft))
        self._num_sent += 1

    def deliver(self, verifier: Verifier, machine: Machine) -> None:
        """Hand over what has arrived by now."""
        before = machine.now
        while self._coming and self._coming[0][0] <= before:
            arrived, _, draft = heappop(self._coming)
            if machine.now - before <= verifier.sources.mail_s:
                machine.work(DRAFT_S)
                verifier.handle(draft, arrived)
        verifier.sources.account(machine.now - before)
