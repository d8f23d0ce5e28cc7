"""Sessions that arrive in a burst begin together.

Whoever arrives just after a step was launched waits until it has ended, and a step that computes prompts takes long as
such, few rows or many. So while sessions arrive so fast that in this time more of them would miss the step than wait
for it, it is put off: until none has arrived for some of their gaps, but no longer than it takes as such. Where as many
have just ended together, whoever sent these is expected to send others together, so the first one is waited for
already.

No clock: moments are given, in seconds.
"""

from __future__ import annotations

LEAST = 4  # sessions of a burst, of those that arrive and of those that end
MOST_GAP_S = 0.005  # between two sessions of a burst
GAPS = 4.0  # mean gaps without another session, after which a burst is over
PATIENCE_S = 0.001  # and at least so long: sockets are polled by the millisecond
FADE = 0.8  # of what was learned of the gaps, with each session
EXPECTED_S = 0.1  # after a burst has ended, within which another one is expected


def is_burst(num_first: int, num_sessions: int) -> bool:
    """Return whether so many of a step's sessions got their first token that others of a burst are likely to follow."""
    return num_first >= LEAST and 2 * num_first >= num_sessions


class Bursts:
    """The burst that is arriving, if one is."""

    def __init__(self) -> None:
        self._num = 0  # sessions of the burst
        self._began = self._last = self._ended = float(
            "-inf"
        )  # when the step could have begun, when a session arrived, when a burst ended
        self._gap_s = 0.0  # mean of the gaps between them, the last ones first
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
        """Note that a step begins, with those that have arrived."""
        self._is_step_due = False

    def end(self, num_sessions: int, now: float) -> None:
        """Note that so many sessions ended with a step."""
        if num_sessions >= LEAST:
            self._ended = now

    @property
    def is_arriving(self) -> bool:
        """Whether sessions that came since the last step are a burst's."""
        least = 1 if self._last - self._ended < EXPECTED_S else LEAST
        return self._is_step_due and self._num >= least

    def wait_s(self, now: float, num_waiting: int, step_s: float) -> float:
        """Return for how many seconds a step that takes `step_s` as such, and for which so many sessions wait, is put
        off, unless another one arrives before; 0: not at all."""
        if not self.is_arriving or step_s <= num_waiting * self._gap_s:
            return 0.0
        until = min(self._last + max(GAPS * self._gap_s, PATIENCE_S), self._began + step_s)
        return max(until - now, 0.0)
