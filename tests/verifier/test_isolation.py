"""One session's fault, wherever it strikes, is that session's alone: the others' texts and retries are as if it were
not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from specq.drafting.suffix.source import SuffixDecoder
from specq.engines.torch.engine import TorchEngine
from specq.models import resolve_model
from specq.protocol.errors import EngineError, EngineLostError
from specq.protocol.messages import Close, Draft, Open, SessionFailed, Verdict
from specq.protocol.params import SamplingParams
from specq.protocol.step_output import NO_TAP, StepOutput, Tap
from specq.protocol.types import Judgement, SessionStep, Tree
from specq.runtime.isolation import Faults, in_halves
from specq.testing.toy import ToyEngine, toy_text
from specq.text.detokenizer import StopMatcher
from specq.verification import judge as judging
from specq.verification.devices import check_alive
from specq.verifier.core import Verifier
from specq.verifier.models.step_curve import StepCurve
from specq.verifier.sessions.grafting import graft_batch
from specq.verifier.sessions.history import Past
from specq.verifier.sessions.session import Session
from specq.verifier.sources import Budget, DraftBatch, DraftSource, source_set
from specq.verifier.step import node_choice, plan
from specq.verifier.trees import MAX_END_IDS, DraftTrees
from tests.verifier.sessions import graft, make_draft, make_session

NUM = 8
LENGTH = 12
MAGIC = 49
Steps = Sequence[SessionStep]


class Broken(ToyEngine):
    """Its steps raise where a session's tokens have the magic one, before or after half of the others were computed."""

    error: Exception = ValueError("what a user sent")

    def step(self, steps: Steps, tap: Tap = NO_TAP) -> StepOutput:
        if any(MAGIC in step.token_ids.tolist() for step in steps):
            raise self.error
        return super().step(steps, tap)


def make_verifier(engine: Any, **options: Any) -> Verifier:
    return Verifier(engine, StepCurve([1, 64], [0.001, 0.002]), incarnation=1, **options)


def open_all(verifier: Verifier, prompts: Sequence[Sequence[int]], **params: Any) -> None:
    for i, prompt in enumerate(prompts):
        message = Open(
            session_id=i, epoch=1, prompt_len=len(prompt), tokens_left=LENGTH,
            params=SamplingParams(max_tokens=LENGTH, **params), token_ids=np.array(prompt, np.int32),
        )  # fmt: skip
        assert verifier.handle(message, 0.0) == []


def run(verifier: Verifier, act: Callable[[], object] = bool) -> tuple[dict[int, list[int]], dict[int, SessionFailed]]:
    """Step until all work is done. Return the texts and the failures."""
    texts: dict[int, list[int]] = {i: [] for i in verifier.sessions}
    failed: dict[int, SessionFailed] = {}
    for _ in range(10 * LENGTH):
        if not verifier.has_work:
            return texts, failed
        act()
        for message in verifier.step(lambda: 0.0):
            if isinstance(message, SessionFailed):
                assert message.session_id not in failed
                failed[message.session_id] = message
            else:
                assert isinstance(message, Verdict)
                texts[message.session_id] += message.token_ids.tolist()
    raise AssertionError("the sessions never end")


# --- what raises for one of eight
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(NUM))
@pytest.mark.parametrize("kinds", [(SuffixDecoder,), ()], ids=["suffix", "alone"])
def test_a_step_that_raises_for_one_session_fails_that_one(place: int, kinds: tuple[type[SuffixDecoder], ...]) -> None:
    """Wherever among the sessions it is, the others end with their texts, no step lost, none handed back."""
    prompts = [[i + 1, 2, MAGIC if i == place else 3] for i in range(NUM)]
    verifier = make_verifier(Broken(), sources=[kind() for kind in kinds])
    open_all(verifier, prompts, ignore_eos=True)

    texts, failed = run(verifier)

    assert list(failed) == [place]
    assert (failed[place].retry, failed[place].reason) == (
        True,
        "the session could not be computed: ValueError: what a user sent",
    )
    for i in set(range(NUM)) - {place}:
        assert texts[i] == toy_text(prompts[i], LENGTH)


def test_several_at_once_are_all_found() -> None:
    """A fault in each half, and two side by side."""
    prompts = [[i + 1, 2, MAGIC if i in (0, 1, 5) else 3] for i in range(NUM)]
    verifier = make_verifier(Broken())
    open_all(verifier, prompts)

    texts, failed = run(verifier)

    assert sorted(failed) == [0, 1, 5]
    assert all(texts[i] == toy_text(prompts[i], LENGTH) for i in (2, 3, 4, 6, 7))


