"""Options that say where to write: what cannot be written is refused before anything is done, and what fails later is
said in a line."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.report import Report, show
from bench.suite import suite
from specq.cli import main, simulate, submit
from specq.protocol import ConfigError
from specq.runtime import OutFile, OutFolder, writing
from tests.each import each

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FILES = [
    ("bench", "roundtrip", "--out"),
    ("bench", "gpu", "--out"),
    ("bench", "--out"),
    ("results", "--out"),
    ("submit", os.devnull, "--out"),
]
FOLDERS = [
    ("simulate", "--out"),
    ("models", "inflate", "--out"),
    *(("train", "pair", "all", option) for option in ("--out", "--work")),
    *(("train", "medusa", "all", "--target", "tiny", option) for option in ("--out", "--work")),
]
REPORTS = [("train", "pair", "evaluate", "--results"), ("train", "draft", "evaluate", "--target", "tiny", "--results")]


def refusal(*arguments: str) -> str:
    """Return what is said of an option's value; nothing is waited for, as a broker would be."""
    started = time.monotonic()
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 2, outcome.output
    assert time.monotonic() - started < 60
    said = outcome.stderr.splitlines()[-1]
    assert arguments[-2] in said
    return said


def chosen(kind: click.ParamType, value: str) -> object:
    return kind.convert(value, None, None)


@each("command", [*FILES, *REPORTS])
def test_a_file_that_cannot_be_written_is_refused_first(command, tmp_path):
    assert "is a directory" in refusal(*command, str(tmp_path))
    assert "/dev/full cannot be written: No space left on device" in refusal(*command, "/dev/full")


@each("command", FILES)
def test_a_file_in_a_directory_that_is_not_there_is_refused_first(command, tmp_path):
    assert f"{tmp_path / 'none'} is not a directory" in refusal(*command, str(tmp_path / "none" / "x"))


@each("command", FOLDERS)
def test_a_directory_that_cannot_be_made_is_refused_first(command, tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in refusal(*command, str(tmp_path / "file"))
    assert f"{tmp_path / 'file'} is not a directory" in refusal(*command, str(tmp_path / "file" / "deeper" / "x"))


def test_a_full_disk_is_noticed_before(tmp_path, monkeypatch):
    def full(**_):
        raise FULL

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    for kind in (OutFile(), OutFile(makes_directory=True), OutFolder()):
        with pytest.raises(click.BadParameter, match="x cannot be written: No space left"):
            chosen(kind, str(tmp_path / "x"))


def test_looking_leaves_everything_as_it_was(tmp_path):
    """Files that are there keep their content, none is left behind, and a pipe is not opened: its reader would see the
    end."""
    there, new, pipe = (tmp_path / name for name in ("there", "new", "pipe"))
    there.write_text("old")
    os.mkfifo(pipe)
    for path in (there, new, pipe, tmp_path / "a" / "b"):
        assert chosen(OutFile(makes_directory=True), str(path)) == path
    assert chosen(OutFolder(), str(tmp_path / "c" / "d")) == tmp_path / "c" / "d"
    assert chosen(OutFile(or_stdout=True), str(new)) == str(new)
    assert chosen(OutFile(or_stdout=True), "-") == "-"
    assert {path.name for path in tmp_path.iterdir()} == {"there", "pipe"}
    assert there.read_text() == "old"


def test_a_later_report_write_failure_is_reported_once_and_the_table_printed(tmp_path):
    """The run goes on, and ends with what is missing; if a later part can be written, nothing is."""
    folder = tmp_path / "folder"
    folder.mkdir()

    def measure(report: Report, *, comes_back: bool) -> None:
        folder.rename(tmp_path / "away")
        report.update(results={"a": 1})
        report.update(results={"b": 2})
        if comes_back:
            (tmp_path / "away").rename(folder)
            report.update(results={"c": 3})
        show([("NAME", "VALUE"), ("a", 1)])

    command = click.option("--comes-back", is_flag=True)(suite("x")(measure))
    outcome = CliRunner().invoke(command, ["--out", str(folder / "x.json"), "--comes-back"])
    assert outcome.exit_code == 0, outcome.output
    assert '"c": 3' in (folder / "x.json").read_text()
    outcome = CliRunner().invoke(command, ["--out", str(folder / "x.json")])
    assert "VALUE" in outcome.stdout
    assert outcome.stderr.count("x.json: No such file or directory") == 1
    assert isinstance(outcome.exception, ConfigError)
    assert "x.json: No such file or directory; what was measured is printed" in str(outcome.exception)


def test_a_disk_that_fills_leaves_the_report_as_it_was(tmp_path, monkeypatch):
    """Whole: half of a report would say nothing."""
    out, report = tmp_path / "x.json", Report("x", tmp_path / "x.json")
    report.update(results={"a": 1})
    written = out.read_bytes()
    monkeypatch.setattr(Path, "write_bytes", half_full)
    report.update(results={"b": 2})
    assert out.read_bytes() == written
    assert list(tmp_path.iterdir()) == [out]


def test_a_report_goes_into_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb") as reader:
        Report("x", pipe).update(results={"a": 1})
        assert b'"a": 1' in reader.read()
    assert pipe.is_fifo()


def half_full(path: Path, content: bytes) -> int:
    """Write as much as there is room for."""
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
    raise FULL


def test_what_a_simulation_found_is_printed_though_the_disk_is_full(tmp_path, monkeypatch):
    def full(*_):
        raise FULL

    monkeypatch.setattr(simulate, "to_toml", full)
    outcome = CliRunner().invoke(main, ["simulate", "--set", "traffic.seconds=1", "--out", str(tmp_path / "x")])
    assert outcome.exit_code == 2, outcome.output
    assert "TOKENS/S" in outcome.stdout
    assert outcome.stderr.splitlines()[-1] == f"specq: cannot write {tmp_path / 'x'}: No space left on device"


def test_results_that_find_the_disk_full_are_said_in_a_line(tmp_path):
    prompts = io.BytesIO()
    prompts.name = "-"
    out = str(tmp_path / "x")
    with pytest.raises(ConfigError, match=f"cannot write {out}: No space left"), submit._results(out, prompts, {}):
        raise FULL


@pytest.mark.parametrize("to_file", [True, False])
def test_ctrl_c_says_how_a_run_goes_on(tmp_path, monkeypatch, to_file):
    """In a file results stay; what went to standard output is not taken up again."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n')

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "_connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(submit, "run_lines", interrupted)
    outcome = CliRunner().invoke(main, ["submit", str(prompts), "--out", str(out) if to_file else "-"])
    assert outcome.exit_code == 1
    how = f"; run the same command again to continue {out}" if to_file else ""
    assert outcome.stderr == f"specq: stopped{how}\n"


def test_a_broken_pipe_is_left_to_click():
    with pytest.raises(BrokenPipeError), writing(Path("-")):
        raise BrokenPipeError
