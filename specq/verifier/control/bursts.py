"""Sessions that arrive in a burst begin together.

A session that arrives just after a launch waits until that step has ended. A step that computes prompts has a large
fixed cost in seconds, with few rows or many. The step waits if more sessions are expected during this fixed cost than
wait now. It starts when no session has arrived for GAPS mean gaps. It waits no longer than its fixed cost.

If LEAST sessions or more have just ended together, others are expected to arrive together. Then the step already waits
after the first arrival.

No clock: moments are arguments, in seconds.
"""

from __future__ import annotations

LEAST = 4  # fewest sessions of a burst, of arriving ones and of ending ones
MOST_GAP_S = 0.005  # longest gap between two sessions of a burst
GAPS = 4.0  # a burst is over after this many mean gaps without another session
PATIENCE_S = 0.001  # and at least after these seconds: sockets are polled by the millisecond
FADE = 0.8  # weight of the earlier gaps in the mean, with each session
EXPECTED_S = 0.1  # seconds after the end of a burst in which another one is expected


def is_burst(num_first: int, num_sessions: int) -> bool:
    """Return whether the first tokens of `num_first` of a step's sessions show a burst, so that others may follow."""
    return num_first >= LEAST and 2 * num_first >= num_sessions


class Bursts:
    """The burst that is arriving, if there is one."""

    def __init__(self) -> None:
        self._num = 0  # sessions of the burst
        # when the step could have begun, when the last session arrived, when the last burst ended
        self._began = self._last = self._ended = float("-inf")
        self._gap_s = 0.0  # mean gap between sessions, recent gaps weigh more
        self._is_step_due = False

    def arrive(self, now: float) -> None:
        """Note that a session has arrived."""
        gap_s = now - self._last
        if gap_s > MOST_GAP_S:
            self._num, self._gap_s = 0, PATIENCE_S / GAPS
        elif self._num:
            self._gap_s = FADE * self._gap_s + (1 - FADE) * gap_s
        if not self._is_step_due:
            self._is_step_due, self._began = True, now
        self._num, self._last = self._num + 1, now

    def begin_step(self) -> None:
        """Note that a step begins, with the sessions that have arrived."""
        self._is_step_due = False

    def end(self, num_sessions: int, now: float) -> None:
        """Note how many sessions ended with a step."""
        if num_sessions >= LEAST:
            self._ended = now

    @property
    def is_arriving(self) -> bool:
        """Whether the sessions that arrived since the last step belong to a burst."""
        least = 1 if self._last - self._ended < EXPECTED_S else LEAST
        return self._is_step_due and self._num >= least

    def wait_s(self, now: float, num_waiting: int, step_s: float) -> float:
        """Return for how many seconds a step is put off, unless another session arrives before; 0: not at all.

        num_waiting   sessions that wait for the step.
        step_s        the fixed cost of the step in seconds.
        """
        if not self.is_arriving or step_s <= num_waiting * self._gap_s:
            return 0.0
        until = min(self._last + max(GAPS * self._gap_s, PATIENCE_S), self._began + step_s)
        return max(until - now, 0.0)