PLACES: dict[str, tuple[object, str]] = {
    "planned": (plan, "choose_nodes"),
    "shared": (Session, "history"),
    "cut": (Session, "up_to_end"),
    "opened": (ToyEngine, "open"),
}


@pytest.mark.parametrize("where", PLACES)
def test_what_raises_for_one_session_fails_that_one(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plan, the commit, the engine's opening: the same."""
    owner, name = PLACES[where]
    original = getattr(owner, name)

    def raising(self: Any, *arguments: Any) -> Any:
        ids = self if isinstance(self, list) else [self, *arguments]
        if 3 in [getattr(one, "session_id", one) for one in ids if isinstance(one, Session | int)]:
            raise OverflowError("too large")
        return original(self, *arguments)

    prompts = [[i + 10, 2, 3] for i in range(NUM)]
    verifier = make_verifier(ToyEngine())
    ends = tuple(range(101, 101 + MAX_END_IDS))
    looked_at = {"presence_penalty": 0.1, "stop_token_ids": ends}  # one by one, which few sessions are
    open_all(verifier, prompts, **looked_at)
    if where == "planned":
        for session in verifier.sessions.values():
            graft(session, draft_for(session.session_id, [7]), 0.0)
    monkeypatch.setattr(owner, name, raising)

    texts, failed = run(verifier)

    assert (list(failed), failed[3].retry, "OverflowError: too large" in failed[3].reason) == ([3], False, True)
    assert all(texts[i] == toy_text(prompts[i], LENGTH) for i in set(range(NUM)) - {3})


def draft_for(session_id: int, tokens: list[int]) -> Draft:
    return Draft(
        session_id=session_id, epoch=1, lane=0, base_len=3, first_id=0, token_ids=np.array(tokens, np.int32),
        parent_ids=np.arange(len(tokens), dtype=np.int32) - 1, scores=np.full(len(tokens), -0.1, np.float16),
    )  # fmt: skip


def test_a_session_that_cannot_be_opened_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop strings' matcher raises: the broker is notified why, and others open."""

    def raising(self: Any, tokens: Any) -> int:
        raise IndexError("token 9")

    monkeypatch.setattr(StopMatcher, "push", raising)
    verifier = make_verifier(ToyEngine())
    verifier.inbox.codec = object()  # type: ignore[assignment]
    monkeypatch.setattr("specq.verifier.sessions.session.StopMatcher.__init__", lambda self, *arguments: None)
    message = Open(
        session_id=7, epoch=4, prompt_len=1, tokens_left=5, params=SamplingParams(stop=("x",)),
        token_ids=np.array([1], np.int32),
    )  # fmt: skip
    (failed,) = verifier.handle(message, 0.0)
    assert isinstance(failed, SessionFailed)
    assert (failed.session_id, failed.epoch, failed.retry, verifier.sessions) == (7, 4, False, {})
    assert "IndexError" in failed.reason


def test_a_draft_that_cannot_be_grafted_costs_only_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter is not trusted: the session goes on without what was drafted for it."""
    verifier = make_verifier(ToyEngine())
    open_all(verifier, [[1, 2, 3], [4, 5, 6]])

    def raising(batch: DraftBatch, now: float) -> None:
        graft_batch(batch, now)
        raise KeyError(batch.lanes)

    monkeypatch.setattr(source_set, "graft_batch", raising)
    verifier.handle(draft_for(0, [7, 8]), 0.0)
    texts, failed = run(verifier)
    assert (verifier.sessions[0].num_live, verifier.trees.num_nodes) == (0, 0)
    assert (texts, failed) == ({0: toy_text([1, 2, 3], LENGTH), 1: toy_text([4, 5, 6], LENGTH)}, {})


def test_a_text_that_raises_costs_only_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked once for that session, and for the others on."""
    source, asked = SuffixDecoder(), list[int]()
    begin_text = source._texts.open

    def raising(place: int, *limits: int) -> None:
        asked.append(place)
        if place == verifier.sessions[0].place:
            raise OverflowError("too large")
        begin_text(place, *limits)

    monkeypatch.setattr(source._texts, "open", raising)
    verifier = make_verifier(ToyEngine(), sources=(source,), measures_drafts=False)
    open_all(verifier, [[1, 2, 3], [4, 5, 6]])
    places = [verifier.sessions[i].place for i in (0, 1)]
    texts, failed = run(verifier)
    assert (texts, failed) == ({0: toy_text([1, 2, 3], LENGTH), 1: toy_text([4, 5, 6], LENGTH)}, {})
    assert sorted(asked) == sorted(places)
    assert [place in source._texts for place in places] == [False, True]


def test_what_others_promise_for_one_session_costs_only_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tree cannot be weighed: nothing is hung beside it, and the other session is drafted for."""
    trees = DraftTrees()
    context = [*range(10, 32), 1, 2, 3, 10, 11, 12]
    sessions = [make_session(context, trees=trees, session_id=i) for i in (0, 1)]
    for session in sessions:
        graft(session, make_draft(len(context), 0, [99], [-1]), 0.0)
    of_choice = node_choice._in_order_of_choice

    def raising(some: Sequence[Session], *found: Any) -> Any:
        if sessions[0] in some:
            raise KeyError(5)
        return of_choice(some, *found)

    monkeypatch.setattr(node_choice, "_in_order_of_choice", raising)
    (batch,) = SuffixDecoder().collect(sessions, Budget(StepCurve([1, 8], [1.0, 1.0]), 0.01), lambda: 0.0)
    assert batch.sessions == [sessions[1]]


class BrokenSource(DraftSource):
    """A source with one call that raises."""

    name = "broken"
    uses_scratch = True

    def __init__(self, where: str) -> None:
        def raising(*arguments: object) -> Sequence[DraftBatch]:
            raise RuntimeError(f"no {where} today")

        setattr(self, where, raising)

    def collect(self, sessions: Sequence[Session], budget: Budget, clock: Callable[[], float]) -> Sequence[DraftBatch]:
        return ()


@pytest.mark.parametrize("where", ["begin", "collect", "scratch", "observe", "close"])
def test_a_source_that_raises_costs_its_drafts(where: str) -> None:
    """In any call: no session is harmed, and the source is not called again."""
    sources = (BrokenSource(where), SuffixDecoder())
    verifier = make_verifier(ToyEngine(), sources=sources, measures_drafts=False)
    open_all(verifier, [[1, 2, 3], [4, 5, 6]])
    texts, failed = run(verifier, lambda: verifier.begin(0.0))
    verifier.handle(Close(session_id=0, epoch=1), 0.0)
    assert (texts, failed) == ({0: toy_text([1, 2, 3], LENGTH), 1: toy_text([4, 5, 6], LENGTH)}, {})
    assert [source.name for source in verifier.sources.sources] == ["remote", "suffix"]


# --- faults without a guilty session
# ---------------------------------------------------------------------------------------------


def test_an_engine_that_is_lost_ends_the_process() -> None:
    """A device in error is not tried again, and no session is blamed."""
    engine = Broken()
    engine.error = EngineLostError("CUDA error")
    verifier = make_verifier(engine)
    open_all(verifier, [[1, 2, MAGIC], [1, 2, 3]])
    with pytest.raises(EngineLostError, match="CUDA error"):
        verifier.step(lambda: 0.0)
    assert engine.num_rows == []


def test_an_engine_that_fails_with_everything_ends_the_process() -> None:
    """It is tried with a session of the verifier's own before the blame is laid on others."""

    class Dead(ToyEngine):
        def step(self, steps: Steps, tap: Tap = NO_TAP) -> StepOutput:
            raise RuntimeError("out of order")

    verifier = make_verifier(Dead())
    open_all(verifier, [[1, 2, 3], [4, 5, 6]])
    with pytest.raises(EngineLostError, match="fails with every session: RuntimeError"):
        verifier.step(lambda: 0.0)


def test_halves_leave_out_only_what_raises() -> None:
    """Each is done exactly once but for those at fault, in order, for every pattern of faults among six."""
    sessions = [draft_for(i, [1]) for i in range(6)]
    for pattern in range(2**6):
        faults, bad = Faults(), {i for i in range(6) if pattern >> i & 1}

        def act(some: Sequence[Draft], bad: set[int] = bad) -> list[int]:
            if bad.intersection(one.session_id for one in some):
                raise EngineError("no")
            return [one.session_id for one in some]

        done = [i for _, ids in in_halves(sessions, act, faults, "done") for i in ids]
        assert (done, set(faults.found)) == ([i for i in range(6) if i not in bad], bad)


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


def test_a_device_error_is_distinguished_from_a_session_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verifier checks the device after any error. If the check fails, it raises EngineLostError. A CPU is not
    checked."""

    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be reported later")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    check_alive(torch.device("cpu"))
    with pytest.raises(
        EngineLostError, match=r"the device cuda:0 failed, .*: CUDA error: device-side assert triggered$"
    ):
        check_alive(torch.device("cuda:0"))
