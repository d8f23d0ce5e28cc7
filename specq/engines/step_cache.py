"""Step times that an earlier start measured, in the user's cache: one small file for each machine, model and number of
threads.

Rules: what is not there, or not as it was written, is as nothing at all; whoever asks measures anew. A file that is
written is the newest, whatever the wall clock says.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from specq.config import cache_dir
from specq.runtime import whole_file

MOST_FILES = 64
MOST_SIZES = 64
MOST_SECONDS = 3600.0
LATER_NS = 1_000_000  # than the file before, where the clock does not say so


def step_times_file(*what: object) -> Path:
    """Return where the times are kept of what is named by all that they depend on."""
    digest = hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:24]
    return cache_dir() / "steps" / f"{digest}.json"


def recall(path: Path) -> dict[int, float]:
    """Return {rows: seconds}, rows ascending; nothing if the file is missing or broken."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        times = {int(rows): float(seconds) for rows, seconds in said.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    return times if _is_sound(times) else {}


def keep(path: Path, times: Mapping[int, float]) -> None:
    """Write the times, and drop the oldest of more than MOST_FILES files. A cache that cannot be written is no
    error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with whole_file(path) as temporary:
            temporary.write_text(json.dumps({str(rows): seconds for rows, seconds in times.items()}), encoding="utf-8")
        _drop_oldest(path)
    except OSError:
        pass


def _drop_oldest(newest: Path) -> None:
    others = {file: file.stat().st_mtime_ns for file in newest.parent.glob("*.json") if file != newest}
    latest = max(others.values(), default=0)
    if newest.stat().st_mtime_ns <= latest:  # the clock was set back since
        os.utime(newest, ns=(latest + LATER_NS, latest + LATER_NS))
    for file in sorted(others, key=others.__getitem__, reverse=True)[MOST_FILES - 1 :]:
        file.unlink(missing_ok=True)


def _is_sound(times: Mapping[int, float]) -> bool:
    sizes = list(times)
    rising = sizes == sorted(sizes) and all(size >= 1 for size in sizes)
    return rising and 2 <= len(sizes) <= MOST_SIZES and all(0 < seconds < MOST_SECONDS for seconds in times.values())
