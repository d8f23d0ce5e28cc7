"""The predicted effect of each drafting method, computed from measurements here.

A round is a step of the target and the work before it. These are the figures of n sessions whose rounds go d levels
deep:

    tokens     n * (1 + the mean number of accepted levels among the first d); less in proportion for a lookahead
               window with fewer columns than at the measurement
    rows       n, the nodes that were verified in the first d levels of n rounds, and the scratch rows
    seconds    the mean of step curve(rows) over the rounds, n at a time, + the host's time for n sessions + the
               method's own time

d is the depth with the most tokens a second. A colocated draft model has the depth of its own rule for n sessions
(`specq.verifier.control.policy`). The rule learns from the measurement.

Tokens and rows come from the pair's real rounds on a few prompts, cut at depth d (`PredictedRounds`). The step curve
comes from steps with that number of rows. So siblings, and unlikely nodes that are not verified, count as measured.

A draft worker drafts while the target steps. So its own time is free, but its drafts may be late. Its rounds alternate
between two states (`worker`). In the first, no draft has arrived, so the step gives one token. The chain drafted
meanwhile fits if its first token is this token. In the second, there is a chain of m levels. It continues if all its
tokens are accepted and the next token was predicted too.

A draft worker's tokens and rows come from rounds with the draft model's drafts. A level that a round did not reach
counts as not accepted.

A token is a row. So no prediction exceeds the step curve's most rows a second (`most_rows_per_s`). This is asserted.

Not included: prompts, sockets, other processes, longer contexts, and several methods at a time.
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
NODES_A_PASS = 8  # that a draft worker expands in a pass, for all its sessions (`draft.width`)

Curve = Callable[[int], float]  # rows, or sessions -> seconds


@dataclass(frozen=True, slots=True)
class PredictedRound:
    """The drafted tokens that a round accepted, and the nodes verified at each depth."""

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
        """Return a round's mean tokens, the target's own included, with drafts to this depth."""
        return 1 + sum(min(one.accepted, depth) for one in self.rounds) / max(len(self.rounds), 1)

    def nodes(self, depth: int) -> float:
        """Return the mean number of verified nodes of a round, down to this depth."""
        return sum(sum(one.nodes[:depth]) for one in self.rounds) / max(len(self.rounds), 1)

    def step_s(self, step: Curve, num_sessions: int, rows: float, depth: int, share: float = 1.0) -> float:
        """Return the mean seconds of a step with `rows`, and with the nodes of `num_sessions` rounds.

        depth  the nodes count down to this depth.
        share  the fraction of the nodes that counts.

        Steps of 1 and of 9 rows take longer than two of 5. So this is not the time of the mean.
        """
        if not self.rounds:
            return step(round(rows))
        nodes = np.array([sum(one.nodes[:depth]) for one in self.rounds])
        apart = max(len(nodes) // num_sessions, 1)  # successive rounds of one text are similar
        which = np.arange(len(nodes))[:, None] + apart * np.arange(num_sessions)
        together = rows + share * nodes[which % len(nodes)].sum(1)
        return sum(step(ceil(count - ROUNDING)) for count in together.tolist()) / len(nodes)

    @property
    def drafted(self) -> PredictedRounds:
        """The rounds with drafts."""
        return PredictedRounds(tuple(one for one in self.rounds if one.nodes))

    def reach_probs(self) -> list[float]:
        """Return how often a round accepted at least this number of levels, from 1 on."""
        count = max(len(self.rounds), 1)
        return [sum(one.accepted >= depth for one in self.rounds) / count for depth in range(1, self.deepest + 1)]

    def accept_probs(self) -> list[float]:
        """Return how often a level was accepted, by depth.

        Only rounds count whose level before it was accepted and that had nodes there.
        """
        found = []
        for depth in range(1, self.deepest + 1):
            tried = [one for one in self.rounds if len(one.nodes) >= depth and one.accepted >= depth - 1]
            if not tried:
                break
            found.append(sum(one.accepted >= depth for one in tried) / len(tried))
        return found


@dataclass(frozen=True, slots=True)
class Costs:
    """The measured times of the machine.

    step, unhelped_step  seconds of a step by its rows. The first is for all cores, the second while other processes
                         have the other cores. Both are measured together, and the second is never less than the first
                         (`hardware`).
    host_s        time of a round besides its step, with one session.
    host_more_s   the same for each further session.
    level         seconds of a level of the colocated draft model, by sessions; None: there is none.
    pass_s        seconds of a draft worker's pass on its own core; 0: there is none.
    num_places    tokens that a pass of the draft model predicts; more than one for a parallel one.
    """

    step: Curve
    unhelped_step: Curve
    host_s: float
    host_more_s: float
    level: Curve | None = None
    pass_s: float = 0.0
    num_places: int = 1

    def host(self, num_sessions: int) -> float:
        """Return the host's seconds for a round of `num_sessions` sessions."""
        return self.host_s + self.host_more_s * (num_sessions - 1)


