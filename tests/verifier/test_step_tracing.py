"""The trace events of a traced session's step, and that other sessions cause none."""

from __future__ import annotations

import numpy as np

from specq.protocol import SUFFIX, Open, SamplingParams, decode, encode, trace_events
from specq.testing.toy import ToyEngine
from specq.verifier import StepCurve, Verifier
from specq.verifier.control.choices import DECISIONS, Choice, DraftDecision
from specq.verifier.step import meter as tracing
from tests.verifier.timed_service import gpu

NUM, TRACED, PROMPT = 6, 4, [5, 2, 3, 4]
ALONE = Choice(frozenset({SUFFIX}))


def make_verifier():
    verifier = Verifier(ToyEngine(), StepCurve([1, 64], [0.01, 0.0101]), incarnation=1)
    for i in range(NUM):
        opening = Open(
            session_id=i, epoch=1, prompt_len=len(PROMPT), tokens_left=5, params=SamplingParams(), trace=i == TRACED,
            token_ids=np.array([i + 1, *PROMPT[1:]], np.int32),
        )  # fmt: skip
        verifier.handle(opening, 0.0)
    return verifier


def test_the_prompt_and_each_round_of_a_traced_session_are_noted(monkeypatch):
    verifier, noted = make_verifier(), []
    monkeypatch.setattr(verifier.tracer, "note", lambda *event: noted.append(event))
    num_tokens = 0
    while verifier.has_work:
        num_tokens += sum(len(one.token_ids) for one in verifier.step(lambda: 1.0) if one.session_id == TRACED)

    assert {event[0] for event in noted} == {TRACED}
    prompts = [event for event in noted if event[1] == trace_events.PREFILL]
    assert [event[-1] for event in prompts] == [len(PROMPT)]
    rounds = [event for event in noted if event[1] == trace_events.ROUND]
    assert sum(event[4] for event in rounds) == num_tokens == 5


def test_what_is_decided_while_a_traced_session_runs_is_noted_once(monkeypatch):
    """All of it, in its order; nothing of before, and nothing for the others."""
    verifier, noted = make_verifier(), []
    monkeypatch.setattr(verifier.tracer, "note", lambda *event: noted.append(event))
    made = [DraftDecision(i, NUM, reason, Choice(), 5.0, ALONE, 4.0) for i, reason in enumerate(DECISIONS)]
    for decisions in ([], made[:1], made[1:], [], []):
        verifier.policy.decisions.extend(decisions)
        for one in decisions:
            verifier.policy.num_decided[one.reason] += 1
        verifier.step(lambda: 1.0)

    found = [event for event in noted if event[1] == trace_events.DECIDED]
    assert found == [(TRACED, trace_events.DECIDED, 1.0, *one.numbers()) for one in made]


def test_decisions_without_tracing_are_not_recorded(monkeypatch):
    verifier, noted = make_verifier(), []
    monkeypatch.setattr(verifier.tracer, "note", lambda *event: noted.append(event))
    rings = verifier.tracer._rings
    verifier.tracer._rings = {}
    verifier.policy.decisions.append(DraftDecision(1, NUM, "probe", Choice(), 5.0, ALONE, 4.0))
    verifier.policy.num_decided["probe"] += 1
    verifier.step(lambda: 1.0)
    verifier.tracer._rings = rings
    verifier.step(lambda: 1.0)

    assert {event[1] for event in noted} == {trace_events.ROUND}


def test_heartbeats_say_what_was_decided_last():
    """As a trace does, of real service."""
    service = gpu(suffix=0)
    service.serve(0.5, 8)
    metrics = decode(encode(service.verifier.heartbeat())).metrics

    assert metrics["decided"] == service.verifier.policy.decisions[-1].numbers()
    assert sum(metrics["decisions"].values()) == len(service.verifier.policy.decisions) > 0
    assert [label for label, (is_used, _) in metrics["choices"].items() if is_used] == [
        str(service.verifier.policy.used)
    ]


def test_no_objects_are_made_of_the_sessions_that_are_not_traced(monkeypatch):
    """With 64 sessions that took a seventh of the host's time."""
    made, note_step = [], tracing.trace_step

    def watched(tracer, shares, rounds, *moments):
        parts = shares, shares.batch, rounds
        before = [set(vars(part)) for part in parts]
        note_step(tracer, shares, rounds, *moments)
        made.append([set(vars(part)) - known for part, known in zip(parts, before, strict=True)])

    monkeypatch.setattr("specq.verifier.core.trace_step", watched)
    verifier = make_verifier()
    while verifier.has_work:
        verifier.step(lambda: 1.0)

    assert len(made) >= 2
    assert all(not any(names) for names in made)
