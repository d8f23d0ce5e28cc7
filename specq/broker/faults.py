"""The last things that went wrong, for `specq top`: workers that were lost or refused, jobs that failed or were given back.

Rules: the log is short, and a fault that comes again at once is counted, not repeated. A fault of a job is shown only to those
who may know of the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

MOST_FAULTS = 32
MOST_CHARACTERS = 300


class FaultLog:
    """The last faults, the newest first."""

    def __init__(self) -> None:
        self._faults: deque[dict[str, Any]] = deque(maxlen=MOST_FAULTS)

    def note(self, kind: str, who: str, reason: str, now: float, *, owner: str | None = None) -> None:
        """Note a fault; `who`: the worker or job. owner: of the job; None: it is no job's."""
        last = self._faults[0] if self._faults else {}
        reason = "".join(one if one.isprintable() else " " for one in reason[:MOST_CHARACTERS])
        if (kind, who, reason) == (last.get("kind"), last.get("who"), last.get("reason")):
            last["count"], last["at"] = last["count"] + 1, now
            return
        self._faults.appendleft({"kind": kind, "who": who, "reason": reason, "count": 1, "at": now, "owner": owner})

    def report(self, now: float, may_see: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Return the faults that somebody may see, as JSON-able values."""
        return [
            {"age_s": round(now - fault["at"], 1)} | {name: fault[name] for name in ("kind", "who", "reason", "count")}
            for fault in self._faults
            if fault["owner"] is None or may_see(fault["owner"])
        ]