@dataclass(frozen=True, slots=True)
class PredictedMethod:
    """The measurements of a method with one session.

    rounds   its rounds.
    own_s    the time of a round beyond plain decoding's and its rows.
    scratch  each session's rows besides its nodes, by the number of sessions.
    levels   its depth of drafting by the number of sessions, if it decides that before it drafts.
    """

    name: str
    rounds: PredictedRounds
    own_s: float = 0.0
    scratch: Curve = lambda _: 0.0
    levels: Callable[[int], int] | None = None

    def share(self, num_sessions: int) -> float:
        """Return the part of its scratch rows that a session keeps among `num_sessions`."""
        rows = self.scratch(1)
        return min(self.scratch(num_sessions) / rows, 1.0) if rows else 1.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted effect of a method.

    `ratio` is relative to plain decoding, `depth` is the levels of a draft.
    """

    method: str
    num_sessions: int
    tokens_per_second: float
    ratio: float
    depth: int = 0


def predict(methods: Sequence[PredictedMethod], costs: Costs, sessions: Sequence[int]) -> list[Prediction]:
    """Return the predictions for each method and for plain decoding, for these numbers of sessions."""
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
    """Return the most rows of a step of `num_sessions` sessions with a method."""
    nodes = max((sum(one.nodes) for one in method.rounds.rounds), default=0)
    return ceil(num_sessions * (1 + method.scratch(num_sessions) + nodes))


def most_rows_per_s(step: Curve, most_rows: int) -> float:
    """Return the most rows a second that steps of at most `most_rows` rows compute."""
    return max(rows / step(rows) for rows in range(1, most_rows + 1))


def beside(method: PredictedMethod, costs: Costs, num_sessions: int) -> tuple[float, int]:
    """Return the tokens a second and the depth of a method in the verifier."""
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
    """Return the method's own seconds for a round.

    A draft model takes the time of its levels; a parallel one needs a single pass. Other methods take their time once
    for each session.
    """
    usual = method.levels(1) if method.levels is not None else 0
    if not usual or costs.level is None:
        return num_sessions * method.own_s
    passes = depth / usual if costs.num_places == 1 else float(depth > 0)
    return method.own_s * passes * costs.level(num_sessions) / costs.level(1)


def worker(rounds: PredictedRounds, costs: Costs, num_sessions: int) -> tuple[float, int]:
    """Return the tokens a second and the depth with one draft worker.

    `rounds` are those of its draft model.
    """
    rounds = rounds.drafted
    reach = rounds.reach_probs()
    pass_s = costs.pass_s * max(1.0, num_sessions * nodes_a_level(rounds) / NODES_A_PASS)
    plain_s = costs.unhelped_step(num_sessions) + costs.host(num_sessions)
    # One level less than is drafted meanwhile, because the first must be the token that the step itself gives.
    depth = min(int(plain_s / pass_s) * costs.num_places - 1, len(reach))
    if depth < 1:
        return num_sessions / plain_s, 0
    goes_on = reach[depth] if depth < len(reach) else _beyond(reach)
    share = reach[0] / max(reach[0] + 1 - goes_on, 1e-9)  # of rounds that begin with a chain
    chain_s = rounds.step_s(costs.unhelped_step, num_sessions, num_sessions, depth) + costs.host(num_sessions)
    tokens = num_sessions * (1 + share * sum(reach[:depth]))
    return tokens / (share * chain_s + (1 - share) * plain_s), depth


def _beyond(reach: Sequence[float]) -> float:
    """Return the probability of one more level, accepted as often as the deepest."""
    before = reach[-2] if len(reach) > 1 else 1.0
    return reach[-1] ** 2 / before if before else 0.0


def nodes_a_level(rounds: PredictedRounds) -> float:
    """Return the mean number of nodes at a depth with nodes."""
    levels = [count for one in rounds.rounds for count in one.nodes]
    return sum(levels) / max(len(levels), 1) or 1.0


def significant(value: float, digits: int = 3) -> float:
    """Return a value with `digits` significant digits: a few seconds of measurement give no more."""
    return float(f"{value:.{digits}g}")
