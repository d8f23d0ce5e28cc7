"""The page of log events lists each event of the code, and none that the code does not have."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
CALLS = {f"log.{level}" for level in ("debug", "info", "warning", "error", "exception", "critical")}


@cache
def events() -> frozenset[str]:
    """Return the names of the events that `specq/` logs."""
    texts = (path.read_text("utf-8") for path in ROOT.glob("specq/**/*.py"))
    return frozenset(
        call.args[0].value
        for text in texts
        if "log." in text  # to read a tree takes longer than all else
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func) in CALLS
        and call.args
        and isinstance(call.args[0], ast.Constant)
    )


def test_each_event_is_on_the_page():
    page = (ROOT / "docs" / "reference" / "log_events.md").read_text("utf-8")
    listed = re.findall(r"^\| (`[^|]*) \|", page.partition("## Old names")[0], re.MULTILINE)
    assert {name for cell in listed for name in re.findall(r"`(\w+)`", cell)} == events()


def test_old_names_are_gone():
    old = (ROOT / "docs" / "reference" / "log_events.md").read_text("utf-8").partition("## Old names")[2]
    renamed = dict(re.findall(r"^\| `(\w+)` \| `(\w+)`", old, re.MULTILINE))
    assert len(renamed) > 20
    assert not renamed.keys() & events()
    assert set(renamed.values()) <= events()
