"""Where the wall clock is read: no decision depends on it (docs/architecture.md, Clocks)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WALL = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
FILES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "st_atime", "st_atime_ns", "getmtime", "getctime"}
MAYBE = re.compile(r"time\.time|from time import|localtime|gmtime|ctime|mtime|atime|datetime|\bdate\.")

# Each module that reads the wall clock or the times of files, and what for. A new one must not compare them for order.
USERS = {
    "specq/journal/interface.py": "where the time of a new journal begins",
    "specq/broker/links.py": "a lower bound of epochs",
    "specq/processes/broker.py": "a lower bound of epochs",
    "specq/gateway/serving.py": "shown: `created`",
    "specq/batches/sqlite_files.py": "shown: times of files",
    "specq/batches/store.py": "shown: times of batches",
    "specq/text/messages.py": "the date in a chat template",
    "specq/training/report.py": "shown: the date of a report",
    "specq/runtime/machine.py": "shown: the date of a report",
    "specq/gateway/guard.py": "has the file changed?",
    "specq/transport/keys.py": "has a file changed?",
    "specq/checkpoints/gguf_file.py": "has the file changed?",
    "specq/models/draft_choice.py": "has a file changed?",
    "specq/models/packed.py": "has a file changed?",
    "specq/engines/native/block_cache.py": "has a file changed? which has not been used for weeks?",
    "specq/engines/profiling.py": "the order of files, which their writer sets",
}


def wall_clocks(source: str) -> set[str]:
    """Return what a module reads of the wall clock and of the times of files."""
    found = set[str]()
    if not MAYBE.search(source):  # most do not, and parsing takes time
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if node.attr in FILES or node.attr in WALL.get(owner, ()):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} & WALL.get(node.module or "", set())
    return found


def test_only_listed_modules_read_the_wall_clock() -> None:
    """By the modules of the table, and by no other."""
    modules = [path for package in ("specq", "workers", "bench") for path in (ROOT / package).rglob("*.py")]
    assert {path.relative_to(ROOT).as_posix() for path in modules if wall_clocks(path.read_text("utf-8"))} == set(USERS)


@pytest.mark.parametrize(
    "source",
    [
        "time.time()",
        "from time import time",
        "dt.datetime.now(dt.UTC)",
        "datetime.now()",
        "path.stat().st_mtime",
        "date.today()",
    ],
)
def test_each_way_to_read_it_is_seen(source: str) -> None:
    assert wall_clocks(source)
    assert not wall_clocks("time.monotonic(); time.perf_counter(); self.time(); loop.time()")
