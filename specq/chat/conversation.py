"""What was said so far, as messages for a chat template; the oldest turns go where the model's context is too short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Messages = list[dict[str, str]]


@dataclass(slots=True)
class Conversation:
    """Turns of a question and its answer, and what the model shall be (`system`; "": as its template says)."""

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> Messages:
        """Return all of it with one more question."""
        said: Messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*said, {"role": "user", "content": question}]

    def fit(self, question: str, encode: Callable[[Messages], Sequence[int]], limit: int) -> int:
        """Drop the oldest turns until the messages have at most `limit` tokens, or no turn is left; return how many
        went."""
        num_turns = len(self.turns)
        while self.turns and len(encode(self.messages(question))) > limit:
            del self.turns[0]
        return num_turns - len(self.turns)
