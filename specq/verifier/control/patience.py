"""How long what has lost is left alone before it is tried again. Pure: rounds are counted, not seconds."""

from __future__ import annotations


class Patience:
    """Rounds until the next trial: `least` at first, and twice as many each time that the trial has lost, up to
    `most`."""

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self.reset()

    def reset(self) -> None:
        """Begin anew: what was tried is worth it, or something else is tried from now on."""
        self._num_rounds = self._num_left = self._least

    def lengthen(self) -> None:
        """Let a trial that has lost, or begins, put the next one off."""
        self._num_rounds = self._num_left = min(2 * self._num_rounds, self._most)

    def pass_round(self) -> None:
        """Take in a round without a trial."""
        self._num_left -= 1

    @property
    def is_over(self) -> bool:
        """Whether it is time for a trial."""
        return self._num_left <= 0
