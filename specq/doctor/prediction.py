"""What each method of drafting would bring for some sessions at a time, computed from what was measured on this
machine.

A round is a step of the target and what comes before it. For n sessions whose rounds go d levels deep

    tokens     n * (1 + the mean number of levels that were accepted, of the first d); of a lookahead window with fewer
               columns than at the measurement, as much less
    rows       n, and the nodes that were verified in the first d levels of n rounds, and the scratch rows
    seconds    the mean of step curve(rows) over the rounds, n at a time, + the host's time for n sessions + the
               method's own time

and d is the depth with the most tokens a second; a colocated draft model's is the one that its own rule chooses for n
sessions (`specq.verifier.control.policy`), by what was learned in the measurement. Tokens and rows come from
rounds of the real pair on a few prompts, cut at depth d (`PredictedRounds`), the step curve from steps of so many rows.
So siblings, and that unlikely nodes are not verified, count as they were measured.

A draft worker drafts while the target steps, so its own time costs nothing, but it may be late. Its rounds alternate
between two states (`worker`): nothing is there, so the step gives one token, and the chain that is drafted meanwhile
fits if its first token is that one; and a chain of m levels is there, which goes on if it is accepted as a whole and
the token after it was foreseen, too. Its tokens and its rows come from the same rounds, those in which the draft model
drafted: a level counts as not accepted also where a round did not go so deep.

A token is a row: no prediction is beyond the most rows a second of the step curve (`most_rows_per_s`), which is
asserted.

Not in it: prompts, sockets and other processes, contexts longer than those of the measurement, and several methods at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

from specq.protocol import COLOCATED, DRAFT_WORKER, LANES, SHOWN
from specq.verifier import best_by_goodput

PLAIN, WORKER = "plain", "worker"
NAMES = {
    PLAIN: "plain decoding",
    **{method: SHOWN[method] for method in LANES},
    WORKER: f"one {SHOWN[DRAFT_WORKER]}",
}
ROUNDING = 1e-6
NODES_A_PASS = 8  # that a draft worker expands in a pass, for all its sessions together (`draft.width`)

Curve = Callable[[int], float]  # rows, or sessions -> seconds


@dataclass(frozen=True, slots=True)
class PredictedRound:
    """How many drafted tokens a round accepted, and how many nodes were verified at each depth, from the first on."""

    accepted: int
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PredictedRounds:
    """Measured rounds of one method."""

    rounds: tuple[PredictedRound, ...]

    @property
    def deepest(self) -> int:
        return max((len(one.nodes) for one in self.rounds), default=0)

    def tokens(self, depth: int) -> float:
        """Return the mean tokens of a round, the target's own included, of which drafts end at this depth."""
        return 1 + sum(min(one.accepted, depth) for one in self.rounds) / max(len(self.rounds), 1)

    def nodes(self, depth: int) -> float:
        """Return the mean number of nodes that are verified in a round, up to this depth."""
        return sum(sum(one.nodes[:depth]) for one in self.rounds) / max(len(self.rounds), 1)

    def step_s(self, step: Curve, num_sessions: int, rows: float, depth: int, share: float = 1.0) -> float:
        """Return the mean seconds of a step with `rows`, and with this part of the nodes up to this depth of so many
        rounds. Steps of 1 and of 9 rows take longer than two of 5, so it is not the time of the mean."""
        if not self.rounds:
            return step(round(rows))
        nodes = np.array([sum(one.nodes[:depth]) for one in self.rounds])
        apart = max(len(nodes) // num_sessions, 1)  # rounds of one text are alike
        which = np.arange(len(nodes))[:, None] + apart * np.arange(num_sessions)
        together = rows + share * nodes[which % len(nodes)].sum(1)
        return sum(step(ceil(count - ROUNDING)) for count in together.tolist()) / len(nodes)

    @property
    def drafted(self) -> PredictedRounds:
        """Those in which something was drafted."""
        return PredictedRounds(tuple(one for one in self.rounds if one.nodes))

    def reach_probs(self) -> list[float]:
        """Return how often a round accepted so many levels at least, from 1 on."""
        count = max(len(self.rounds), 1)
        return [sum(one.accepted >= depth for one in self.rounds) / count for depth in range(1, self.deepest + 1)]

    def accept_probs(self) -> list[float]:
        """Return how often a level was accepted, depth by depth, where the level before it was and nodes stood
        there."""
        found = []
        for depth in range(1, self.deepest + 1):
            tried = [one for one in self.rounds if len(one.nodes) >= depth and one.accepted >= depth - 1]
            if not tried:
                break
            found.append(sum(one.accepted >= depth for one in tried) / len(tried))
        return found


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured of the machine.

    step, unhelped_step   seconds of a step by its rows: as the engine is, and while other processes have the other
                          cores; measured together, and the second never less than the first (`hardware`)
    host_s, host_more_s   what a round takes besides its step: with one session, and more with each further one
    level                 seconds of a level of the colocated draft model, by sessions; None: there is none
    pass_s                seconds of a draft worker's pass on its own core; 0: there is none
    num_places            tokens that a pass of the draft model foresees: of a parallel one more than one
    """

    step: Curve
    unhelped_step: Curve
    host_s: float
    host_more_s: float
    level: Curve | None = None
    pass_s: float = 0.0
    num_places: int = 1

    def host(self, num_sessions: int) -> float:
        """Return the seconds that the host takes for a round of so many sessions."""
        return self.host_s + self.host_more_s * (num_sessions - 1)


@dataclass(frozen=True, slots=True)
class PredictedMethod:
    """What was measured of a method with one session: its rounds; own_s: what one takes beyond plain decoding's and its
    rows; scratch: each session's rows besides its nodes, by the number of sessions; levels: how deep it drafts for so
    many sessions, where it decides that itself before it drafts."""

    name: str
    rounds: PredictedRounds
    own_s: float = 0.0
    scratch: Curve = lambda _: 0.0
    levels: Callable[[int], int] | None = None

    def share(self, num_sessions: int) -> float:
        """Return which part of its scratch rows a session still has among so many."""
        rows = self.scratch(1)
        return min(self.scratch(num_sessions) / rows, 1.0) if rows else 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a method would bring: `ratio` is to plain decoding, `depth` the levels of a draft."""

    method: str
    num_sessions: int
    tokens_per_second: float
    ratio: float
    depth: int = 0


def predict(methods: Sequence[PredictedMethod], costs: Costs, sessions: Sequence[int]) -> list[Prediction]:
    """Return what each method, and plain decoding, would bring for these numbers of sessions."""
    return [found for count in sessions for found in _for_sessions(methods, costs, count)]


def _for_sessions(methods: Sequence[PredictedMethod], costs: Costs, num_sessions: int) -> list[Prediction]:
    plain = num_sessions / (costs.step(num_sessions) + costs.host(num_sessions))
    most = max((_most_rows(method, num_sessions) for method in methods), default=num_sessions)
    bound = most_rows_per_s(costs.step, most)
    rates = {method.name: beside(method, costs, num_sessions) for method in methods}
    drafted = next((method for method in methods if method.name == COLOCATED), None)
    if drafted is not None and costs.pass_s:
        rates[WORKER] = worker(drafted.rounds, costs, num_sessions)
    assert all(rate <= bound * (1 + ROUNDING) for rate, _ in rates.values()), "a token needs a row"
    found = [Prediction(name, num_sessions, rate, rate / plain, depth) for name, (rate, depth) in rates.items()]
    return [Prediction(PLAIN, num_sessions, plain, 1.0), *found]


def _most_rows(method: PredictedMethod, num_sessions: int) -> int:
    """Return the most rows that a step of so many sessions has with a method."""
    nodes = max((sum(one.nodes) for one in method.rounds.rounds), default=0)
    return ceil(num_sessions * (1 + method.scratch(num_sessions) + nodes))


def most_rows_per_s(step: Curve, most_rows: int) -> float:
    """Return the most rows a second that steps of at most so many rows compute."""
    return max(rows / step(rows) for rows in range(1, most_rows + 1))


def beside(method: PredictedMethod, costs: Costs, num_sessions: int) -> tuple[float, int]:
    """Return tokens a second, and at which depth, of a method that drafts in the verifier's process before each
    step."""
    if method.levels is not None:
        depth = method.levels(num_sessions)
        tokens, seconds = _goodput(method, costs, num_sessions, depth)
        return tokens / seconds, depth
    depths = range(1, method.rounds.deepest + 1) or (0,)
    best, rate = best_by_goodput(*zip(*(_goodput(method, costs, num_sessions, one) for one in depths), strict=True))
    return rate, depths[best]


def _goodput(method: PredictedMethod, costs: Costs, num_sessions: int, depth: int) -> tuple[float, float]:
    """Return the tokens and the seconds of a round."""
    share = method.share(num_sessions)
    rows = num_sessions * (1 + method.scratch(num_sessions))
    tokens = 1 + share * (method.rounds.tokens(depth) - 1)
    step_s = method.rounds.step_s(costs.step, num_sessions, rows, depth, share)
    return num_sessions * tokens, step_s + costs.host(num_sessions) + own_s(method, costs, num_sessions, depth)


def own_s(method: PredictedMethod, costs: Costs, num_sessions: int, depth: int) -> float:
    """Return the seconds of a method's own for a round: of a draft model as its levels are, those of a parallel one in
    a single pass; of all else once for each session."""
    usual = method.levels(1) if method.levels is not None else 0
    if not usual or costs.level is None:
        return num_sessions * method.own_s
    passes = depth / usual if costs.num_places == 1 else float(depth > 0)
    return method.own_s * passes * costs.level(num_sessions) / costs.level(1)


def worker(rounds: PredictedRounds, costs: Costs, num_sessions: int) -> tuple[float, int]:
    """Return tokens a second, and at which depth, with one draft worker of the draft model whose rounds these are."""
    rounds = rounds.drafted
    reach = rounds.reach_probs()
    pass_s = costs.pass_s * max(1.0, num_sessions * nodes_a_level(rounds) / NODES_A_PASS)
    plain_s = costs.unhelped_step(num_sessions) + costs.host(num_sessions)
    # One level less than are drafted meanwhile: the first must be the token that the step itself gives.
    depth = min(int(plain_s / pass_s) * costs.num_places - 1, len(reach))
    if depth < 1:
        return num_sessions / plain_s, 0
    goes_on = reach[depth] if depth < len(reach) else _beyond(reach)
    share = reach[0] / max(reach[0] + 1 - goes_on, 1e-9)  # of rounds that find a chain
    chain_s = rounds.step_s(costs.unhelped_step, num_sessions, num_sessions, depth) + costs.host(num_sessions)
    tokens = num_sessions * (1 + share * sum(reach[:depth]))
    return tokens / (share * chain_s + (1 - share) * plain_s), depth


def _beyond(reach: Sequence[float]) -> float:
    """Return how likely a level more than the deepest would be reached, if it were accepted as often as that one."""
    before = reach[-2] if len(reach) > 1 else 1.0
    return reach[-1] ** 2 / before if before else 0.0


def nodes_a_level(rounds: PredictedRounds) -> float:
    """Return the mean number of nodes at a depth at which there are some."""
    levels = [count for one in rounds.rounds for count in one.nodes]
    return sum(levels) / max(len(levels), 1) or 1.0


def significant(value: float, digits: int = 3) -> float:
    """Return a value with so many digits that say something: what was measured for some seconds has no more."""
    return float(f"{value:.{digits}g}")
