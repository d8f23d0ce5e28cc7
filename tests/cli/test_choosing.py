"""`specq chat --model X` beside a broker that serves other models: it is said, and the user chooses."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from specq.cli import chat, main, outputs
from specq.protocol import EngineError
from tests.each import each

SERVED = ["smollm2", "mine"]


@pytest.fixture
def outcome(monkeypatch):
    """Run `specq chat` beside a broker that serves SERVED; return what it did, and all that it said."""
    done: list[str] = []

    def note(text):
        done.append(text)
        raise EngineError("enough is known")

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(chat, "_served_models", lambda _client: SERVED)
    monkeypatch.setattr(chat, "_connect", lambda _config, model, _wait_s: note(f"connected for {model!r}"))
    monkeypatch.setattr(
        chat, "_start", lambda config, _stack: note(f"started {config.target.model}, {config.draft.model or 'its own'}")
    )

    def run(*arguments: str, typed: str = "", at_terminal: bool = True) -> tuple[list[str], str, int]:
        done.clear()
        for module in (chat, outputs):
            monkeypatch.setattr(module, "is_terminal", lambda: at_terminal)
        ended = CliRunner().invoke(main, ["chat", *arguments, "hi"], input=typed)
        return list(done), ended.stderr, ended.exit_code

    return run


@each(
    ("typed", "expected"),
    [
        ("1\n", ["started tiny, its own"]),
        ("2\n", ["connected for 'smollm2'"]),
        ("3\n", ["connected for 'mine'"]),
        ("4\n", []),
        ("9\nx\n3\n", ["connected for 'mine'"]),
        ("", []),
    ],
)
def test_the_user_chooses(outcome, typed, expected):
    """What is none of the choices is asked for again; the end of input gives up. The answer's own place, standard
    output, stays free."""
    done, said, status = outcome("--model", "tiny", typed=typed)
    assert done == expected
    assert status == 1
    assert "the broker at tcp://127.0.0.1:5750 does not serve the model 'tiny'; served models: smollm2, mine" in said
    assert ["Aborted" in said, "enough is known" in said] == [not expected, bool(expected)]


def test_without_a_terminal_the_message_explains_what_to_do(outcome):
    done, said, status = outcome("--model", "tiny", at_terminal=False)
    assert (done, status, said.count("\n")) == ([], 2, 1)
    assert "--model smollm2" in said
    assert "specq up --model tiny --broker tcp://127.0.0.1:PORT" in said


@each(
    ("at_terminal", "arguments", "expected"),
    [
        (at_terminal, arguments, expected)
        for at_terminal in [True, False]
        for (arguments, expected) in [
            (("--model", "smollm2"), "connected for 'smollm2'"),
            ((), "connected for ''"),
            (("--model", "tiny", "--draft-model", "tiny"), "started tiny, tiny"),
            (("--model", "tiny", "--draft-model", "none"), "started tiny, none"),
            (("--model", "tiny", "--broker", "tcp://127.0.0.1:5999"), "connected for 'tiny'"),
        ]
    ],
)
def test_explicit_options_skip_the_question(outcome, arguments, expected, at_terminal):
    """What is served, processes of one's own with what drafts in them, or which broker."""
    done, said, _ = outcome(*arguments, at_terminal=at_terminal)
    assert done == [expected]
    assert said == "specq: enough is known\n"


def test_a_name_that_no_model_could_have_is_refused_with_the_served_one_that_is_like_it(outcome):
    done, said, status = outcome("--model", "smolm2")
    assert (done, status) == ([], 2)
    assert said.endswith("served models: smollm2, mine; did you mean 'smollm2'?\n")


@each("served", [None, []])
def test_the_model_starts_when_no_server_runs(outcome, monkeypatch, served):
    monkeypatch.setattr(chat, "_served_models", lambda _client: served)
    assert outcome("--model", "tiny")[0] == ["started tiny, its own"]
