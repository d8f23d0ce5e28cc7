"""A drafter in the verifier's own process: what it drafts needs no message, and is there for the very next step.

A round is one chain for each session, then the step. `begin` gives the device its work, so that the host can send and hear
until `finish`. Chains that stand alone go into the step as arrays (`Session.offer`); where other drafters have nodes on a
session's tree, or a chain's levels have siblings or laws, they are grafted like anybody's draft, in a lane of their own.

Sessions of which other drafters' trees promise much already are left out: a draft worker on another device runs ahead, and
where it failed, the next round is drafted for here.

What the drafter says its nodes were drawn from is believed. Jobs that want a shape of their own are left to draft workers.
No I/O; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import structlog

from specq.drafting import LEAST_CHANCE, SIBLING_VALUE, Calibration, drafting_params, longest_chain
from specq.proposers import Chains, ChainSource
from specq.protocol import (
    COLOCATED_LANE,
    Draft,
    EngineError,
    EngineLostError,
    Float32Array,
    Float64Array,
    Message,
    Verdict,
    pack_distributions,
)
from specq.runtime import Faults, in_halves, traced
from specq.verification import strategy
from specq.verifier.core import Verifier
from specq.verifier.draft_tree import Chain
from specq.verifier.round_choice import OtherLoad, RoundChoice
from specq.verifier.scheduler import FLOOR
from specq.verifier.session import Session
from specq.verifier.step_curve import StepCurve

log = structlog.get_logger(__name__)

LEAD = 0.5  # of what a chain promises, from which a tree of others is enough
MANY = 16  # sessions from which levels never have siblings


@dataclass(frozen=True, slots=True)
class _Begun:
    """Chains that are being drafted."""

    sessions: list[Session]
    depth: int
    width: int
    began: float
    is_usual: bool  # contexts were computed but for the last round's tokens


@dataclass(frozen=True, slots=True)
class _Offered:
    """What was drafted for a session in this round: claims f32[depth] of the chain's tokens; `is_drawn` from laws, as nodes
    of these ids."""

    claims: Float32Array
    is_drawn: bool
    node_ids: Sequence[int]


class ColocatedDrafter:
    """A source of chains and the verifier whose sessions it drafts for; levels of at most `fan_out` children. `levels` are
    the seconds that a level takes for so many sessions; `chain` is the most levels."""

    def __init__(
        self, source: ChainSource, verifier: Verifier, levels: StepCurve, *, fan_out: int = 3, chain: int = 8
    ) -> None:
        self.source, self.verifier, self.fan_out = source, verifier, fan_out
        self.choice = RoundChoice(levels, chain)
        self.calibration = Calibration()
        self.num_passes = 0
        self._epochs: dict[int, int] = {}  # of the sessions that the source knows
        self._refused: dict[int, int] = {}  # epochs of those that found no room there
        self._offered: dict[int, _Offered] = {}
        self._begun: _Begun | None = None
        self._is_usual = False

    @property
    def has_work(self) -> bool:
        return self._begun is not None or any(map(self._drafts_for, self.verifier.sessions.values()))

    # --- a round ------------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Begin to draft for the sessions that decode, if that pays."""
        self._offered.clear()
        self._follow()
        sessions = [session for session in self.verifier.sessions.values() if self._drafts_for(session)]
        sessions, beside = self._without_leads(sessions[: self.verifier.max_sessions])
        depth = self.choice.choose(len(sessions), self.verifier.curve, beside) if sessions else 0
        if not depth:
            sessions, depth = [session for session in sessions if session.is_sync], self.choice.most
        most = max(map(_room, sessions), default=0)
        sessions = [session for session in sessions if self._knows(session)]
        is_usual, self._is_usual = self._is_usual, bool(sessions)
        if sessions:
            width = self.fan_out if len(sessions) < MANY and self.verifier.min_accept_prob <= SIBLING_VALUE else 1
            self._start(_Begun(sessions, min(depth, most), width, now, is_usual))

    def _without_leads(self, sessions: Sequence[Session]) -> tuple[list[Session], OtherLoad]:
        """Leave out sessions of which other drafters' trees promise enough, and say what they add to the step."""
        left, rows, tokens = [], 0, 0.0
        enough = LEAD * self.choice.promise()
        for session in sessions:
            promised = 0.0
            with Faults().of(session, "drafted for"):  # the verifier will find it as well
                nodes = session.candidates(FLOOR) if session.num_live else ()
                promised = sum(
                    node.reach_prob for node in nodes if node.depends_on is None
                )  # known without a drawn token
            if promised < enough or session.is_sync:
                left.append(session)
            else:
                rows, tokens = rows + 1 + session.num_live, tokens + 1 + promised
        return left, OtherLoad(rows, tokens)

    def _start(self, begun: _Begun) -> None:
        try:
            self.source.start([session.session_id for session in begun.sessions], begun.depth, begun.width)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self._not_drafted(begun.sessions, error)
            return
        self._begun = begun

    def _not_drafted(self, sessions: Sequence[Session], error: Exception) -> None:
        """Draft no more for the sessions for which the source raised this; for lack of room, or where none is found, not for
        the last."""
        faults = Faults()
        if isinstance(error, EngineError):
            log.warning("draft_failed", reason=str(error), num_sessions=len(sessions))
        else:
            log.warning("draft_failed", num_sessions=len(sessions), **traced(error))
            in_halves(sessions, self._try, faults, "drafted for")
        for session in [session for session in sessions if session in faults] or sessions[-1:]:
            self._refuse(session)

    def _try(self, sessions: Sequence[Session]) -> None:
        """Draft a token for each of some sessions, and let go of it."""
        self.source.start([session.session_id for session in sessions], 1, 1)
        self.source.finish()

    def _refuse(self, session: Session) -> None:
        """Draft for a session no more."""
        self._refused[session.session_id] = session.epoch
        self._offered.pop(session.session_id, None)
        self._close(session.session_id)

    def finish(self, clock: Callable[[], float]) -> None:
        """Wait for what was begun, and offer it; sessions that have ended meanwhile take it to their graves."""
        if self._begun is None:
            return
        begun, self._begun = self._begun, None
        try:
            chains = self.source.finish()
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self._not_drafted(begun.sessions, error)
            return
        now = clock()
        self.num_passes += 1
        self.verifier.exclude(now - begun.began)
        if begun.is_usual:
            self.choice.learn_draft(len(begun.sessions), begun.depth, now - begun.began)
        self._offer(begun, chains, now)

    def _offer(self, begun: _Begun, chains: Chains, now: float) -> None:
        chances = self.calibration.probabilities(chains.scores)  # [sessions, depth, width]
        scores = np.log(np.maximum(chances, LEAST_CHANCE)).astype(np.float32)
        reach_prob: Float64Array = np.cumprod(chances[:, :, 0], 1, np.float64)
        counts = (chains.token_ids[:, :, 0] >= 0).sum(1).tolist()
        faults = Faults()
        for i, (session, num_there) in enumerate(zip(begun.sessions, counts, strict=True)):
            count = min(num_there, _room(session))
            if not count:
                continue
            is_drawn, node_ids = bool(chains.distributions[i]), list[int]()
            with faults.of(session, "drafted for"):
                if begun.width > 1 or session.num_live or is_drawn:
                    node_ids = self._graft(session, chains, i, count, scores[i], now)
                else:
                    session.offer(Chain(chains.token_ids[i, :count, 0], scores[i, :count, 0], reach_prob[i, :count]))
                self._offered[session.session_id] = _Offered(chains.scores[i, :count, 0], is_drawn, node_ids)
        for session in begun.sessions if faults.found else ():
            if session in faults:
                session.forget_drafts()
                self._refuse(session)

    def _graft(
        self, session: Session, chains: Chains, index: int, count: int, scores: Float32Array, now: float
    ) -> list[int]:
        """Hang a chain with its siblings onto a session's tree; return the ids of the chain's own nodes."""
        width = 1 if session.speculation.max_nodes else None  # all that are allowed are spent on depth
        token_ids = chains.token_ids[index, :count, :width]
        is_there = token_ids >= 0
        sizes = is_there.sum(1).tolist()
        lane = session.lanes.get(COLOCATED_LANE)
        first_id = lane.seen + 1 if lane is not None else 0
        firsts = [first_id + before for before in accumulate(sizes[:-1], initial=0)]
        distributions = chains.distributions[index][:count]
        draft = Draft(
            session_id=session.session_id,
            epoch=session.epoch,
            lane=COLOCATED_LANE,
            base_len=session.length,
            first_id=first_id,
            q_size=max((len(distribution.ids) for distribution in distributions), default=0),
            token_ids=token_ids[is_there],
            parent_ids=np.repeat([-1, *firsts[:-1]], sizes).astype(np.int32),
            scores=scores[:count, :width][is_there].astype(np.float16),
            **pack_distributions(distributions, np.repeat(range(count), sizes).tolist()),
        )
        session.graft(draft, now)
        return firsts

    def hear(self, messages: Iterable[Message]) -> None:
        """Take the verdicts of the step among what the verifier says; learn from what became of the chains."""
        claims: list[Float32Array] = []
        told, right = [], []
        for verdict in messages:
            if not isinstance(verdict, Verdict) or self._epochs.get(verdict.session_id) != verdict.epoch:
                continue
            offered, faults = self._offered.pop(verdict.session_id, None), Faults()
            with faults.of(verdict, "drafted for"):
                followed = self.source.commit(verdict.session_id, verdict.token_ids)
            if verdict in faults:
                self._refused[verdict.session_id] = verdict.epoch
                self._close(verdict.session_id)
                continue
            if offered is not None:
                num_judged = _num_judged(offered, verdict, followed)
                claims.append(offered.claims[:num_judged])
                told.append(num_judged)
                right.append(min(followed, num_judged))
            if verdict.finish:
                self._close(verdict.session_id)
        if claims:
            is_right = np.concatenate([np.arange(n) < m for n, m in zip(told, right, strict=True)])
            self.calibration.observe_all(np.concatenate(claims), is_right)
            self.choice.learn_chains(told, right)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _drafts_for(self, session: Session) -> bool:
        """Does a session decode, with room for drafts, and want them of us?"""
        speculation = session.speculation
        uses_drafts = strategy(session.params.strategy).uses_drafts
        requirements = speculation.mode != "plain" and not speculation.has_fixed_shape and uses_drafts
        return requirements and session.num_pending == 1 and self.verifier.may_run(session) and _room(session) > 0

    def _knows(self, session: Session) -> bool:
        """Open a session at the source if it is new; return whether it is known there."""
        session_id, epoch = session.session_id, session.epoch
        if self._epochs.get(session_id) == epoch:
            return True
        if self._refused.get(session_id) == epoch:
            return False
        faults = Faults()
        self._epochs[session_id] = epoch
        self._is_usual = False
        with faults.of(session, "drafted for"):
            params = drafting_params(session.params, session.speculation)
            self.source.open(session_id, np.array(session.token_ids, np.int32), params)
        if session in faults:
            self._refuse(session)
        return session not in faults

    def _follow(self) -> None:
        """Drop sessions that are gone."""
        for session_id in self._gone(self._epochs):
            self._close(session_id)
        for session_id in self._gone(self._refused):
            del self._refused[session_id]

    def _gone(self, epochs: Mapping[int, int]) -> list[int]:
        sessions = self.verifier.sessions
        return [i for i, epoch in epochs.items() if i not in sessions or sessions[i].epoch != epoch]

    def _close(self, session_id: int) -> None:
        del self._epochs[session_id]
        self.source.close(session_id)


def _room(session: Session) -> int:
    """Return how many levels a session's chain may have; the correction takes one position itself."""
    return longest_chain(session.speculation, session.limit - session.length - 1)


def _num_judged(offered: _Offered, verdict: Verdict, followed: int) -> int:
    """Return how many of a chain's tokens a verdict tells right or wrong: those up to the first that is not committed; of
    drawn ones those that were judged."""
    num_judged = min(followed + 1, len(offered.claims), len(verdict.token_ids))
    if offered.is_drawn:
        judged = set(verdict.node_ids.tolist())
        num_judged = next(
            (i for i, node_id in enumerate(offered.node_ids[:num_judged]) if node_id not in judged), num_judged
        )
    return num_judged
