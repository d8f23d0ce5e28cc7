"""A draft model in the verifier's own process: its drafts need no message, and are there for the very next step.

A round is one chain for each session, then the step. `begin` gives the device its work, so that the host can send and receive
until `collect`. All chains go onto the trees in one call, in a lane of their own, beside what other drafters have there; those with siblings or
draft distributions as drafts like any other.

Sessions whose trees by other drafters promise much already are left out: a draft worker on another device runs ahead, and
where it failed, this drafter drafts for the next round.

Its draft distributions are trusted. Jobs that ask for a shape of their own get trees instead (`shaped`). No I/O; time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from specq.drafting import LEAST_CHANCE, SIBLING_VALUE, Calibration, drafting_params, longest_chain
from specq.proposers import Chains, ChainSource
from specq.protocol import (
    COLOCATED_LANE,
    Draft,
    EngineError,
    EngineLostError,
    Int64Array,
)
from specq.runtime import Faults, in_halves, traced
from specq.verifier.arms import COLOCATED
from specq.verifier.grafting import DraftBatch, batch_of, batch_of_chains
from specq.verifier.rounds import Round
from specq.verifier.scheduler import promised
from specq.verifier.session import Session
from specq.verifier.sources.interface import Budget, Computed, DraftSource
from specq.verifier.sources.offered_chains import OfferedChain, Outcome, draft_of_chain
from specq.verifier.sources.round_choice import OtherLoad, RoundChoice
from specq.verifier.sources.shaped import ShapedDrafter
from specq.verifier.step_curve import StepCurve

log = structlog.get_logger(__name__)

LEAD = 0.5  # share of what a chain promises from which the tree of other drafters is enough
MANY = 16  # sessions from which levels never have siblings


@dataclass(frozen=True, slots=True)
class _Begun:
    """Chains that are being drafted."""

    sessions: list[Session]
    depth: int
    width: int
    began: float
    is_usual: bool  # contexts were computed but for the last round's tokens


class ColocatedDrafter(DraftSource):
    """Drafts with a source of chains.

    `levels`: the seconds that one level takes, by the number of sessions; `chain`: levels at most, each of at most `fan_out`
    children; `shaped`: what drafts for jobs that ask for a shape; None: nothing does.
    """

    name = COLOCATED

    def __init__(
        self,
        chains: ChainSource,
        levels: StepCurve,
        *,
        fan_out: int = 3,
        chain: int = 8,
        shaped: ShapedDrafter | None = None,
    ) -> None:
        self.chains, self.fan_out, self.shaped = chains, fan_out, shaped
        self._min_accept_prob = 0.0  # as in the last `Budget`
        self.choice = RoundChoice(levels, chain)
        self.calibration = Calibration()
        self.num_passes = 0
        self._known: dict[int, Session] = {}  # the sessions that the source of chains knows
        self._refused: dict[int, Session] = {}  # those for which it drafts no more
        self._gone: list[int] = []  # sessions that have been closed since the last round
        self._offered: dict[int, OfferedChain] = {}
        self._begun: _Begun | None = None
        self._is_usual = False

    @property
    def has_work(self) -> bool:
        return self._begun is not None or (self.shaped is not None and self.shaped.has_work)

    # --- a round ------------------------------------------------------------------------------------------------------

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Begin to draft for the sessions that decode, if that pays; for those with a shape of their own in any case."""
        self._min_accept_prob = budget.min_accept_prob
        has_shapes = self.shaped is not None and self.shaped.begin(sessions)
        return self._begin_chains(sessions, budget, now) or has_shapes

    def _begin_chains(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        self._offered.clear()
        self._drop_gone()
        left, other_load = self._without_leads([session for session in sessions if _takes_chains(session)])
        depth = self.choice.choose(len(left), budget.curve, other_load) if left else 0
        if not depth:
            left, depth = [session for session in left if session.is_sync], self.choice.most
        most = max(map(_room, left), default=0)
        left = [session for session in left if self._knows(session)]
        is_usual, self._is_usual = self._is_usual, bool(left)
        if left:
            width = self.fan_out if len(left) < MANY and budget.min_accept_prob <= SIBLING_VALUE else 1
            self._start(_Begun(left, min(depth, most), width, now, is_usual))
        return self._begun is not None

    def _without_leads(self, sessions: Sequence[Session]) -> tuple[list[Session], OtherLoad]:
        """Return the sessions whose trees by other drafters do not promise enough, and what the others add to the step."""
        left, rows, tokens = [], 0, 0.0
        enough = LEAD * self.choice.promise()
        for session in sessions:
            tokens_promised = _promised(session) if session.num_live else 0.0
            if tokens_promised < enough or session.is_sync:
                left.append(session)
            else:
                rows, tokens = rows + 1 + session.num_live, tokens + 1 + tokens_promised
        return left, OtherLoad(rows, tokens)

    def _start(self, begun: _Begun) -> None:
        try:
            self.chains.start([session.session_id for session in begun.sessions], begun.depth, begun.width)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self._not_drafted(begun.sessions, error)
            return
        self._begun = begun

    def _not_drafted(self, sessions: Sequence[Session], error: Exception) -> None:
        """Draft no more for the sessions for which the source raises this. If it lacks room, or raises for no session alone, draft
        no more for the last."""
        faults = Faults()
        if isinstance(error, EngineError):
            log.warning("draft_failed", reason=str(error), num_sessions=len(sessions))
        else:
            log.warning("draft_failed", num_sessions=len(sessions), **traced(error))
            in_halves(sessions, self._try, faults, "drafted for")
        for session in [session for session in sessions if session in faults] or sessions[-1:]:
            self.refuse(session)

    def _try(self, sessions: Sequence[Session]) -> None:
        """Draft a token for each of some sessions, and drop it."""
        self.chains.start([session.session_id for session in sessions], 1, 1)
        self.chains.finish()

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Wait for the chains that were begun, and grow trees of shapes; those of sessions that have ended meanwhile have no effect."""
        chains = self._collect_chains(clock)
        return chains if self.shaped is None else [*chains, *self.shaped.collect()]

    def _collect_chains(self, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        if self._begun is None:
            return ()
        begun, self._begun = self._begun, None
        try:
            chains = self.chains.finish()
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self._not_drafted(begun.sessions, error)
            return ()
        self.num_passes += 1
        if begun.is_usual:
            self.choice.learn_draft(len(begun.sessions), begun.depth, clock() - begun.began)
        return self._batches(begun, chains)

    def _batches(self, begun: _Begun, chains: Chains) -> Sequence[DraftBatch]:
        """Return the chains with calibrated scores: those that stand alone as arrays, those with siblings or draft distributions as
        drafts."""
        accept_probs = self.calibration.probabilities(chains.scores)  # [sessions, depth, width], given the parent
        scores = np.log(np.maximum(accept_probs, LEAST_CHANCE)).astype(np.float32)  # [sessions, depth, width]
        counts: Int64Array = (chains.token_ids[:, :, 0] >= 0).sum(1)
        alone, drafts = list[int](), list[tuple[Session, Draft]]()  # places among the chains; drafts
        for i, session in enumerate(begun.sessions):
            count = counts[i] = min(int(counts[i]), _room(session))
            if not count or session.session_id in self._gone:
                continue
            is_drawn, node_ids = bool(chains.distributions[i]), list[int]()
            if begun.width > 1 or is_drawn:
                draft, node_ids = draft_of_chain(session, chains, i, scores[i, :count])
                drafts.append((session, draft))
            else:
                alone.append(i)
            self._offered[session.session_id] = OfferedChain(chains.scores[i, :count, 0], is_drawn, node_ids)
        batches = [batch_of(drafts, is_measured=True)] if drafts else []
        if alone:
            nodes = chains.token_ids[alone, :, 0], counts[alone], scores[alone, :, 0]
            sessions = [begun.sessions[i] for i in alone]
            batches.append(batch_of_chains(sessions, COLOCATED_LANE, *nodes, is_measured=True))
        return batches

    def observe(self, rounds: Sequence[Round], computed: Sequence[Computed]) -> None:
        """Let contexts follow the rounds, and learn what became of the chains."""
        if self.shaped is not None:
            self.shaped.observe(rounds, self._min_accept_prob)
        outcomes, faults = list[Outcome](), Faults()
        for done in rounds:
            if self._known.get(done.session.session_id) is done.session:
                outcome = self._follow(done, faults)
                if outcome is not None:
                    outcomes.append(outcome)
        if outcomes:
            scores = np.concatenate([outcome.scores for outcome in outcomes])
            is_accepted = np.concatenate([np.arange(one.num_judged) < one.num_accepted for one in outcomes])
            self.calibration.observe_all(scores, is_accepted)
            self.choice.learn_chains([one.num_judged for one in outcomes], [one.num_accepted for one in outcomes])
        self._drop_gone()

    def _follow(self, done: Round, faults: Faults) -> Outcome | None:
        """Let the source follow a round; return what became of the session's chain, if it had one."""
        session = done.session
        offered = self._offered.pop(session.session_id, None)
        with faults.of(session, "drafted for"):
            num_followed = self.chains.commit(session.session_id, done.token_ids)
        if session in faults:
            self.refuse(session)
            return None
        if session.finish:
            self.close(session)
        return offered.outcome(done, num_followed) if offered is not None else None

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _knows(self, session: Session) -> bool:
        """Open a session at the source of chains if it is new; return whether it is known there."""
        session_id = session.session_id
        if session_id in self._known:
            return True
        if session_id in self._refused:
            return False
        faults = Faults()
        self._known[session_id] = session
        self._is_usual = False
        with faults.of(session, "drafted for"):
            params = drafting_params(session.params, session.speculation)
            self.chains.open(session_id, np.array(session.token_ids, np.int32), params)
        if session in faults:
            self.refuse(session)
        return session not in faults

    def refuse(self, session: Session) -> None:
        """Draft no more for a session."""
        self.close(session)
        self._refused[session.session_id] = session
        if self.shaped is not None:
            self.shaped.refuse(session)

    def close(self, session: Session) -> None:
        """Forget a session. The source of chains, which may be drafting for it now, does so between two rounds."""
        session_id = session.session_id
        self._refused.pop(session_id, None)
        self._offered.pop(session_id, None)
        if self.shaped is not None:
            self.shaped.close(session)
        if self._known.pop(session_id, None) is not None:
            self._gone.append(session_id)

    def _drop_gone(self) -> None:
        for session_id in self._gone:
            self.chains.close(session_id)
        self._gone.clear()


def _takes_chains(session: Session) -> bool:
    """Return whether a session has room for drafts and takes them from this drafter."""
    return session.takes_drafts and not session.speculation.has_fixed_shape and _room(session) > 0


def _room(session: Session) -> int:
    """Return how many levels a session's chain may have; the correction takes one position itself."""
    return longest_chain(session.speculation, session.limit - session.length - 1)


def _promised(session: Session) -> float:
    """Return how many tokens a session's tree promises; 0 where that raises, which the verifier's own plan reports."""
    with Faults().of(session, "drafted for"):
        return promised(session)
    return 0.0
