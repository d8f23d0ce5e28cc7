"""What came of a service: the controller's rate in each phase beside plain decoding and the best fixed choice, and how
soon it followed a change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tests.verifier.services.candidates import candidates
from tests.verifier.services.service import ONE_BY_ONE, STEP_ROWS, WAVES, Phase, Service
from tests.verifier.services.serving import PLAIN, Choice, Log, Serving

FIRST_S = 2.0  # of a service, in which a controller knows nothing
FOLLOWED = 0.9  # of the best rate
# What a rate is made of that says whether a change is followed: seconds and verdicts at least.
WINDOW_S, WAVE_WINDOW_S, WINDOW_ROUNDS = 1.0, 3.0, 150
# For how long a fixed choice runs: seconds, steps, verdicts, and texts of a session at least; or the whole phase.
FIXED_S, FIXED_STEPS, FIXED_ROUNDS, FIXED_TEXTS = 2.0, 80, 700, 4


@dataclass(frozen=True, slots=True)
class Fixed:
    """What fixed choices bring in a phase, in tokens a second; best: the name of the best one, perhaps plain."""

    plain: float
    best: str
    rate: float


@dataclass(frozen=True, slots=True)
class Row:
    """A phase of a service.

    rates        tokens a second of the controller in the phase, of each repeat, but for the time in which more sessions
                 begin or end
    later        their mean without the first FIRST_S of the service
    followed_s, followed_steps   until the controller has FOLLOWED of the best rate for a while, median of the repeats;
                 -1: not in this phase
    """

    seed: int
    phase: int
    kind: str
    sessions: int
    seconds: float
    plain: float
    best: str
    best_rate: float
    rates: tuple[float, ...]
    later: float
    followed_s: float
    followed_steps: int

    @property
    def controller(self) -> float:
        """Return its mean tokens a second."""
        return sum(self.rates) / len(self.rates)


def judge(
    service: Service, fixed: list[Fixed] | None = None, choice: Choice | None = None, repeats: int = 1
) -> list[Row]:
    """Return the rows of a service. `fixed`: what is known of its fixed choices; `choice`: the controller that is
    judged, None for the verifier's own."""
    known = fixed or all_fixed(service)
    logs = [Serving(service, choice, repeat=i).serve(service.starts[-1]) for i in range(repeats)]
    return [_row(service, i, one, logs) for i, one in enumerate(known)]


