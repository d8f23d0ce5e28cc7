"""What the journal holds of a job, and so what clients may receive of it. Without a journal the broker's memory counts
as one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Durable:
    """The journal has the job (`is_registered`), its first `num_tokens` generated tokens, its end (`has_ended`)."""

    is_registered: bool = False
    num_tokens: int = 0
    has_ended: bool = False

    def note(self, num_tokens: int, *, ended: bool) -> None:
        """Note that the journal holds the job, with its first `num_tokens` generated tokens and perhaps its end."""
        self.is_registered, self.has_ended = True, self.has_ended or ended
        self.num_tokens = max(self.num_tokens, num_tokens)
