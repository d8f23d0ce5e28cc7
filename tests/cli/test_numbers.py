"""Numbers on the command line: one type for all ranges, which takes neither NaN nor infinity."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from specq.cli import main
from specq.runtime import Number
from tests.each import each


@each(
    ("kind", "value", "said"),
    [
        (kind, value, said)
        for kind in [Number(0), Number(0.01), Number(0, min_open=True)]
        for (value, said) in [
            ("nan", "nan is not a number"),
            ("inf", "inf is not a finite number"),
            ("1e400", "1e400 is not a finite number"),
            ("-inf", "-inf is not in the range x>"),
            ("-1", "-1.0 is not in the range x>"),
            ("two", "'two' is not a valid number"),
        ]
    ],
)
def test_what_is_no_number_of_the_range_is_refused(kind, value, said):
    with pytest.raises(click.BadParameter, match=said):
        kind.convert(value, None, None)
    assert kind.convert("2.5", None, None) == 2.5


def every_command(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command, and those below it, by name."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from every_command(found, f"{name} {below}")


def test_ranges_of_all_commands_are_of_that_type():
    ranges = {
        f"{name} {option.name}": option.type
        for name, command in every_command(main, "specq")
        for option in command.params
        if isinstance(option.type, click.FloatRange)
    }
    assert len(ranges) > 20
    assert [name for name, kind in ranges.items() if not isinstance(kind, Number)] == []
