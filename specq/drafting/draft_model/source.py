"""A draft model in the verifier's own process. Its drafts need no message, and are ready for the very next step.

A round drafts one chain for each session, then comes the step. `begin` gives the device its work. So the host can send
and receive until `collect`. One call grafts all chains onto the trees, in a lane of their own, beside the nodes of
other drafters. Chains with siblings or draft distributions are grafted as ordinary drafts. If that is faster, the step
is launched before the chains are read (`offered_chains`).

Sessions whose trees by other drafters promise enough are left out. So a draft worker on another device can run ahead.
If its drafts fail, this source drafts for the next round.

The draft distributions of this source are trusted. Jobs with a tree shape of their own get trees instead (`shaped`). No
I/O. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import structlog

from specq.drafting.draft_model.chain_sessions import ChainSessions, chosen, rooms_for_chains, without_leads
from specq.drafting.draft_model.level_times import level_times, profiled_sessions
from specq.drafting.draft_model.offered_chains import (
    OfferedChains,
    UsualScores,
    batch_of_unread,
    distinct,
    draft_of_chain,
)
from specq.drafting.draft_model.shaped import ShapedTrees
from specq.drafting.grammar.leads import leads_of
from specq.drafting.interface import ChainDrafter, Chains, Pending
from specq.drafting.worker import LEAST_CHANCE, SIBLING_VALUE
from specq.protocol import (
    COLOCATED,
    COLOCATED_LANE,
    Draft,
    EngineError,
    EngineLostError,
    Float32Array,
    IntpArray,
)
from specq.runtime import Faults, in_halves, traced
from specq.verification import NO_TOKEN, Calibration, DeviceTokens
from specq.verifier.sources import (
    Budget,
    ComputedDrafts,
    DraftBatch,
    DraftSource,
    Rounds,
    Session,
    StepCurve,
    batch_of,
    batch_of_chains,
    may_be_unread,
    put_tokens,
)

log = structlog.get_logger(__name__)

LEAD = 0.5  # share of what a chain promises from which the tree of other drafters is enough
MANY = 16  # sessions from which levels never have siblings
NO_CHAINS = OfferedChains((), np.zeros(1, np.intp), np.zeros((1, 0), np.float32))


@dataclass(frozen=True, slots=True)
class _Begun:
    """Chains that are being drafted."""

    sessions: list[Session]
    depth: int
    width: int

    @property
    def session_ids(self) -> list[int]:
        return [session.session_id for session in self.sessions]


class _Unread(NamedTuple):
    """Chains that are grafted unread.

    begun     the sessions, the depth and the width.
    counts    i64[sessions]: how many levels each session was offered.
    drafted   the tokens that the handles stand for.
    """

    begun: _Begun
    counts: IntpArray
    drafted: DeviceTokens


class ColocatedSource(DraftSource):
    """Drafts a chain for each session.

    chains        the drafter that computes the chains.
    levels        the seconds of one level, by the number of sessions.
    fan_out       the most nodes of a level.
    chain         the most levels.
    is_one_pass   one pass drafts all levels: few levels take as long as many.
    shaped        drafts for jobs with a tree shape of their own. None: these jobs get no drafts.
    is_unread     whether chains are verified before they are read, if that is possible. None: see `Budget.is_unread`.
    """

    name = COLOCATED

    def __init__(
        self,
        chains: ChainDrafter,
        levels: StepCurve,
        *,
        fan_out: int = 3,
        chain: int = 8,
        is_one_pass: bool = False,
        shaped: ShapedTrees | None = None,
        is_unread: bool | None = None,
    ) -> None:
        self.chains, self.fan_out, self.shaped, self._is_unread = chains, fan_out, shaped, is_unread
        self._min_accept_prob = 0.0  # as in the last `Budget`
        self.levels, self.most_levels, self._is_one_pass = levels, chain, is_one_pass
        self.may_be_unread = is_unread is None
        self.calibration = Calibration()
        self._usual = UsualScores(chain, fan_out)
        self._unread: _Unread | None = None
        self._unlearned: tuple[OfferedChains, Rounds, IntpArray] | None = None
        self.num_passes = 0
        self._sessions = ChainSessions(chains)
        self._all_known: Sequence[Session] = ()  # the last sessions drafted for; empty once one of them is closed
        self._offered = NO_CHAINS
        self._begun: _Begun | None = None
        self._pending: Pending[Chains]  # of what was begun

    @property
    def levels_s(self) -> Callable[[int, int], float]:
        """Return seconds for sessions and levels, as in `DraftSource`."""
        return self.draft_s

    def measure_levels(self, max_sessions: int) -> None:
        """Measure the seconds of levels that were only expected."""
        sizes = profiled_sessions(max_sessions)
        self.levels = StepCurve(sizes, level_times(self.chains, sizes, self.most_levels, {1, self.fan_out}))

    def draft_s(self, num_sessions: int, depth: int) -> float:
        """Return the seconds of a draft, as expected at start-up."""
        return (self.most_levels if self._is_one_pass else depth) * self.levels(num_sessions)

    @property
    def level_size(self) -> Callable[[int], int]:
        """Return the most nodes of a level for a number of sessions, as in `DraftSource`."""
        return self._width

    def _width(self, num_sessions: int) -> int:
        return self.fan_out if num_sessions < MANY else 1

    @property
    def has_work(self) -> bool:
        return self._begun is not None or (self.shaped is not None and self.shaped.has_work)

    # --- a round ------------------------------------------------------------------------------------------------------

    def begin(self, sessions: Sequence[Session], budget: Budget, now: float) -> bool:
        """Begin to draft for the sessions that decode, if that pays, and always for those with a shape of their own."""
        self._min_accept_prob = budget.min_accept_prob
        self._sessions.drop_gone()  # before an id that is used again is opened
        has_shapes = self.shaped is not None and self.shaped.begin(sessions)
        return self._begin_chains(sessions, budget) or has_shapes

    def _begin_chains(self, sessions: Sequence[Session], budget: Budget) -> bool:
        self._offered = NO_CHAINS
        rooms = rooms_for_chains(sessions)
        forced = {"has_forced": budget.has_forced, "is_behind": self.chains.takes_forced}
        left = without_leads(chosen(sessions, rooms > 0), LEAD * budget.promised, **forced)
        if left != self._all_known:
            left = self._all_known = [session for session in left if self._knows(session)]
        if left:
            width = self._width(len(left)) if budget.min_accept_prob <= SIBLING_VALUE else 1
            most = int(rooms.max() if len(left) == len(sessions) else rooms_for_chains(left).max())
            self._start(_Begun([*left], min(budget.depth, self.most_levels, most), width), budget)
        return self._begun is not None

    def _start(self, begun: _Begun, budget: Budget) -> None:
        grammars = {one.session_id: one.grammar for one in begun.sessions if one.grammar is not None}
        self.chains.masks = {session_id: grammar.mask_behind for session_id, grammar in grammars.items()}
        forced = {session_id: grammar.forced for session_id, grammar in grammars.items()}
        self.chains.forced = forced if budget.has_forced else {}
        try:
            self._pending = self.chains.start(begun.session_ids, begun.depth, begun.width)
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self._not_drafted(begun.sessions, error)
            return
        self._begun = begun

    def _not_drafted(self, sessions: Sequence[Session], error: Exception) -> None:
        """Stop drafting for the sessions for which the drafter raises an error.

        If it lacks room, or raises for no session alone, end the last session's drafts.
        """
        faults = Faults()
        if isinstance(error, EngineError):
            log.warning("draft_failed", reason=str(error), num_sessions=len(sessions))
        else:
            log.warning("draft_failed", num_sessions=len(sessions), **traced(error))
            in_halves(sessions, self._try, faults, "drafted for")
        for session in [session for session in sessions if session in faults] or sessions[-1:]:
            self.refuse(session)

    def _try(self, sessions: Sequence[Session]) -> None:
        """Draft one token for each of some sessions, and drop it."""
        self.chains.start([session.session_id for session in sessions], 1, 1).collect()

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        """Wait for the chains that were begun, and grow trees of shapes.

        Drafts for sessions that have ended meanwhile have no effect.
        """
        chains = self._collect_chains(budget)
        return chains if self.shaped is None else [*chains, *self.shaped.collect()]

    def _collect_chains(self, budget: Budget) -> Sequence[DraftBatch]:
        begun, self._begun = self._begun, None
        unread = None if begun is None else self._batch_of_unread(begun, budget)
        if unread is not None:  # learning can wait until the step has been launched
            return [unread]
        self._learn()
        if begun is None:
            return ()
        chains = self._finish(begun)
        if chains is None:
            return ()
        leads = leads_of(begun.sessions, budget).batches() if self.chains.takes_forced else []
        return [*leads, *self._batches(begun, chains)]

    def _finish(self, begun: _Begun) -> Chains | None:
        """Wait for the chains that were begun; None if they could not be drafted."""
        try:
            chains = self._pending.collect()
        except EngineLostError:
            raise
        except Exception as error:  # noqa: BLE001 - drafts are hints
            self._not_drafted(begun.sessions, error)
            return None
        self.num_passes += 1
        return chains

    def _batch_of_unread(self, begun: _Begun, budget: Budget) -> DraftBatch | None:
        """Return the chains before the host has read them (`offered_chains`). None: not possible, or not chosen."""
        is_unread = budget.is_unread if self._is_unread is None else self._is_unread
        if not is_unread or self.chains.info.num_tokens > budget.unread_vocab:
            return None
        scores = self._usual.of(begun.depth, begun.width)
        if scores is None or not may_be_unread(begun.sessions, begun.width):
            return None
        counts = self._counts(begun, np.full(len(begun.sessions), begun.depth))
        tokens = self._pending.on_device() if counts.any() else None
        if tokens is None:
            return None
        self._unread = _Unread(begun, counts, DeviceTokens(tokens))
        return batch_of_unread(begun.sessions, self._unread.drafted, counts, scores)

    def read(self, clock: Callable[[], float]) -> None:
        """Wait for chains that are grafted unread, and put their tokens and scores in place; see `DraftSource`."""
        assert self._unread is not None
        self._learn()
        (begun, counts, drafted), self._unread = self._unread, None
        trees = next(session.trees for session, count in zip(begun.sessions, counts, strict=True) if count)
        chains, scores = self._finish(begun), None
        if chains is None:
            values = np.full(drafted.tokens.shape, NO_TOKEN, np.int32)
        else:
            values = distinct(chains.token_ids).swapaxes(0, 1).reshape(-1)
        drafted.read(values)
        if chains is not None:
            scores = self._scores(chains).swapaxes(0, 1).reshape(-1)
            self._offered = OfferedChains(begun.session_ids, counts, chains.scores[:, :, 0])
        put_tokens(trees, values, scores)

    def _counts(self, begun: _Begun, counts: IntpArray) -> IntpArray:
        """Return i64[sessions]: how many levels are offered of chains with `counts` levels."""
        gone = self._sessions.gone
        is_here = np.array([session_id not in gone for session_id in begun.session_ids])
        found: IntpArray = np.clip(rooms_for_chains(begun.sessions), 0, counts) * is_here
        return found

    def _scores(self, chains: Chains) -> Float32Array:
        """Return calibrated scores, f32[sessions, depth, width]. They also update the usual scores."""
        accept_probs = self.calibration.probabilities(chains.scores)  # [sessions, depth, width], given the parent
        self._usual.learn(accept_probs[:, : self.most_levels], chains.token_ids[:, : self.most_levels])
        found: Float32Array = np.log(np.maximum(accept_probs, LEAST_CHANCE)).astype(np.float32)
        return found

    def _batches(self, begun: _Begun, chains: Chains) -> Sequence[DraftBatch]:
        """Return the chains with calibrated scores.

        Chains with siblings or draft distributions are ordinary drafts, all others are arrays.
        """
        scores = self._scores(chains)  # [sessions, depth, width]
        counts = self._counts(begun, (chains.token_ids[:, :, 0] >= 0).sum(1))
        self._offered = OfferedChains(begun.session_ids, counts, chains.scores[:, :, 0])
        offered = np.flatnonzero(counts > 0).tolist()
        drawn = [i for i in offered if begun.width > 1 or chains.distributions[i]]
        alone = offered if not drawn else [i for i in offered if begun.width == 1 and not chains.distributions[i]]
        batches, drafts = list[DraftBatch](), list[tuple[Session, Draft]]()
        for i in drawn:
            draft, node_ids = draft_of_chain(begun.sessions[i], chains, i, scores[i, : counts[i]])
            drafts.append((begun.sessions[i], draft))
            if chains.distributions[i]:
                self._offered.node_ids[i] = node_ids
        if drafts:
            batches.append(batch_of(drafts, is_measured=True))
        if alone:
            nodes = chains.token_ids[alone, :, 0], counts[alone], scores[alone, :, 0]
            sessions = [begun.sessions[i] for i in alone]
            batches.append(batch_of_chains(sessions, COLOCATED_LANE, *nodes, is_measured=True))
        return batches

    def observe(self, rounds: Rounds, computed: Sequence[ComputedDrafts]) -> None:
        """Let contexts follow the rounds. The results of the chains are learned when the next ones are collected."""
        if self.shaped is not None:
            self.shaped.observe(rounds, self._min_accept_prob)
        if rounds.sessions and rounds.sessions == self._all_known:
            self._follow(rounds)
        else:
            self._follow_some(rounds)
        self._sessions.drop_gone()

    def _follow_some(self, rounds: Rounds) -> None:
        """Let the source follow the rounds of the sessions that it knows."""
        known = self._sessions.known
        which = [i for i, session in enumerate(rounds.sessions) if known.get(session.session_id) is session]
        if which:
            self._follow(rounds if len(which) == len(rounds) else rounds.take(np.array(which, np.intp)))

    def _follow(self, rounds: Rounds) -> None:
        """Let the source follow rounds; it knows all of their sessions."""
        faults = Faults()
        num_followed = self._sessions.commit(rounds, faults)
        if faults.found:
            for session in [session for session in rounds.sessions if session in faults]:
                self.refuse(session)
            rest = np.array([i for i, one in enumerate(rounds.sessions) if one not in faults], np.intp)
            rounds, num_followed = rounds.take(rest), num_followed[rest]
        self._unlearned, self._offered = (self._offered, rounds, num_followed), NO_CHAINS
        for i in rounds.sessions[0].trees.has_ended[rounds.places].nonzero()[0].tolist() if len(rounds) else ():
            self.close(rounds.sessions[i])

    def _learn(self) -> None:
        """Learn from the results of the last round's chains.

        It comes after the next chains have begun, because the device would wait for it.
        """
        if self._unlearned is None:
            return
        (offered, rounds, num_followed), self._unlearned = self._unlearned, None
        outcomes = offered.outcomes(rounds, num_followed)
        if len(outcomes.scores):
            self.calibration.observe_all(*outcomes)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def _knows(self, session: Session) -> bool:
        """Open a session at the chain drafter if it is new; return whether the drafter knows it."""
        if session.session_id in self._sessions.known:
            return True
        if session.session_id in self._sessions.refused:
            return False
        is_known = self._sessions.open(session)
        if not is_known:
            self.refuse(session)
        return is_known

    def refuse(self, session: Session) -> None:
        """Stop drafting for a session."""
        self.close(session)
        self._sessions.refuse(session)
        if self.shaped is not None:
            self.shaped.refuse(session)

    def close(self, session: Session) -> None:
        """Forget a session."""
        self._all_known = ()
        self._offered.pop(session.session_id)
        if self.shaped is not None:
            self.shaped.close(session)
        self._sessions.close(session)
