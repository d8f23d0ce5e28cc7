"""A core that helps the verifier's steps, and when it is left to drafters."""

from specq.testing.toy import ToyEngine
from specq.verifier.control.choices import Choice
from specq.verifier.models.step_curve import StepCurve
from tests.verifier.verifiers import chain, make_verifier, open_session, step


def test_a_core_that_helps_is_left_to_drafters_while_what_they_send_is_used():
    """Until they have sent something they need none; where they are silenced, steps are helped again, and those with
    prompts always. Each has its own step curve. Nothing is measured here: the test says what is allowed."""
    engine, alone = ToyEngine(), StepCurve([1, 64], [0.010, 0.02])
    engine.is_helped = True
    verifier = make_verifier(engine, unhelped_curve=alone, measures_drafts=False)
    helped = verifier.curve
    open_session(verifier)
    for _ in range(2):
        step(verifier)
        assert engine.is_helped
    verifier.handle(chain([1, 2], base_len=verifier.sessions[7].length), 0.0)
    for _ in range(2):  # the first step learns that somebody has sent something
        step(verifier)
    assert not engine.is_helped
    assert verifier.curve.profiled(1) == alone.profiled(1) != helped.profiled(1)
    open_session(verifier, 8)
    for expected in (True, False):  # its prompt has many rows; then all decode
        step(verifier)
        assert engine.is_helped == expected
    verifier.policy.used = Choice()
    for _ in range(2):  # what is in use counts from the next load on
        open_session(verifier, 9)
        step(verifier)
    assert engine.is_helped
    assert verifier.curve.profiled(1) == helped.profiled(1)


def test_a_core_that_helps_is_left_to_the_drafters_of_jobs_that_wait_for_them():
    """Although steps of such jobs do not show which drafts pay."""
    engine = ToyEngine()
    engine.is_helped = True
    verifier = make_verifier(engine)
    open_session(verifier, mode="sync")
    step(verifier)
    assert engine.is_helped
    verifier.handle(chain([1, 2], base_len=verifier.sessions[7].length), 0.0)
    for _ in range(2):
        step(verifier)
    assert not engine.is_helped


def test_an_engine_without_helpers_is_left_alone():
    engine = ToyEngine()
    verifier = make_verifier(engine)
    open_session(verifier)
    step(verifier)
    assert not engine.is_helped
