"""Commands change what the next answers are made with, and say what is wrong."""

from __future__ import annotations

import pytest

from specq.chat import MOST_TOKENS, ChatSettings
from specq.chat.chat import COMMANDS, Conversation, run_command
from specq.chat.reading import read_message
from specq.protocol import JobError
from tests.each import each


@pytest.fixture
def settings() -> ChatSettings:
    return ChatSettings({"max_tokens": 20}, Conversation(turns=[("a", "b")]))


@pytest.mark.parametrize(
    ("line", "shown", "parameters"),
    [
        ("/temp 0.8", "temperature: 0.8", {"temperature": 0.8}),
        ("/temperature 0.8", "temperature: 0.8", {"temperature": 0.8}),
        ("/temp", "temperature: 0 (greedy)", {}),
        ("/seed 7", "seed: 7", {"seed": 7}),
        ("/mode plain", "mode: plain", {"mode": "plain"}),
        ("/max 64", "max_tokens: 64", {"max_tokens": 64}),
        ("/max none", "max_tokens: 512", {"max_tokens": MOST_TOKENS}),
    ],
)
def test_parameters(line, shown, parameters, settings):
    assert run_command(line, settings) == shown
    wanted = {"max_tokens": 20} | parameters
    assert settings.parameters == {name: value for name, value in wanted.items() if value is not None}


@each(
    ("line", "said"),
    [
        ("/temp warm", "temperature is 'warm', but must be a number, or none"),
        ("/temp 101", "temperature is 101"),
        ("/temp nan", "temperature is nan"),
        ("/seed 1.5", "seed is '1.5', but must be a whole number, or none"),
        ("/mode fast", "mode is 'fast', but must be one of async, sync, plain"),
        ("/max 0", "max_tokens is 0"),
        ("/", "unknown command /; known: /help"),
        ("/etc/passwd", "unknown command /etc/passwd; known: /help, /system, /reset, /temp, /seed"),
    ],
)
def test_a_wrong_command_is_reported_and_changes_no_setting(line, said, settings):
    with pytest.raises(JobError) as raised:
        run_command(line, settings)
    assert said in str(raised.value)
    assert settings == ChatSettings({"max_tokens": 20}, Conversation(turns=[("a", "b")]))


def test_the_conversation(settings):
    assert "Be brief" in run_command("/system Be brief. ", settings)
    assert settings.conversation.messages("c")[0] == {"role": "system", "content": "Be brief."}
    assert [message["content"] for message in settings.conversation.messages("c")] == ["Be brief.", "a", "b", "c"]
    run_command("/reset", settings)
    assert [message["content"] for message in settings.conversation.messages("c")] == ["Be brief.", "c"]
    run_command("/system none", settings)
    assert settings.conversation.messages("c") == [{"role": "user", "content": "c"}]
    run_command("/exit", settings)
    assert settings.ended


def test_help_names_every_command(settings):
    shown = run_command("/help", settings)
    assert all(f"/{name}" in shown for name in COMMANDS)


def test_the_oldest_turns_go_until_the_rest_fits():
    talk = Conversation("s", [(str(i), "x" * i) for i in range(4)])
    assert talk.fit("q", lambda messages: "".join(m["content"] for m in messages), 9) == 2
    assert [asked for asked, _ in talk.turns] == ["2", "3"]
    assert talk.fit("q", lambda messages: "".join(m["content"] for m in messages), 9) == 0


def test_a_question_that_never_fits_takes_all_turns_and_ends():
    talk = Conversation("", [("a", "b")])
    assert talk.fit("q" * 10, lambda messages: "q" * 10, 9) == 1
    assert talk.turns == []


@each(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""one', "two", 'three""" '], "one\ntwo\nthree"),
        (['"""one"""'], "one"),
        (['"""', "/reset", '"""'], "\n/reset\n"),
    ],
)
def test_messages_of_several_lines(lines, message):
    left = iter(lines)
    assert read_message(lambda prompt: next(left)) == message
    assert list(left) == []
