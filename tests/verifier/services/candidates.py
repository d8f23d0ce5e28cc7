"""The fixed choices with which a controller is compared: the few that promise most by the service's own costs and
chances. What they bring is measured afterwards, by the real verifier."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from specq.protocol import COLOCATED, REMOTE
from tests.verifier.services.service import Service, Source
from tests.verifier.services.serving import Choice

DEPTHS = (1, 2, 4, 6, 8)
MOST = 3


def candidates(service: Service, phase: int) -> list[Choice]:
    """Return the choices that promise most in a phase, without plain decoding, the best first; not two that differ in
    the depth of a draft model alone by a step."""
    ranked = sorted(choices(service), key=lambda choice: -promised_rate(service, phase, choice))
    found: list[Choice] = []
    for choice in ranked:
        if len(found) < MOST and not any(_are_alike(choice, other) for other in found):
            found.append(choice)
    return found


def choices(service: Service) -> Iterator[Choice]:
    """Yield all fixed choices but plain decoding."""
    names = [source.name for source in service.sources]
    models = [source for source in service.sources if source.name == COLOCATED]
    depths = [depth for depth in DEPTHS if models and depth <= models[0].depth]
    for size in range(1, len(names) + 1):
        for chosen in combinations(names, size):
            for depth in depths if COLOCATED in chosen else [0]:
                yield Choice(chosen, depth)


def _are_alike(one: Choice, other: Choice) -> bool:
    return one.names == other.names and abs(one.depth - other.depth) <= 2


def promised_rate(service: Service, phase: int, choice: Choice) -> float:
    """Return about how many tokens a second a choice brings: each source as if it were right by itself, and as many
    rows verified as pay most."""
    num_sessions = service.phases[phase].num_sessions
    chains = [
        (source, chance, choice.depth if source.name == COLOCATED else source.depth)
        for source, chance in zip(service.sources, service.phases[phase].chances, strict=True)
        if source.name in choice.names
    ]
    host_s = (service.machine.host_ms + service.machine.session_ms * num_sessions) / 1000
    slowdown = 1 + sum(source.slows for source, _, _ in chains)
    drafting_s = sum(source.draft_s(num_sessions, depth) for source, _, depth in chains if source.name != REMOTE)
    best = 0.0
    for most in range(max(depth for _, _, depth in chains) + 1):
        num_rows = num_sessions * (1 + sum(min(depth, most) for _, _, depth in chains))
        step_s = service.machine.step_s(num_rows) * slowdown + drafting_s + host_s
        best = max(best, num_sessions * _tokens(chains, most, step_s, num_sessions) / step_s)
    return best


def _tokens(chains: list[tuple[Source, float, int]], most: int, step_s: float, num_sessions: int) -> float:
    """Return the tokens of a session's step of this length: the longest of its chains, none longer than `most`."""
    tokens, reached = 1.0, [1.0] * len(chains)
    for level in range(most):
        missed = 1.0
        for i, (source, chance, depth) in enumerate(chains):
            reached[i] *= min(chance * source.decay**level, 0.98) if level < depth else 0.0
            missed *= 1 - reached[i] * _share_in_time(source, step_s, num_sessions)
        tokens += 1 - missed
    return tokens


def _share_in_time(source: Source, step_s: float, num_sessions: int) -> float:
    """Return the part of a source's drafts that are there for a step."""
    if source.name != REMOTE:
        return 1.0
    answer_s = source.round_trip_ms / 1000 + source.draft_s(1, source.depth)
    return min(1.0, step_s / answer_s) * min(1.0, source.num_workers / num_sessions)
