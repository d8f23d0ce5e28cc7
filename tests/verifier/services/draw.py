"""The distribution of random services: a service is a pure function of its seed.

Building looks at the services of BUILD_SEEDS; those of FINAL_SEEDS are kept for the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from specq.protocol import COLOCATED, EAGLE, REMOTE, SUFFIX
from tests.verifier.services.service import (
    BURSTS,
    ONE_BY_ONE,
    ORDER,
    POISSON,
    STALL_STEPS,
    STEP_ROWS,
    TOGETHER,
    Machine,
    Phase,
    Service,
    Source,
)

BUILD_SEEDS, FINAL_SEEDS = range(150), range(1000, 1150)
SETS = {"build": BUILD_SEEDS, "final": FINAL_SEEDS}

# What happens in the phases of a service: all sources become better or worse, one becomes better while the others
# become worse, or there are more or fewer sessions.
KINDS = ("steady", "better", "better", "worse", "worse", "better, worse", "worse, better", "swap", "load")
GPU_LOADS, CPU_LOADS = (1, 1, 2, 4, 8, 8, 16, 32, 64, 64, 128, 256), (1, 1, 2, 3, 4, 6, 8, 16, 32)
LEAST_PHASE_S, MOST_PHASE_S, PHASE_STEPS = 12.0, 40.0, 240
LEAST_TEXTS, LEAST_WAVES = 6, 10  # in a phase, of one client; where not all are served at once, and else
MOST_PROMPTS_S = 1.2  # in which the prompts of all sessions are computed
SOURCE_WEIGHTS = {COLOCATED: 0.6, SUFFIX: 0.55, EAGLE: 0.4, REMOTE: 0.35}


def draw(seed: int) -> Service:
    """Return the service of a seed."""
    random = Random(seed)
    is_gpu = random.random() < 0.5
    num_sessions = random.choice(GPU_LOADS if is_gpu else CPU_LOADS)
    machine = _gpu(random) if is_gpu else _cpu(random)
    sources = _sources(random, machine, is_gpu)
    kind = random.choice(KINDS)
    loads, chances = _changes(random, kind, num_sessions, sources)
    seconds = [_phase_s(machine, load) for load in loads]
    plain_s = machine.plain_s(max(loads))
    text_len = max(min(random.choice((24, 64, 128, 256)), int(min(seconds) / LEAST_TEXTS / plain_s)), 12)
    prompt_len = min(random.choice((20, 60, 150, 400, 1000)), (4 if is_gpu else 1) * text_len)
    prompts_s = max(loads) * prompt_len / STEP_ROWS * machine.step_s(STEP_ROWS)
    arrivals = random.choice((TOGETHER, ONE_BY_ONE, ONE_BY_ONE, POISSON, BURSTS))
    if arrivals != ONE_BY_ONE and text_len * plain_s > min(seconds) / LEAST_WAVES:
        arrivals = ONE_BY_ONE
    one_by_one_s = min(plain_s * random.uniform(0.3, 3.0), MOST_PROMPTS_S / max(loads))
    pause_s = text_len * plain_s * random.uniform(0.05, 0.5)
    return Service(
        seed=seed,
        kind=kind,
        machine=machine,
        sources=sources,
        arrivals=arrivals,
        gap_s=one_by_one_s if arrivals == ONE_BY_ONE else pause_s,
        prompt_len=max(int(prompt_len * min(1.0, MOST_PROMPTS_S / prompts_s)), 4),
        text_len=text_len,
        spread=random.choice((0.0, 0.05, 0.15)),
        shared=random.choice((0.0, 0.5, 0.9)),
        is_honest=random.random() < 0.5,
        num_stalls=_num_stalls(random, plain_s, min(seconds)),
        phases=tuple(Phase(*one) for one in zip(seconds, loads, chances, strict=True)),
    )


def _num_stalls(random: Random, plain_s: float, phase_s: float) -> int:
    """Of five services, one has stalls, which take about an eighth of the time."""
    return max(1, round(0.12 * phase_s / (STALL_STEPS * plain_s))) if random.random() < 0.2 else 0


def _cpu(random: Random) -> Machine:
    """A step takes longer with each row, at once or from a knee on."""
    first_ms = _log_uniform(random, 10, 80)
    knee = random.choice((1, 1, 4, 8, 16))
    flat, steep = random.uniform(0.0, 0.02), random.uniform(0.03, 0.3)
    at_knee_ms = first_ms * (1 + flat * (knee - 1))
    far = (512.0, at_knee_ms + first_ms * steep * (512 - knee))
    points = ((1.0, first_ms), (float(knee), at_knee_ms), far) if knee > 1 else ((1.0, first_ms), far)
    return Machine(
        step_ms=points,
        padding=1,
        profile=random.choice((1.0, 1.0, 0.85, 1.2)),
        overlaps=random.random() < 0.2,
        host_ms=random.uniform(0.5, 1.5),
        session_ms=0.02,
        mixed_ms=0.0,
        jitter=random.choice((0.02, 0.1, 0.3)),
    )


def _gpu(random: Random) -> Machine:
    """Rows cost hardly anything up to a knee."""
    first_ms = _log_uniform(random, *((4, 10) if random.random() < 0.15 else (10, 45)))
    knee = random.choice((32, 64, 128, 256))
    at_knee_ms = first_ms * random.uniform(1.05, 1.5)
    steep = random.uniform(0.6, 1.2) * first_ms / knee
    return Machine(
        step_ms=((1.0, first_ms), (float(knee), at_knee_ms), (1024.0, at_knee_ms + steep * (1024 - knee))),
        padding=random.choice((1, 1, 1, 8, 16)),
        profile=random.choice((1.0, 1.0, 0.9, 1.1)),
        overlaps=random.random() < 0.85,
        host_ms=random.uniform(1.0, 2.5),
        session_ms=random.uniform(0.005, 0.02),
        mixed_ms=random.choice((0.0, 0.0, 3.0, 12.0)),
        jitter=random.choice((0.01, 0.05)),
    )


def _sources(random: Random, machine: Machine, is_gpu: bool) -> tuple[Source, ...]:
    """Return at least one source, in a verifier's order."""
    names = [name for name in ORDER if random.random() < SOURCE_WEIGHTS[name]] or [COLOCATED]
    return tuple(_source(random, name, machine.step_ms[0][1], is_gpu) for name in names)


