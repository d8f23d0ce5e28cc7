"""A fault of one session in a forward pass or its judgement fails that session alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.protocol.params import SamplingParams
from specq.protocol.types import Judgement, SessionStep, Tree
from specq.verification import judge as judging
from specq.verifier.sessions.history import Past
from tests.verifier.isolation import NUM, Steps, make_verifier, open_all, run

# --- the judge and the torch engine
# -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> str:
    return resolve_model("tiny", "target")


PROMPTS = [[301 + i, 17, 4, 20 + i] for i in range(NUM)]


WARM = {"temperature": 0.8, "seed": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def quiet(model: str) -> dict[int, list[int]]:
    """The texts of a run without faults."""
    verifier = make_verifier(TorchEngine(model, device="cpu", dtype="float32", kv_slots=1024))
    open_all(verifier, PROMPTS, **WARM)
    texts, failed = run(verifier)
    assert not failed
    return texts


@pytest.mark.parametrize("place", [0, 3, NUM - 1])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_fail_one_session(
    model: str, quiet: dict[int, list[int]], place: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the sixth token on one session's row is spoilt; the others' texts are the quiet run's, and all KV is free
    again."""
    engine = TorchEngine(model, device="cpu", dtype="float32", kv_slots=1024)
    verifier = make_verifier(engine)
    open_all(verifier, PROMPTS, **WARM)
    judge = judging.judge

    def spoilt(steps: Steps, logits: torch.Tensor, draws: Any) -> list[Judgement]:
        row = 0
        for step in steps:
            if step.session_id == place and step.base_len >= 9:
                logits[row] = bad
            row += step.num_judged_rows
        return judge(steps, logits, draws)

    monkeypatch.setattr(judging, "judge", spoilt)
    texts, failed = run(verifier)

    assert list(failed) == [place]
    assert (failed[place].retry, failed[place].reason[:42]) == (True, "the target's logits are not finite numbers")
    assert texts[place] == quiet[place][: len(texts[place])]
    assert {i: text for i, text in texts.items() if i != place} == {i: t for i, t in quiet.items() if i != place}
    for i in list(verifier.sessions):
        engine.close(i)
    assert engine.free_slots == 1024


@pytest.mark.parametrize("place", range(NUM))
def test_a_judge_that_raises_for_one_session_fails_that_one(
    model: str, quiet: dict[int, list[int]], place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any exception. The forward pass is not repeated."""
    engine = TorchEngine(model, device="cpu", dtype="float32", kv_slots=1024)
    verifier = make_verifier(engine)
    open_all(verifier, PROMPTS, **WARM)
    judge_shaped = judging.judge_shaped

    def raising(placed: Any, *arguments: Any) -> Any:
        if any(judged.step.session_id == place for judged in placed):
            raise OverflowError("Python int too large to convert to C long")
        return judge_shaped(placed, *arguments)

    monkeypatch.setattr("specq.verification.judge.judge_shaped", raising)
    monkeypatch.setattr(judging, "judge_shaped", raising)
    forward, passes = engine._forward, []
    monkeypatch.setattr(engine, "_forward", lambda rows: passes.append(1) or forward(rows))
    texts, failed = run(verifier)

    assert (list(failed), failed[place].retry, "OverflowError" in failed[place].reason) == ([place], False, True)
    assert {i: text for i, text in texts.items() if i != place} == {i: t for i, t in quiet.items() if i != place}
    assert len(passes) == verifier.num_steps


def test_a_forward_pass_that_raises_gives_its_slots_back(
    model: str, quiet: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the laying out of rows: the step is repeated in halves, and no slot is lost."""
    engine = TorchEngine(model, device="cpu", dtype="float32", kv_slots=1024)
    verifier = make_verifier(engine)
    open_all(verifier, PROMPTS, **WARM)
    for owner, name in ((engine, "_forward"), (engine._pool, "stage_all")):
        original = getattr(owner, name)
        state = {"calls": 0}

        def raising(*arguments: Any, original: Any = original, state: dict[str, int] = state) -> Any:
            state["calls"] += 1
            if state["calls"] % 5 == 0:
                raise MemoryError("by chance")
            return original(*arguments)

        monkeypatch.setattr(owner, name, raising)
    texts, failed = run(verifier)
    assert texts == quiet
    assert not failed
    for i in list(verifier.sessions):
        engine.close(i)
    assert engine.free_slots == 1024


SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "banned": ({"bad_token_ids": tuple((i,) for i in range(12))}, "every token is banned at position 1"),
    "overflow": ({"repetition_penalty": 1e-40}, "the logits overflow at position 1"),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strategy", ["deterministic", "probabilistic", "threshold", "typical", "greedy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_reason_says_which_it_was(shape: str, strategy: str, temperature: float) -> None:
    """All tokens banned, or penalties that overflow: one of two steps is at fault, and says so."""
    values, reason = SHAPES[shape]
    params = SamplingParams(strategy=strategy, temperature=temperature, **values)
    history = Past(params, prompt_len=1).history([1])
    bad = SessionStep(7, 0, np.array([1], np.int32), params, history=history)
    good = SessionStep(8, 0, np.array([1], np.int32), SamplingParams(strategy=strategy, temperature=temperature))
    logits = torch.linspace(1, 2, 12).repeat(3, 1)

    first, fault, last = judging.judge_each([good, bad, good], logits)

    assert first.fault is last.fault is None
    assert (
        first.token_ids.tolist() == last.token_ids.tolist() == judging.judge([good], logits[:1])[0].token_ids.tolist()
    )
    assert fault.fault is not None
    assert fault.fault.reason.startswith(reason)
    assert (fault.fault.retry, fault.path, len(fault.token_ids)) == (False, (), 0)


@pytest.mark.parametrize("strategy", ["deterministic", "probabilistic", "threshold", "typical", "greedy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_below_a_rejected_node_is_not_a_fault(strategy: str, temperature: float) -> None:
    """Plain decoding would never see it: a draft must not fail a session. Below an accepted node it is one."""
    params = SamplingParams(strategy=strategy, temperature=temperature, top_k=1)
    tree = Tree(np.array([5, 6], np.int32), np.array([-1, -1], np.int32), np.zeros(2, np.float32))
    step = SessionStep(7, 0, np.array([1], np.int32), params, tree)
    logits = torch.zeros(3, 12)
    logits[0, 6], logits[2, 3] = 90, 90
    plain = judging.judge([step], logits)[0]

    logits[1] = torch.nan
    (judgement,) = judging.judge_each([step], logits)
    assert judgement.fault is None
    assert (judgement.path, judgement.token_ids.tolist()) == (plain.path, plain.token_ids.tolist())

    logits[1], logits[2] = 0, torch.nan
    (judgement,) = judging.judge_each([step], logits)
    assert (judgement.fault is not None) == (strategy != "greedy")
