"""Prompts that sessions share, and sessions that take turns where there is no room for all."""

from itertools import takewhile

import numpy as np
import pytest

from specq.protocol.arrays import Int32Array
from specq.protocol.messages import (
    Ack,
    Close,
    Open,
)
from specq.protocol.params import SamplingParams, Speculation
from specq.testing.toy import ToyEngine, toy_info, toy_text
from tests.verifier.verifiers import PROMPT, make_verifier, open_session, step


def test_a_common_prefix_is_computed_once() -> None:
    """Sessions of one prompt wait until the first has computed it; others do not."""
    verifier = make_verifier(max_step_rows=16)
    prompt = np.arange(1, 41, dtype=np.int32)
    for session_id, start in ((1, 0), (2, 0), (3, 1)):
        message = Open(
            session_id=session_id, epoch=1, prompt_len=40, tokens_left=5, params=SamplingParams(),
            token_ids=np.concatenate([prompt[start:], prompt[:start]]),
        )  # fmt: skip
        verifier.handle(message, 0.0)
    step(verifier)
    assert [verifier.sessions[i].is_open for i in (1, 2, 3)] == [True, False, True]
    for _ in range(12):
        step(verifier)
    assert all(session.finish == "length" for session in verifier.sessions.values())


class SharingEngine(ToyEngine):
    """Shares whole blocks of what was computed for others."""

    block_size = 16

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        known = [num_common(context, token_ids.tolist()) for context in self.contexts.values()]
        start: int = super().open(session_id, token_ids) + (
            min(max(known, default=0), len(token_ids) - 1) // self.block_size * self.block_size
        )
        self.contexts[session_id] = token_ids[:start].tolist()
        return start