def _source(random: Random, name: str, first_ms: float, is_gpu: bool) -> Source:
    round_ms = {
        SUFFIX: random.uniform(0.05, 0.3),
        COLOCATED: first_ms * _log_uniform(random, 0.02, 0.25),
        EAGLE: first_ms * _log_uniform(random, 0.03, 0.5),
        REMOTE: first_ms * _log_uniform(random, 0.1, 1.2),
    }[name]
    further = random.uniform(0.001, 0.006) if is_gpu else random.uniform(0.1, 0.6)
    is_remote = name == REMOTE
    return Source(
        name=name,
        depth=random.choice((3, 4, 5) if name == EAGLE else (4, 6, 8)),
        round_ms=round_ms,
        session_ms={SUFFIX: 0.005, REMOTE: 0.0}.get(name, round_ms * further),
        context_ms=round_ms * (0.003 if is_gpu else 0.1) if name == COLOCATED else 0.0,
        decay=random.uniform(0.75, 0.97) if name == EAGLE else random.choice((1.0, 0.97)),
        slows=0.0 if is_gpu or name == SUFFIX else random.choice((0.0, 0.05, 0.1, 0.25)),
        round_trip_ms=_log_uniform(random, 0.3, 60) if is_remote else 0.0,
        num_workers=random.choice((1, 2, 4, 8, 16)) if is_remote else 0,
    )


def _changes(
    random: Random, kind: str, num_sessions: int, sources: Sequence[Source]
) -> tuple[list[int], list[tuple[float, ...]]]:
    """Return the sessions and the chances of each phase."""
    middle, good, bad = (
        tuple(_chance(random, one.name, level) for one in sources) for level in ("middle", "good", "bad")
    )
    other_load = max(1, round(num_sessions * random.choice((0.1, 0.25, 0.5))))
    if kind == "load":
        loads = [num_sessions, other_load] if random.random() < 0.5 else [other_load, num_sessions]
        return loads, [middle, middle]
    if kind == "swap":
        first = random.randrange(len(sources))
        one = tuple(good[i] if i == first else bad[i] for i in range(len(sources)))
        other = tuple(bad[i] if i == first else good[i] for i in range(len(sources)))
        return [num_sessions] * 2, [one, other]
    by_name = {"steady": [middle], "better": [bad, good], "worse": [good, bad]}
    by_name |= {"better, worse": [bad, good, bad], "worse, better": [good, bad, good]}
    return [num_sessions] * len(by_name[kind]), by_name[kind]


def _chance(random: Random, name: str, level: str) -> float:
    low, high = {"middle": (0.3, 0.92), "good": (0.75, 0.95), "bad": (0.05, 0.5)}[level]
    chance = random.uniform(low, high)
    return chance * random.uniform(0.3, 0.9) if name == SUFFIX else chance  # a lookup finds something now and then only


def _phase_s(machine: Machine, num_sessions: int) -> float:
    """Return for how long a phase lasts: long enough to follow a change within 10 s and 100 steps."""
    return min(max(PHASE_STEPS * machine.plain_s(num_sessions), LEAST_PHASE_S), MOST_PHASE_S)


def _log_uniform(random: Random, low: float, high: float) -> float:
    return float(low * (high / low) ** random.random())
