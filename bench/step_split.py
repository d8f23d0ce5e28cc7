"""How the time of a verifier's steps is spent, from its heartbeats (`specq.protocol.stats`).

Rule: a count between two moments is the difference of two reports. Each report is taken when the verifier is idle and
has sent a heartbeat since its last step.
"""

from __future__ import annotations

import time
from typing import Any

from specq.client import Client
from specq.protocol import PHASES, EngineError

FORWARD, WAIT = "forward", "wait"
PATIENCE_BEATS = 60


class StepSplit:
    """The steps of the one verifier of a broker, from `begin` to `figures`."""

    def __init__(self, client: Client, heartbeat_ms: int) -> None:
        self._client, self._beat_s = client, heartbeat_ms / 1000
        self._before: dict[str, Any] = {}

    def begin(self) -> None:
        """Start counting; no job may run."""
        self._before = self._settled()

    def figures(self) -> dict[str, Any]:
        """Return the mean milliseconds of steps since `begin`, and which draft sources are used; no job may run.

        phases_ms   of each phase. `wait` is the time for drafts of the verifier's own process.
        host_ms     all phases except `forward`.
        wait_ms     the part of host_ms that is `wait`.
        choices     by sources: [whether they are used, expected tokens a second].
        """
        after = self._settled()
        return split(self._before["metrics"], after["metrics"]) | {"choices": after["metrics"].get("choices", {})}

    def _settled(self) -> dict[str, Any]:
        """Return the verifier's state when two reports, more than a heartbeat apart, have the same number of steps."""
        last = self._verifier()
        for _ in range(PATIENCE_BEATS):
            time.sleep(2 * self._beat_s)
            newest = self._verifier()
            if newest["steps"] == last["steps"]:
                return newest
            last = newest
        raise EngineError(f"{last['name']} does not come to rest: it still takes steps when all jobs have ended")

    def _verifier(self) -> dict[str, Any]:
        workers: list[dict[str, Any]] = self._client.status()["workers"]
        return next(one for one in workers if one["role"] == "target")


def split(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the steps between two states of a verifier's metrics.

    They are `num_steps`, `phases_ms`, `host_ms` and `wait_ms`.
    """
    num_steps = _grown(before, after, FORWARD, slice(1, None))
    phases = {name: round(_grown(before, after, name, slice(1)) / max(num_steps, 1) / 1e3, 4) for name in PHASES}
    host = sum(ms for name, ms in phases.items() if name != FORWARD)
    return {"num_steps": num_steps, "phases_ms": phases, "host_ms": round(host, 4), "wait_ms": phases[WAIT]}


def _grown(before: dict[str, Any], after: dict[str, Any], phase: str, part: slice) -> int:
    """Return by how much a part of a phase's histogram (the sum, then the counts) has grown."""
    old, new = (sum(one.get("step_us", {}).get(phase, [])[part]) for one in (before, after))
    return int(new - old)
