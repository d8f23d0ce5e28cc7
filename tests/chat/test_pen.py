"""Text shows its origin with colours and without, and cannot steer the terminal."""

from __future__ import annotations

import io

from specq.chat import Pen, pen_for
from specq.chat.pen import MARKS
from specq.protocol import COLOCATED, CORRECTED, DRAFT_WORKER, LOOKAHEAD, LOOKUP, ORIGINS, PLAIN
from tests.each import each


def written(style: str, *parts: tuple[str, str], capsys) -> str:
    pen = Pen(style)
    for text, origin in parts:
        pen.write(text, origin)
    pen.finish()
    return capsys.readouterr().out


def test_marks_stand_around_runs(capsys):
    """Neighbours of one origin share a pair of marks, which is closed at the end of the line."""
    parts = [("The", CORRECTED), (" sky", CORRECTED), (" is", LOOKUP), (" so", COLOCATED), (" blue", PLAIN)]
    assert written("marks", *parts, capsys=capsys) == "«The sky» is so\u2039 blue\u203a\n"


def test_colours_change_where_the_origin_does(capsys):
    shown = written("colours", ("a", COLOCATED), ("b", COLOCATED), ("c", CORRECTED), ("d", PLAIN), capsys=capsys)
    assert shown == "\x1b[0m\x1b[32mab\x1b[0m\x1b[33mc\x1b[0md\n"


def test_plain_text_is_the_text(capsys):
    assert written("plain", ("a\x1b[2J", LOOKUP), ("b", PLAIN), capsys=capsys) == "a\x1b[2Jb\n"


@each("style", ["marks", "colours"])
def test_a_model_cannot_steer_the_terminal(style, capsys):
    shown = written(style, ("\x1b]0;title\x07 \x9b2J\r\x7f\tline\n", LOOKUP), capsys=capsys)
    assert "␛]0;title␇ \ufffd2J␍␡\tline\n" in shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


@each(
    ("stream", "environment", "style"),
    [
        (Terminal(), {"TERM": "xterm"}, "colours"),
        (Terminal(), {"TERM": "dumb"}, "marks"),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": "1"}, "marks"),
        (Terminal(), {"TERM": "xterm", "NO_COLOR": ""}, "colours"),
        (io.StringIO(), {"TERM": "xterm"}, "plain"),
    ],
)
def test_where_there_are_colours(stream, environment, style, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert pen_for(stream).style == style


def test_the_legend_is_written_as_it_explains(capsys):
    Pen("marks").legend()
    assert "drafted and accepted   «corrected by the target»   \u2039the target's own" in capsys.readouterr().out
    Pen("plain").legend()
    assert capsys.readouterr().out == ""


def test_the_legend_leaves_out_what_is_not_there(capsys):
    Pen("colours").legend({DRAFT_WORKER, LOOKAHEAD})
    shown = capsys.readouterr().out
    assert "draft model in the verifier" in shown
    assert "draft worker" not in shown
    assert "lookahead" not in shown


def test_every_origin_has_its_mark():
    assert set(MARKS) == set(ORIGINS)