def num_common(one: list[int], other: list[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


@pytest.mark.parametrize("num_sessions", [2, 9])
def test_sessions_of_one_system_prompt_do_not_queue_for_their_own_prompts(num_sessions: int) -> None:
    """The first one computes what they have in common; then all go on together."""
    verifier = make_verifier(SharingEngine(toy_info(kv_slots=4096)), max_step_rows=512)
    for i in range(num_sessions):
        own = [(i + 2 * j) % 50 for j in range(1, 9)]
        message = Open(
            session_id=i, epoch=1, prompt_len=48, tokens_left=60, params=SamplingParams(),
            token_ids=np.array([*range(1, 41), *own], np.int32),
        )  # fmt: skip
        verifier.handle(message, 0.0)
    sessions = verifier.sessions
    step(verifier)
    assert [sessions[i].is_open for i in range(num_sessions)] == [True] + [False] * (num_sessions - 1)
    step(verifier)
    assert all(sessions[i].length > 48 for i in range(num_sessions))


@pytest.mark.parametrize(("length", "block_size"), [(48, 16), (63, 32), (64, 32), (40, 16), (49, 16), (4, 16)])
def test_sessions_of_one_prompt_wait_for_none_of_it_that_they_cannot_share(length: int, block_size: int) -> None:
    """What has KV already, and what the first one computes, they have; the rest each computes by itself, all in the
    same step."""
    engine = SharingEngine(toy_info(kv_slots=4096))
    engine.block_size = block_size
    verifier = make_verifier(engine, max_step_rows=512)
    sessions = verifier.sessions
    for num_before in (0, 9):  # nothing of the prompt has KV; then some has
        for i in range(9):
            message = Open(
                session_id=num_before + i, epoch=1, prompt_len=length, tokens_left=60, params=SamplingParams(),
                token_ids=np.arange(length, dtype=np.int32) % 50,
            )  # fmt: skip
            verifier.handle(message, 0.0)
        engine.num_rows.clear()
        for _ in range(3):  # the first one; where blocks are large, one that learns that no more is shared; the others
            step(verifier)
        assert all(session.length > length for session in sessions.values())
        num_shared = (length - 1) // block_size * block_size
        assert max(engine.num_rows) <= max(length, 9 * (length - num_shared + 3) + 9)


@pytest.mark.parametrize("prompt", [PROMPT, [*PROMPT, *range(8, 25)]], ids=["that grows", "that does not fit"])
def test_a_parked_session_gives_its_room_to_one_that_runs(prompt: list[int]) -> None:
    """It is evicted, and goes on with the same text once it may."""
    verifier = make_verifier(ToyEngine(toy_info(kv_slots=40)), max_uncommitted=25)
    open_session(verifier, tokens_left=30)
    while verifier.has_work:
        step(verifier)
    message = Open(
        session_id=8,
        epoch=1,
        prompt_len=3,
        tokens_left=18,
        params=SamplingParams(),
        token_ids=np.array(prompt, np.int32),
    )
    verifier.handle(message, 0.0)
    while verifier.has_work:
        step(verifier)
    parked, other = verifier.sessions[7], verifier.sessions[8]
    assert (other.finish, other.token_ids) == ("length", prompt + toy_text(prompt, 18))
    assert (parked.is_open, parked.length) == (False, 29)
    verifier.handle(Ack(session_id=7, epoch=1, length=29), 0.0)
    verifier.handle(Close(session_id=8, epoch=1), 0.0)
    while verifier.has_work:
        step(verifier)
    assert parked.token_ids == PROMPT + toy_text(PROMPT, 30)


@pytest.mark.parametrize("kv_slots", [60, 100, 300])
def test_no_session_is_opened_to_be_evicted_at_once(kv_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose context fits, but not beside a row of each that is open, waits: it would be opened in each step, and
    evicted in the same."""
    engine, opened = ToyEngine(toy_info(kv_slots=kv_slots)), set[int]()
    verifier, texts = make_verifier(engine), {i: list[int]() for i in range(40)}

    def noted(session_id: int, token_ids: Int32Array, owner: str) -> int:
        opened.add(session_id)
        return ToyEngine.open(engine, session_id, token_ids)

    def close(session_id: int) -> None:
        assert session_id not in opened, "opened in this step"
        ToyEngine.close(engine, session_id)

    monkeypatch.setattr(engine, "open", noted)
    monkeypatch.setattr(engine, "close", close)
    for i in texts:
        open_session(verifier, i, tokens_left=30, mode="plain", seed=i)
    while verifier.has_work:
        opened.clear()
        verdicts = step(verifier)
        opened.clear()
        for verdict in verdicts:
            texts[verdict.session_id] += verdict.token_ids.tolist()
            length = verdict.base_len + len(verdict.token_ids)
            verifier.handle(Ack(session_id=verdict.session_id, epoch=1, length=length), 0.0)
            if verdict.finish:
                verifier.handle(Close(session_id=verdict.session_id, epoch=1), 0.0)
    assert texts == {i: toy_text(PROMPT, 30, i) for i in texts}


@pytest.mark.parametrize("kv_slots", [40, 60, 90])
@pytest.mark.parametrize("max_sessions", [1, 2, 3])
def test_sessions_that_take_turns_keep_the_work_of_others(kv_slots: int, max_sessions: int) -> None:
    """More sessions than take part in a step, prompts of several steps, and room for few: all come to their end, in
    bounded rows."""
    engine = ToyEngine(toy_info(kv_slots=kv_slots))
    verifier = make_verifier(engine, max_sessions=max_sessions, max_step_rows=6)
    prompts = {session_id: [1 + session_id % 3, *[9] * 27] for session_id in range(1, 7)}
    for session_id, prompt in prompts.items():
        message = Open(
            session_id=session_id, epoch=1, prompt_len=28, tokens_left=9, params=SamplingParams(),
            token_ids=np.array(prompt, np.int32), speculation=Speculation(mode="plain"),
        )  # fmt: skip
        verifier.handle(message, 0.0)
    while verifier.has_work:
        step(verifier)
        assert sum(engine.num_rows) < 4 * 6 * 36, "what was computed is computed again and again"
        for session in [session for session in verifier.sessions.values() if session.finish]:
            assert session.token_ids == prompts[session.session_id] + toy_text(prompts[session.session_id], 9)
            verifier.handle(Close(session_id=session.session_id, epoch=1), 0.0)
    assert not verifier.sessions
