"""The last things that went wrong, for `specq top`: workers that were lost or refused, jobs that failed or were given
back.

Rules: the log is short, and a fault that comes again at once is counted, not repeated. What one key does wrong takes a
part of the log at most, so that it cannot hide what others did. A fault of a job is shown only to those who may know of
the job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

MOST_FAULTS, MOST_OF_ONE = 32, 8
MOST_CHARACTERS = 300


class FaultLog:
    """The last faults, the newest first."""

    def __init__(self) -> None:
        self._faults: deque[dict[str, Any]] = deque(maxlen=MOST_FAULTS)

    def note(self, kind: str, who: str, reason: str, now: float, *, by: str = "", owner: str | None = None) -> None:
        """Note a fault; `who`: the worker or job. by: whose key's, or socket's, doing it is; "": nobody's. owner: of
        the job; None: it is no job's."""
        last = self._faults[0] if self._faults else {}
        reason = "".join(one if one.isprintable() else " " for one in reason[:MOST_CHARACTERS])
        if (kind, who, reason) == (last.get("kind"), last.get("who"), last.get("reason")):
            last["count"], last["at"] = last["count"] + 1, now
            return
        self._make_room(by)
        fault = {"kind": kind, "who": who, "reason": reason, "count": 1, "at": now, "by": by, "owner": owner}
        self._faults.appendleft(fault)

    def _make_room(self, by: str) -> None:
        """Forget the oldest fault of one who has as many as one may."""
        own = [place for place, fault in enumerate(self._faults) if by and fault["by"] == by]
        if len(own) >= MOST_OF_ONE:
            del self._faults[own[-1]]

    def report(self, now: float, may_see: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Return the faults that somebody may see, as JSON-able values."""
        return [
            {"age_s": round(now - fault["at"], 1)} | {name: fault[name] for name in ("kind", "who", "reason", "count")}
            for fault in self._faults
            if fault["owner"] is None or may_see(fault["owner"])
        ]
