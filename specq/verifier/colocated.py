"""A drafter in the verifier's own process: its drafts need no message, and are there for the very next step.

A round is one chain for each session, then the step. `begin` gives the device its work, so that the host can send and receive
until `finish`. The chains of all sessions are grafted in one call (`graft_chains`), in a lane of their own; those whose levels have
siblings or draft distributions like any draft.

Sessions whose trees by other drafters promise much already are left out: a draft worker on another device runs ahead, and
where it failed, this drafter drafts for the next round.

Its draft distributions are trusted. Jobs that ask for a shape of their own are left to draft workers. No I/O; time is an
argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import structlog

from specq.drafting import LEAST_CHANCE, SIBLING_VALUE, Calibration, drafting_params, longest_chain
from specq.proposers import Chains, ChainSource
from specq.protocol import EngineError, EngineLostError, Float32Array, Message, Verdict
from specq.runtime import Faults, in_halves, traced
from specq.verification import strategy
from specq.verifier.core import Verifier
from specq.verifier.grafting import graft, graft_chains
from specq.verifier.offered_chains import OfferedChain, Outcome, draft_of_chain
from specq.verifier.round_choice import OtherLoad, RoundChoice
from specq.verifier.scheduler import promised
from specq.verifier.session import Session
from specq.verifier.step_curve import StepCurve
from specq.verifier.trees import NONE

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


class ColocatedDrafter:
    """A source of chains, and the verifier whose sessions it drafts for.

    `levels`: the seconds that one level takes, by the number of sessions; `chain`: levels at most, each of at most `fan_out`
    children.
    """

    def __init__(
        self, source: ChainSource, verifier: Verifier, levels: StepCurve, *, fan_out: int = 3, chain: int = 8
    ) -> None:
        self.source, self.verifier, self.fan_out = source, verifier, fan_out
        self.choice = RoundChoice(levels, chain)
        self.calibration = Calibration()
        self.num_passes = 0
        self._epochs: dict[int, int] = {}  # of the sessions that the source knows
        self._refused: dict[int, int] = {}  # epochs of those for which it drafts no more
        self._offered: dict[int, OfferedChain] = {}
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
        sessions, other_load = self._without_leads(sessions[: self.verifier.max_sessions])
        depth = self.choice.choose(len(sessions), self.verifier.curve, other_load) if sessions else 0
        if not depth:
            sessions, depth = [session for session in sessions if session.is_sync], self.choice.most
        most = max(map(_room, sessions), default=0)
        sessions = [session for session in sessions if self._knows(session)]
        is_usual, self._is_usual = self._is_usual, bool(sessions)
        if sessions:
            width = self.fan_out if len(sessions) < MANY and self.verifier.min_accept_prob <= SIBLING_VALUE else 1
            self._start(_Begun(sessions, min(depth, most), width, now, is_usual))

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
            self.source.start([session.session_id for session in begun.sessions], begun.depth, begun.width)
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
            self._refuse(session)

    def _try(self, sessions: Sequence[Session]) -> None:
        """Draft a token for each of some sessions, and drop it."""
        self.source.start([session.session_id for session in sessions], 1, 1)
        self.source.finish()

    def _refuse(self, session: Session | Verdict) -> None:
        """Draft no more for a session."""
        self._refused[session.session_id] = session.epoch
        self._offered.pop(session.session_id, None)
        self._close(session.session_id)

    def finish(self, clock: Callable[[], float]) -> None:
        """Wait for the chains that were begun, and offer them; those of sessions that have ended meanwhile have no effect."""
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
        """Give each session its chain; forget the drafts of a session for which that raises."""
        accept_probs = self.calibration.probabilities(chains.scores)  # [sessions, depth, width], given the parent
        scores = np.log(np.maximum(accept_probs, LEAST_CHANCE)).astype(np.float32)  # [sessions, depth, width]
        counts = (chains.token_ids[:, :, 0] >= 0).sum(1).tolist()
        faults, plain = Faults(), dict[int, int]()  # session id -> place among the chains
        for i, (session, num_there) in enumerate(zip(begun.sessions, counts, strict=True)):
            count = counts[i] = min(num_there, _room(session))
            if not count or session.place == NONE:
                continue
            is_drawn, node_ids = bool(chains.distributions[i]), list[int]()
            with faults.of(session, "drafted for"):
                if begun.width > 1 or is_drawn:
                    node_ids = _graft(session, chains, i, scores[i, :count], now)
                else:
                    plain[session.session_id] = i
                self._offered[session.session_id] = OfferedChain(chains.scores[i, :count, 0], is_drawn, node_ids)

        def hang(sessions: Sequence[Session]) -> None:
            which = [plain[session.session_id] for session in sessions]
            lengths = np.array(counts, np.int64)[which]
            graft_chains(sessions, chains.token_ids[which, :, 0], lengths, scores[which, :, 0], now)

        in_halves([begun.sessions[i] for i in plain.values()], hang, faults, "drafted for")
        for session in begun.sessions if faults.found else ():
            if session in faults:
                session.forget_drafts()
                self._refuse(session)

    def observe(self, messages: Iterable[Message]) -> None:
        """Take the verdicts among the messages of a step: contexts follow them, and what became of the chains is learned."""
        outcomes, faults = list[Outcome](), Faults()
        for verdict in messages:
            if isinstance(verdict, Verdict) and self._epochs.get(verdict.session_id) == verdict.epoch:
                outcome = self._commit(verdict, faults)
                if outcome is not None:
                    outcomes.append(outcome)
        if outcomes:
            scores = np.concatenate([outcome.scores for outcome in outcomes])
            is_accepted = np.concatenate([np.arange(one.num_judged) < one.num_accepted for one in outcomes])
            self.calibration.observe_all(scores, is_accepted)
            self.choice.learn_chains([one.num_judged for one in outcomes], [one.num_accepted for one in outcomes])

    def _commit(self, verdict: Verdict, faults: Faults) -> Outcome | None:
        """Let the source follow a verdict; return what became of the session's chain, if it had one."""
        offered = self._offered.pop(verdict.session_id, None)
        with faults.of(verdict, "drafted for"):
            num_followed = self.source.commit(verdict.session_id, verdict.token_ids)
        if verdict in faults:
            self._refuse(verdict)
            return None
        if verdict.finish:
            self._close(verdict.session_id)
        return offered.outcome(verdict, num_followed) if offered is not None else None

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _drafts_for(self, session: Session) -> bool:
        """Return whether a session decodes, has room for drafts and takes them from this drafter."""
        speculation = session.speculation
        uses_drafts = strategy(session.params.strategy).uses_drafts
        takes_ours = speculation.mode != "plain" and not speculation.has_fixed_shape and uses_drafts
        return takes_ours and session.num_pending == 1 and self.verifier.may_run(session) and _room(session) > 0

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


def _promised(session: Session) -> float:
    """Return how many tokens a session's tree promises; 0 where that raises, which the verifier's own plan reports."""
    with Faults().of(session, "drafted for"):
        return promised(session)
    return 0.0


def _graft(session: Session, chains: Chains, index: int, scores: Float32Array, now: float) -> list[int]:
    """Hang a chain with its siblings onto a session's tree; return the ids of the chain's own nodes."""
    draft, node_ids = draft_of_chain(session, chains, index, scores)
    graft(session, draft, now)
    return node_ids
