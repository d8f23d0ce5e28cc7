"""Answers are written and kept; Ctrl-C stops an answer, and what fails costs its question."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from types import SimpleNamespace

import pytest

from specq.chat import Chat, ChatSettings, Pen
from specq.client import Piece, Result
from specq.protocol import CORRECTED, LOOKUP, EngineError, JobError

STATS = {"rounds": 2, "draft_tokens": 4, "accepted_tokens": 3, "acceptance_rate": 0.75, "tokens_per_second": 88.0}


class FakeClient:
    """Answers each question with two pieces, or with what is planned for it."""

    def __init__(self, limit: int = 1000, **plans):
        codec = SimpleNamespace(
            has_chat_template=True, encode_chat=lambda messages: "".join(message["content"] for message in messages)
        )
        self.model = SimpleNamespace(info=SimpleNamespace(name="toy"), codec=codec, context_length=limit)
        self.plans, self.asked = plans, []

    async def served(self):
        return self.model

    async def close(self):
        pass

    async def stream(self, *, messages, **parameters):
        self.asked.append((messages, parameters))
        yield Piece("Hel", spans=(("He", CORRECTED), ("l", LOOKUP)))
        await self.plans.get(messages[-1]["content"], _nothing)()
        yield Piece("lo", spans=(("lo", LOOKUP),))
        yield Piece("", result=Result("q", "p", token_ids=[1, 2, 3], finish_reason="stop", stats=STATS | {"seed": 7}))


async def _nothing():
    pass


async def _interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()


async def _failed():
    raise JobError("the job failed")


class Session:
    """A chat with a fake client, and what it has noted."""

    def __init__(self, client: FakeClient, tend=bool, **parameters):
        self.client, self.notes, self.settings = client, [], ChatSettings(parameters)
        self.chat = Chat(client, self.settings, Pen("marks"), self.notes.append, tend)

    def talk(self, *lines: str):
        left = iter(lines)
        try:
            self.chat.talk(lambda prompt: next(left))
        finally:
            self.chat.close()
        assert list(left) == []

    @property
    def turns(self):
        return self.settings.conversation.turns


def test_an_answer_is_written_and_kept(capsys):
    session = Session(FakeClient(), max_tokens=9)
    session.talk("hi", "", "again", "/quit")
    assert capsys.readouterr().out == "«He»llo\n" * 2
    assert session.turns == [("hi", "Hello"), ("again", "Hello")]
    (_, parameters), (messages, _) = session.client.asked
    assert parameters == {"max_tokens": 9}
    assert [message["content"] for message in messages] == ["hi", "Hello", "again"]
    assert session.notes[0] == "(3 tokens in 2 rounds, 3 of 4 checked drafts accepted (75%), 88 tokens/s)"


def test_a_command_changes_the_next_answer():
    session = Session(FakeClient())
    session.talk("/temp 0.5", "hi", "/seed x", "/quit")
    assert session.client.asked[0][1] == {"temperature": 0.5}
    assert session.notes[0] == "temperature: 0.5"
    assert session.notes[1].endswith("88 tokens/s; seed 7)")
    assert session.notes[2] == "specq: seed is 'x', but must be a whole number, or none"


@pytest.fixture
def heeds_ctrl_c():
    """As in a terminal: a shell makes what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_stops_the_answer_and_not_the_chat(capsys):
    """What came of it stays, on the screen and in the conversation."""
    session = Session(FakeClient(stop=_interrupted))
    session.talk("stop", "hi", "/quit")
    assert session.notes[0] == "(stopped)"
    assert session.turns == [("stop", "Hel"), ("hi", "Hello")]
    assert capsys.readouterr().out == "«He»l\n«He»llo\n"


def test_a_signal_during_the_wait_leaves_no_tasks_behind(caplog):
    """SIGTERM unwinds out of the loop; what waited there is stopped before the client closes, which else fails it where
    nobody looks."""
    started = []

    class Waiting(FakeClient):
        async def served(self):
            self.closed = asyncio.get_running_loop().create_future()
            started.append(asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGUSR1))
            await self.closed

        async def close(self):
            if not self.closed.done():
                self.closed.set_exception(JobError("the client was closed"))
            await asyncio.sleep(0.1)

    session = Session(Waiting())
    before = signal.signal(signal.SIGUSR1, lambda *_: sys.exit(1))
    try:
        with pytest.raises(SystemExit):
            session.chat.served()
        session.chat.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert started
    del session
    gc.collect()
    assert caplog.text == ""


def test_ctrl_c_at_the_prompt_says_how_to_end():
    def interrupted(prompt):
        raise KeyboardInterrupt if not session.notes else EOFError

    session = Session(FakeClient())
    session.chat.talk(interrupted)
    session.chat.close()
    assert session.notes == ["\n(Ctrl-D or /quit ends the chat)", ""]


def test_what_fails_is_shown():
    session = Session(FakeClient(fail=_failed))
    session.talk("fail", "hi", "/quit")
    assert session.notes[0] == "specq: the job failed"
    assert session.turns[-1] == ("hi", "Hello")


def test_processes_are_looked_after_while_an_answer_is_waited_for():
    def tend():
        if session.client.asked:
            raise EngineError("broker ended")

    session = Session(FakeClient(wait=asyncio.Event().wait), tend)
    with pytest.raises(EngineError, match="broker ended"):
        session.talk("wait")


def test_the_oldest_turns_go_with_a_note():
    """A quarter of the context, or `max_tokens` if that is less, is left for the answer."""
    session = Session(FakeClient(limit=40))
    session.talk("a" * 12, "b" * 12, "c" * 12, "/quit")
    assert session.turns == [("b" * 12, "Hello"), ("c" * 12, "Hello")]
    assert session.notes[2] == "(the oldest turn dropped: toy accepts 40 tokens in total)"


def test_a_model_without_a_template_does_not_chat():
    session = Session(FakeClient())
    session.client.model.codec.has_chat_template = False
    with pytest.raises(JobError, match="toy has no chat template, so it cannot chat"):
        session.chat.served()
    session.chat.close()