def _row(service: Service, number: int, fixed: Fixed, logs: list[Log]) -> Row:
    begin, end = service.starts[number], service.starts[number + 1]
    first = begin + min(_settling_s(service, number), (end - begin) / 3)
    is_in_waves, rate = service.arrivals in WAVES, FOLLOWED * fixed.rate
    reached = [followed(log, begin, end, rate, is_in_waves=is_in_waves) for log in logs]
    seconds, steps = sorted(reached, key=lambda one: one[0] if one[0] >= 0 else end)[len(reached) // 2]
    return Row(
        seed=service.seed,
        phase=number,
        kind=service.kind,
        sessions=service.phases[number].num_sessions,
        seconds=round(end - begin, 2),
        plain=round(fixed.plain, 2),
        best=fixed.best,
        best_rate=round(fixed.rate, 2),
        rates=tuple(round(log.rate(first, end), 2) for log in logs),
        later=round(sum(log.rate(max(first, FIRST_S), end) for log in logs) / len(logs), 2),
        followed_s=round(seconds, 2),
        followed_steps=steps,
    )


def followed(log: Log, begin: float, end: float, rate: float, *, is_in_waves: bool) -> tuple[float, int]:
    """Return after how many seconds and steps of a phase the first window begins that has this rate; -1, -1: none."""
    first, last = (int(np.searchsorted(log.times, at, side="right")) - 1 for at in (begin, end))
    window_s = WAVE_WINDOW_S if is_in_waves else WINDOW_S
    starts = np.arange(first, last)
    ends = np.maximum(
        np.searchsorted(log.times, log.times[starts] + window_s),
        np.searchsorted(log.rounds, log.rounds[starts] + WINDOW_ROUNDS),
    )
    starts = starts[ends <= last]
    ends = ends[: len(starts)]
    rates = (log.tokens[ends] - log.tokens[starts]) / np.maximum(log.busy[ends] - log.busy[starts], 1e-9)
    reached = np.flatnonzero(rates >= rate)
    if not len(reached):
        return -1.0, -1
    return max(float(log.times[starts[reached[0]]]) - begin, 0.0), int(reached[0])


def all_fixed(service: Service) -> list[Fixed]:
    """Measure fixed choices in each phase; phases that are alike, once; plain decoding once for each load."""
    plain: dict[int, float] = {}
    found: dict[Phase, Fixed] = {}
    for i, phase in enumerate(service.phases):
        if phase.num_sessions not in plain:
            plain[phase.num_sessions] = fixed_rate(service, i, PLAIN)
        if phase not in found:
            rates = {str(PLAIN): plain[phase.num_sessions]}
            rates |= {str(choice): fixed_rate(service, i, choice) for choice in candidates(service, i)}
            best = max(rates, key=rates.__getitem__)
            found[phase] = Fixed(rates[str(PLAIN)], best, rates[best])
    return [found[phase] for phase in service.phases]


def fixed_rate(service: Service, number: int, choice: Choice) -> float:
    """Return the tokens a second of a fixed choice in a phase."""
    alone = service.alone(number)
    phase_s, step_s = alone.phases[0].seconds, alone.machine.plain_s(alone.phases[0].num_sessions)
    seconds = max(FIXED_S, FIXED_STEPS * step_s, FIXED_ROUNDS * step_s / alone.phases[0].num_sessions)
    seconds = max(seconds, FIXED_TEXTS * service.text_len * step_s)
    if alone.num_stalls or alone.arrivals != ONE_BY_ONE:
        seconds = phase_s
    left_out_s = _prompts_s(service, number)
    seconds = min(seconds + left_out_s, phase_s)
    return Serving(alone, choice, number).serve(seconds).rate(left_out_s, seconds)


def _settling_s(service: Service, number: int) -> float:
    """Return how long a phase's new sessions need to begin, and those that are too many to end."""
    num_sessions = service.phases[number].num_sessions
    before = service.phases[number - 1].num_sessions if number else 0
    if num_sessions > before:
        return _prompts_s(service, number)
    return service.text_len * service.machine.plain_s(before) if num_sessions < before else 0.0


def _prompts_s(service: Service, number: int) -> float:
    """Return the seconds in which the prompts of all sessions are computed, where they do not begin together again and
    again; these say nothing of what comes after."""
    if service.arrivals in WAVES:
        return 0.0
    num_sessions = service.phases[number].num_sessions
    num_steps = num_sessions * service.prompt_len / STEP_ROWS
    arriving_s = service.gap_s * num_sessions if service.arrivals == ONE_BY_ONE else 0.0
    return 0.3 + 2.0 * max(num_steps * service.machine.step_s(STEP_ROWS), arriving_s)


def as_columns(rows: list[Row]) -> dict[str, Any]:
    """Return rows as JSON has them."""
    return {"columns": [*Row.__slots__], "rows": [[*asdict(row).values()] for row in rows]}


def from_columns(read: Mapping[str, Any]) -> list[Row]:
    """Return the rows of `as_columns`."""
    named = [dict(zip(read["columns"], row, strict=True)) for row in read["rows"]]
    return [Row(**{**values, "rates": tuple(values["rates"])}) for values in named]


def fixed_of(rows: list[Row]) -> Callable[[int], list[Fixed]]:
    """Return what is known of a seed's fixed choices by earlier rows; [] if nothing is."""
    found: dict[int, list[Fixed]] = {}
    for row in rows:
        found.setdefault(row.seed, []).append(Fixed(row.plain, row.best, row.best_rate))
    return lambda seed: found.get(seed, [])
