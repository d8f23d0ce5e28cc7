"""How many verifiers and draft workers there should be. Pure: reports of brokers and the time in, numbers out.

Draft workers, by gain: one more starts while there are more running jobs than draft workers. It stays if the tokens
that drafts add rise by LEAST_GAIN. Otherwise it stops, and the next attempt waits, each time twice as long. One more is
tried also where the fewest add nothing: they may be too slow for all sessions, but not for some.
Verifiers, by queue: one more starts if jobs wait during a whole window. One stops if the others could run all jobs
with room to spare, during several windows.

Rule: a number changes by one, and not before a whole window with the present number has been measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specq.protocol import REMOTE

WINDOW_S = 20.0  # of one measurement
LEAST_GAIN = 0.03  # tokens that drafts add, for each token of the target's own
RETRY_S, MOST_RETRY_S = 300.0, 3600.0  # until a draft worker is tried again
CALM_WINDOWS = 6  # without need, until a process stops
SPARE = 0.7  # of the sessions of the remaining verifiers


@dataclass(frozen=True, slots=True)
class Sample:
    """Totals at one moment: waiting and running jobs; all tokens, and the accepted ones of draft workers."""

    waiting: int = 0
    running: int = 0
    tokens: float = 0.0
    accepted: float = 0.0


@dataclass(frozen=True, slots=True)
class ScaleLimits:
    """Least and most verifiers and draft workers; sessions of one verifier."""

    targets: tuple[int, int] = (1, 1)
    drafters: tuple[int, int] = (0, 0)
    max_sessions: int = 64


@dataclass(frozen=True, slots=True)
class Scale:
    """The state of the rule.

    - began: start of the present window. `first`: its first sample. `least_waiting`, `most_running`: in it.
    - calm, idle: windows without need for the last verifier, and without a job for the last draft worker.
    - gains: the last gain by number of draft workers.
    - grown: whether the last draft worker is on trial. `retry_at`, `retry_s`: when the next trial may begin.
    """

    targets: int
    drafters: int
    began: float = 0.0
    first: Sample | None = None
    least_waiting: int = 0
    most_running: int = 0
    calm: int = 0
    idle: int = 0
    gains: Mapping[int, float] = field(default_factory=dict)
    grown: bool = False
    retry_at: float = 0.0
    retry_s: float = RETRY_S


def scaled(state: Scale, sample: Sample, now: float, limits: ScaleLimits, *, is_settled: bool = True) -> Scale:
    """Return the state after a sample. `is_settled`: all wanted processes are ready; else the window begins anew."""
    if state.first is None or not is_settled or _has_restarted(state.first, sample):
        return _new_window(state, sample, now)
    state = replace(
        state,
        least_waiting=min(state.least_waiting, sample.waiting),
        most_running=max(state.most_running, sample.running),
    )
    if now - state.began < WINDOW_S:
        return state
    return _new_window(_drafters(_targets(state, limits), sample, now, limits), sample, now)


def _has_restarted(first: Sample, sample: Sample) -> bool:
    return sample.tokens < first.tokens or sample.accepted < first.accepted


def _new_window(state: Scale, sample: Sample, now: float) -> Scale:
    return replace(state, began=now, first=sample, least_waiting=sample.waiting, most_running=sample.running)


def _targets(state: Scale, limits: ScaleLimits) -> Scale:
    least, most = limits.targets
    if state.least_waiting and state.targets < most:
        return replace(state, targets=state.targets + 1, calm=0)
    busy = state.most_running > SPARE * limits.max_sessions * (state.targets - 1)
    if state.least_waiting or busy or state.targets <= least:
        return replace(state, calm=0)
    if state.calm + 1 < CALM_WINDOWS:
        return replace(state, calm=state.calm + 1)
    return replace(state, targets=state.targets - 1, calm=0)


def gain(first: Sample, last: Sample) -> float | None:
    """Return the tokens that drafts of draft workers added for each token of the target's own; None without tokens."""
    tokens, accepted = last.tokens - first.tokens, last.accepted - first.accepted
    own = tokens - accepted
    return accepted / own if tokens and own > 0 else None


def _drafters(state: Scale, sample: Sample, now: float, limits: ScaleLimits) -> Scale:
    least, most = limits.drafters
    assert state.first is not None
    number, found = state.drafters, gain(state.first, sample)
    if found is None or state.most_running < number:
        is_long = state.idle + 1 >= CALM_WINDOWS and number > least
        return replace(state, drafters=number - is_long, idle=0 if is_long else state.idle + 1, grown=False)
    gains = {**state.gains, number: found}
    state = replace(state, gains=gains, idle=0)
    before = gains.get(number - 1, 0.0)
    if number > least and (found < LEAST_GAIN or (state.grown and found < before + LEAST_GAIN)):
        retry_s = min(2 * state.retry_s, MOST_RETRY_S)
        return replace(state, drafters=number - 1, grown=False, retry_at=now + state.retry_s, retry_s=retry_s)
    pays = found >= LEAST_GAIN or number <= least
    if pays and number < min(most, state.most_running) and now >= state.retry_at:
        return replace(state, drafters=number + 1, grown=True)
    return replace(state, grown=False)


def without_room(state: Scale, waiting: Collection[str], now: float, limits: ScaleLimits) -> Scale:
    """Return the state without the newest worker of a role, if it is beyond the least and has no place."""
    if f"target-{state.targets}" in waiting and state.targets > limits.targets[0]:
        state = replace(state, targets=state.targets - 1)
    if f"draft-{state.drafters}" in waiting and state.drafters > limits.drafters[0]:
        state = replace(state, drafters=state.drafters - 1, grown=False, retry_at=now + state.retry_s)
    return state


def sample_of(reports: Sequence[Mapping[str, Any]]) -> Sample:
    """Return the totals of the brokers' reports. Each broker counts its own jobs and tokens.

    Verifiers count accepted drafts over all brokers, so of each verifier the largest count is taken.
    """
    loads = [load for report in reports for load in report.get("loads", {}).values()]
    accepted: dict[str, float] = {}
    tokens = 0.0
    for worker in (worker for report in reports for worker in report.get("workers", ()) if worker["role"] == "target"):
        judged = worker.get("metrics", {}).get("judged", {}).get(REMOTE, ())
        accepted[worker["name"]] = max(accepted.get(worker["name"], 0.0), judged[1] if len(judged) > 1 else 0.0)
        tokens += worker["tokens"]
    waiting, running = (sum(load[name] for load in loads) for name in ("waiting", "running"))
    return Sample(waiting, running, tokens, sum(accepted.values()))
