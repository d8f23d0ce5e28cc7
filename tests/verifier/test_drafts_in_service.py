"""Which sources of drafts a verifier uses, where steps and drafts take time: by a virtual clock, with a device beside
the host."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from specq.drafting import SOURCES
from specq.drafting.draft_model.source import ColocatedSource
from specq.protocol import (
    COLOCATED,
    EAGLE,
    LANES,
    LOOKAHEAD,
    LOOKAHEAD_LANE,
    MEDUSA,
    REMOTE,
    SUFFIX,
    SUFFIX_LANE,
)
from specq.verifier.models.step_curve import StepCurve
from tests.verifier.timed_service import TimedChains, TimedService, TimedSource, gpu
from tests.verifier.timed_target import Machine, TimedTarget


def rate_of(service: TimedService, mode: str, num_sessions: int) -> float:
    """Return the tokens a second of a mode that measures nothing, once it has settled."""
    service.mode = mode
    service.serve(0.3, num_sessions)
    return service.serve(max(1.0, 6 / num_sessions), num_sessions).rate


@pytest.mark.parametrize("num_sessions", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 32))])
def test_drafts_that_pay_more_than_overlapped_steps_are_used(num_sessions: int) -> None:
    """Plain steps overlap and drafted ones do not; after 3 s the default is what forced drafts are. What overlapped
    steps take says nothing of what a node costs: otherwise drafts become shallow after each plain window, and lose."""
    service = gpu(suffix=0)
    plain, forced = (rate_of(service, mode, num_sessions) for mode in ("plain", "sync"))
    assert forced > 1.05 * plain
    service.mode = "async"
    service.serve(3.0, num_sessions)
    served = service.serve(max(1.5, 6 / num_sessions), num_sessions)
    assert served.rate > 0.93 * forced
    assert served.share(COLOCATED) > 0.9


@pytest.mark.parametrize("num_sessions", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_drafts_that_lose_to_overlapped_steps_fall_silent(num_sessions: int) -> None:
    """Of which two thirds are wrong: within 3 s, and from then on the default is plain decoding."""
    service = gpu(chance=0.3, suffix=0)
    plain = rate_of(service, "plain", num_sessions)
    service.mode = "async"
    service.serve(3.0, num_sessions)
    assert service.serve(4.5, num_sessions).rate > 0.97 * plain


@pytest.mark.slow
@pytest.mark.parametrize(("prompt_len", "num_tokens"), [(100, 128), (400, 128), (100, 16)])
def test_drafts_that_lose_fall_silent_where_sessions_come_all_the_time(prompt_len: int, num_tokens: int) -> None:
    """With 128 sessions that have not begun together nearly each round of drafts computes prompts, too; where texts are
    short, most of the sessions wait for rows of theirs."""
    rates = {}
    for mode in ("plain", "async"):
        service = gpu(mode, suffix=0, prompt_len=prompt_len, num_tokens=num_tokens)
        service.serve_on(1.0, 128, apart_s=0.006)
        rates[mode] = service.serve_on(4.0, 128, apart_s=0.006).rate
    assert rates["async"] > 0.93 * rates["plain"], rates


def test_a_burst_of_prompts_does_not_rate_drafts() -> None:
    """Beside whose prompts drafts have no room. After it one session is drafted for, as if there had been none."""
    service = gpu(chance=0.8, suffix=0, prompt_len=60, num_tokens=40)
    service.serve(1.0, 128)
    service.serve(5.0, 1)
    assert service.serve(5.0, 1).share(COLOCATED) > 0.7


@pytest.mark.slow
def test_the_last_session_of_a_batch_is_soon_drafted_for() -> None:
    """A batch of 127 short jobs and a long one, again and again: drafts pay for the long one alone."""
    rates = {}
    for mode in ("plain", "async"):
        service = gpu(mode, chance=0.8, suffix=0, prompt_len=60)
        service.serve_uneven(12.0, [200, *[40] * 127])
        rates[mode] = service.serve_uneven(8.0, [200, *[40] * 127]).rate
    assert rates["async"] > 1.1 * rates["plain"], rates


@pytest.mark.slow
@pytest.mark.parametrize(("chance", "num_sessions"), [(0.3, 1), (0.5, 32), (0.6, 32)])
def test_drafts_that_are_right_less_often_soon_fall_silent(chance: float, num_sessions: int) -> None:
    """As where sampled jobs follow greedy ones, for which ten seconds of trials have said that drafts pay."""
    service = gpu(chance=0.9, suffix=0)
    plain = rate_of(service, "plain", num_sessions)
    service.mode = "async"
    service.serve(10.0, num_sessions)
    assert service.serve(1.0, num_sessions).rate > 1.1 * plain
    service.chains.chance = chance
    service.serve(2.0, num_sessions)
    assert service.serve(2.0, num_sessions).rate > 0.95 * plain


@pytest.mark.slow
@pytest.mark.parametrize("num_sessions", [1, 8])
def test_texts_that_alternate_cost_hardly_any_trials(num_sessions: int) -> None:
    """Drafts pay for both kinds, for one more than for the other: the default is what forced drafts are."""
    service = gpu(chance=0.9, suffix=0)
    rates = {}
    for service.mode in ("sync", "async"):
        service.serve(5.0, num_sessions)
        tokens, seconds = 0, 0.0
        for service.chains.chance in (0.75, 0.9) * 4:
            served = service.serve(2.0, num_sessions)
            tokens, seconds = tokens + served.tokens, seconds + served.seconds
        rates[service.mode] = tokens / seconds
    assert rates["async"] > 0.96 * rates["sync"], rates


def everything(only: Iterable[str] = SOURCES) -> TimedService:
    """Return a service as of `smollm2` on two cores with these sources: the draft model takes microseconds, heads in
    torch take tens of milliseconds, and lookahead's rows are dear."""
    machine = Machine()
    steps = [(1, 8.7), (4, 9.5), (8, 11.0), (16, 14.5), (80, 80.0)]
    target = TimedTarget(machine, steps, overlaps=False, launch_s=0.0003, collect_s=0.0003)
    levels = [(1, 0.28), (8, 1.0)]
    chains = TimedChains(machine, levels, 0.7, context_ms=0.1, catch_up_ms=0.1, start_s=0.0001, finish_s=0.0001)
    curve = StepCurve([1, 8], [milliseconds / 1000 for _, milliseconds in levels])
    own = ColocatedSource(chains, curve, fan_out=1, chain=6)
    heads = TimedSource(machine, MEDUSA, LANES[MEDUSA], 0.008, 0.25, 3)
    trees = TimedSource(machine, EAGLE, LANES[EAGLE], 0.04, 0.5, begin_s=0.008)
    texts = TimedSource(machine, SUFFIX, SUFFIX_LANE, 0.0001, 0.25, 3)
    window = TimedSource(machine, LOOKAHEAD, LOOKAHEAD_LANE, 0.002, 0.25, 3, num_scratch=56)
    sources = [source for source in (own, heads, trees, texts, window) if source.name in only]
    return TimedService(target, sources, loop_s=0.0004, prompt_len=40, num_tokens=64)


@pytest.mark.slow
def test_what_is_dear_is_dropped_within_two_seconds() -> None:
    """Five sources, three of which take several plain steps a round: what they take by themselves says what to try
    first. From then on, trials cost little, the first ones of what was not tried yet, too."""
    alone = everything({COLOCATED})
    best = alone.serve(20.0, 1).rate
    service = everything()
    service.serve(2.0, 1)
    assert service.verifier.policy.allowed <= {REMOTE, COLOCATED, SUFFIX}
    served = service.serve(20.0, 1)
    assert served.rate > 0.93 * best
    assert max(served.share(source) for source in (EAGLE, MEDUSA, LOOKAHEAD)) < 0.04
