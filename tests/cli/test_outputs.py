"""Outputs that cannot be written: each command ends with one line and a status, for any failing output."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from safetensors import SafetensorError

from specq import Client
from specq.cli import COMMANDS, main
from specq.cli.outputs import unwritable_said
from specq.runtime import OutFile, OutFolder
from tests.each import each

TOY = (sys.executable, "-m", "tests.journal.toy_target")
FULL = "No space left on device"
# Each command line with a standard output that is full, that nobody reads, and that is closed: what it ended with, and
# what it said.
EVERY_COMMAND = """
import json, os, sys, tempfile

from specq.cli import main

# standard output: (what opens it, or nothing)
def unread():
    reader, writer = os.pipe()
    os.close(reader)
    return writer

KINDS = {"full": lambda: os.open("/dev/full", os.O_WRONLY), "unread": unread}
kept, found = os.dup(1), []
for line in json.loads(sys.argv[1]):
    for kind, opened in KINDS.items():
        with tempfile.TemporaryFile() as said:
            out = opened()
            os.dup2(out, 1)
            os.close(out)
            os.dup2(said.fileno(), 2)
            try:
                main(line)
                status = None
            except SystemExit as ending:
                status = ending.code
            except BaseException as error:
                status = repr(error)
            said.seek(0)
            found.append((line, kind, status, said.read().decode()))
os.dup2(kept, 1)
print(json.dumps(found))
"""


def every_command(
    command: click.Command = main, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield each command and group below `command` with its path."""
    yield path, command
    if isinstance(command, click.Group):
        ctx = click.Context(command)
        for name in command.list_commands(ctx):
            yield from every_command(command.get_command(ctx, name), (*path, name))


def test_a_failing_standard_output_causes_no_traceback():
    lines = [[*path, "--help"] for path, _ in every_command()] + [["--version"], ["models"]]
    assert {line[0] for line in lines} > set(COMMANDS)
    done = subprocess.run(
        [sys.executable, "-c", EVERY_COMMAND, json.dumps(lines)], capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(done.stdout)
    assert len(found) == 2 * len(lines)
    expected = {"full": (2, f"specq: cannot write standard output: {FULL}\n"), "unread": (1, "")}
    assert [one for one in found if (one[2], one[3]) != expected[one[1]]] == []


@each(("closed", "ending"), product([False, True], ["", "; sys.exit(0)"]))
def test_what_stays_in_the_buffer_is_noticed_before_the_interpreter_ends(closed, ending):
    """A process of its own: what it still holds must not become a traceback of the interpreter's, nor status 120."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    program = (
        "import sys; from specq.cli.outputs import unwritable_said\nwith unwritable_said(): sys.stdout.write('x')"
        + ending
    )
    shell = f'exec "$0" -c "$1" {">&-" if closed else "> /dev/full"}'
    done = subprocess.run(
        ["sh", "-c", shell, sys.executable, program], stderr=subprocess.PIPE, text=True, env=environment, check=False
    )
    reason = os.strerror(errno.EBADF) if closed else FULL
    assert (done.returncode, done.stderr) == (2, f"specq: cannot write standard output: {reason}\n")


def test_a_log_that_fills_the_disk_stops_no_process_and_full_errors_keep_the_status():
    program = (
        "import structlog; from specq.runtime.log import configure; configure();"
        "structlog.get_logger().info('a_thing'); print('alive')"
    )
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" 2> /dev/full', sys.executable, program], stdout=subprocess.PIPE, check=False
    )
    assert done.stdout == b"alive\n"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -m specq nosuch > /dev/full 2>&1', sys.executable], stdout=subprocess.PIPE, check=False
    )
    assert done.returncode == 2


def test_a_standard_error_that_is_closed_is_left_out():
    """As what starts a service may close it; no file that is opened later gets its number."""
    program = """
import os, sys
from specq.cli.outputs import unwritable_said
with unwritable_said():
    sys.stderr.write("x")
    print(sys.stderr.isatty(), os.open("/", os.O_RDONLY) > 2)
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False True\n")


@each(
    ("error", "said"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x/y"), "specq: x/y: Is a directory"),
        (OSError(errno.ENOSPC, FULL), f"specq: cannot read or write a file: {FULL} (at "),
        (SafetensorError("Error while serializing: I/O error: Read-only file system (os error 30)"), "Read-only file"),
        (RuntimeError("[enforce fail at x.cc:7] . open file failed with strerror: Is a directory"), "Is a directory"),
    ],
)
def test_what_libraries_say_of_the_system_is_a_line(error, said, capsys):
    with pytest.raises(SystemExit) as ending, unwritable_said():
        raise error
    told = capsys.readouterr().err
    assert (ending.value.code, told.count("\n")) == (2, 1)
    assert said in told


def test_unrelated_errors_are_not_output_errors():
    with pytest.raises(RuntimeError, match="a bug"), unwritable_said():
        raise RuntimeError("a bug")


def test_every_option_that_writes_refuses_what_cannot_be_written(tmp_path):
    """Options that name files without their being there are read, or refuse what cannot be written before anything is
    done."""
    reads = {"config", "config_file", "corpus", "bench", "rollouts", "pair", "calibrate", "prompts"}
    made_elsewhere = {("keys", "api"), ("keys", "curve")}
    (tmp_path / "file").write_text("")
    num_checked = 0
    for path, command in every_command():
        for option in command.params:
            if not isinstance(option.type, click.Path) or option.type.exists or option.name in reads:
                continue
            if path in made_elsewhere:
                continue
            assert isinstance(option.type, OutFile | OutFolder), (path, option.name)
            is_file = isinstance(option.type, OutFile)
            for bad in (tmp_path if is_file else tmp_path / "file", tmp_path / "file" / "x", Path("/dev/full/x")):
                with pytest.raises(click.BadParameter):
                    option.type.convert(str(bad), option, None)
                num_checked += 1
    assert num_checked > 60
    place = str(tmp_path / "file" / "x")
    for arguments in (("api", "me", "--file", place), ("curve", "--role", "client", "--", place, "me")):
        done = CliRunner().invoke(main, ["keys", *arguments])
        assert done.exit_code == 2, done.output
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_brokers_tell_goes_nowhere_without_a_traceback(tmp_path, spawn, free_address, own_cache):
    """Commands that ask a broker first: their output comes late, and its failure is as short."""
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"token_ids": [5, 6]}\n')
    spawn("broker", "--bind", free_address, "--journal", "none")
    spawn(free_address, "20", program=TOY)
    with Client(free_address, timeout_s=30, cache_dir=tmp_path / "cache") as client:
        client.wait_until_ready()
        asked = ["submit", str(prompts), "--max-tokens", "2"]
        done = CliRunner().invoke(main, [*asked, "--detach", "--trace", "--broker", free_address])
        job = done.stdout.strip()
        assert job.isdigit(), done.output
        lines = [["status"], ["status", "--json"], ["top", "--once", "--interval", "0.1"], ["jobs"], ["trace", job]]
        lines += [["results", job, "--wait"], asked, [*asked, "--detach"]]
        for line in lines:
            for shell in ("> /dev/full", ">&-"):
                command = [
                    "sh", "-c", f'exec "$@" {shell}', "sh", sys.executable, "-m", "specq", *line, "--broker",
                    free_address,
                ]  # fmt: skip
                done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
                assert done.returncode == 2, (line, shell, done.stderr)
                assert "cannot write standard output" in done.stderr.splitlines()[-1]
                assert "Traceback" not in done.stderr
