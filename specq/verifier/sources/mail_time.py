"""How long the drafts of draft workers may keep the host between two steps; those that come then are dropped.

Where the next step is in flight before the last one is collected, the host has time for them while the device computes,
and no more: what goes beyond makes the device wait, for drafts that no step waits for. How much time that is shows
where the host waits for the device. Where no step is in flight, drafts may take a quarter of the last step on a device
that stands still meanwhile, and as long as it on the host's own cores.

No clock: seconds are given.
"""

from __future__ import annotations

LEAST_S = 0.005  # on the host's own cores
WAITED_PART = 0.25  # of a step that is not followed, on a device
# Parts of a step: a wait for the device that is no longer says that the host was late; a wait that is left alone; and
# what drafts may take at least.
LATE, SPARE, LEAST_PART = 0.3, 0.25, 0.02


class MailTime:
    """`limit_s`: the seconds that drafts may take before the next step."""

    def __init__(self, *, overlaps: bool) -> None:
        """`overlaps`: steps run on a device beside the host."""
        self._overlaps, self.limit_s = overlaps, LEAST_S

    def learn(self, step_s: float, used_s: float, idle_s: float | None) -> None:
        """Take in a step, the seconds that drafts took before it, and those in which the host then waited for the
        device with the next step in flight; None: none was."""
        if idle_s is None:
            self.limit_s = WAITED_PART * step_s if self._overlaps else max(LEAST_S, step_s)
        elif idle_s < LATE * step_s:
            self.limit_s = max(used_s / 2, LEAST_PART * step_s)
        else:
            self.limit_s = max(used_s + (idle_s - SPARE * step_s) / 2, LEAST_PART * step_s)
