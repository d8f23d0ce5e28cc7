"""The examples in `--help` are commands that exist, with options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from specq.cli import main
from tests.each import each

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"Examples:\n((?: +.*\n)+)")


def examples(command: str) -> list[list[str]]:
    """Return the arguments of `specq` in the examples of a command's help."""
    found = main.get_command(click.Context(main), command)
    assert found is not None
    match = SHOWN.search(found.get_help(click.Context(found, info_name=command)))
    lines = match[1].splitlines() if match else []
    return [shlex.split(line.rpartition("| ")[2])[1:] for line in lines if "specq " in line]


@each("command", ["up", "submit", "worker", "broker", "serve"])
def test_the_main_commands_have_examples_that_parse(command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    shown = examples(command)
    assert len(shown) == 2
    for name, *arguments in shown:
        found = main.get_command(click.Context(main), name)
        assert found is not None
        assert name == command
        found.make_context(name, arguments).close()
