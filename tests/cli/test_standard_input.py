"""Standard input as part of a question: piped text is read, and no command waits in vain."""

from __future__ import annotations

import os
import pty
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO, TextIOWrapper

import click
import pytest

from specq.cli.chat import _question
from specq.cli.outputs import read_all, read_piped
from tests.each import each

PATIENCE_S = 30.0  # less than a test may take
SAID = "specq: received no standard input within 0 s; continuing without it"


@contextmanager
def stdin_of(monkeypatch: pytest.MonkeyPatch, fd: int) -> Iterator[TextIOWrapper]:
    """Have this process read from a file descriptor, which is closed at the end."""
    with os.fdopen(fd, encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdin", stream)
        yield stream


@pytest.fixture
def open_pipe(monkeypatch) -> Iterator[int]:
    """The write end of a pipe that is standard input. It stays open until the test ends."""
    read_end, write_end = os.pipe()
    with stdin_of(monkeypatch, read_end), os.fdopen(write_end, "wb"):
        yield write_end


def test_what_is_in_a_pipe_is_read(monkeypatch):
    read_end, write_end = os.pipe()
    with os.fdopen(write_end, "wb") as writer:
        writer.write("wörld\n".encode())
    with stdin_of(monkeypatch, read_end):
        assert read_piped(pytest.fail) == "wörld\n"


def test_a_pipe_that_has_begun_is_read_to_its_end(monkeypatch):
    """However long the writer takes between its pieces."""
    read_end, write_end = os.pipe()

    def write() -> None:
        for piece in (b"one ", b"two ", b"three"):
            os.write(write_end, piece)
        os.close(write_end)

    writer = threading.Thread(target=write)
    with stdin_of(monkeypatch, read_end):
        writer.start()
        assert read_piped(pytest.fail, PATIENCE_S) == "one two three"
        writer.join()


def test_a_file_is_read(monkeypatch, tmp_path):
    (tmp_path / "notes.txt").write_text("notes", "utf-8")
    with stdin_of(monkeypatch, os.open(tmp_path / "notes.txt", os.O_RDONLY)):
        assert read_piped(pytest.fail, 0) == "notes"


def test_a_text_in_memory_is_read(monkeypatch):
    monkeypatch.setattr("sys.stdin", StringIO("notes"))
    assert read_piped(pytest.fail, 0) == "notes"


def test_an_open_pipe_without_a_byte_is_not_waited_for(open_pipe):
    told = []
    assert read_piped(told.append, 0) == ""
    assert [line.partition(" (")[0] for line in told] == [SAID]


def test_a_terminal_is_left_alone(monkeypatch):
    """Input typed meanwhile belongs to the next reader."""
    keyboard, terminal = pty.openpty()
    with os.fdopen(keyboard, "wb", buffering=0) as keys, stdin_of(monkeypatch, terminal) as stream:
        keys.write(b"typed\n")
        assert read_piped(pytest.fail, PATIENCE_S) == ""
        assert stream.readline() == "typed\n"


def test_a_closed_standard_input_is_empty(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert read_piped(pytest.fail, 0) == ""
    with pytest.raises(click.UsageError, match="standard input is closed"):
        read_all()
    with pytest.raises(click.UsageError, match="standard input is closed"):
        _question(())


@each("mode", [os.O_RDONLY, os.O_WRONLY])
def test_dev_null_is_empty(monkeypatch, mode):
    """Also where it cannot be read, as `nohup` leaves it."""
    with stdin_of(monkeypatch, os.open(os.devnull, mode)):
        assert read_piped(pytest.fail, PATIENCE_S) == ""


def test_an_explicit_unreadable_input_is_an_error(monkeypatch):
    with (
        stdin_of(monkeypatch, os.open(os.devnull, os.O_WRONLY)),
        pytest.raises(click.UsageError, match="cannot read standard input: Bad file descriptor"),
    ):
        read_all()


@each(
    ("words", "asked"),
    [
        (("Sum", "this", "up:"), "Sum this up: two\nlines"),
        (("Of", "-", "the first."), "Of two\nlines\n the first."),
        ((), "two\nlines"),
    ],
)
def test_what_is_piped_is_part_of_the_question(monkeypatch, words, asked):
    """At its end, unless `-` says where."""
    monkeypatch.setattr("sys.stdin", StringIO("two\nlines\n"))
    assert _question(words) == asked


def test_a_question_alone_is_the_question(monkeypatch):
    monkeypatch.setattr("sys.stdin", StringIO(""))
    assert _question(("What", "is it?")) == "What is it?"
