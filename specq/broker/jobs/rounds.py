"""What the broker counts of all rounds of a model, beside what it counts of each job."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from specq.broker.jobs.commits import Commit
from specq.broker.jobs.transcript import Transcript
from specq.protocol import COUNTED_DEPTHS


@dataclass(slots=True)
class RoundCounts:
    """Counts since the broker started, by verdicts that it took: each round once.

    rounds, tokens   rounds, plain ones included, and the tokens that they committed; prompt_tokens: of jobs that had
                     their first
    drafted_rounds   rounds that verified draft nodes
    draft_tokens, accepted_tokens   nodes that were verified, and those that were accepted
    accepted_lengths [i] = drafted rounds in which i nodes were accepted; the last one: so many or more
    """

    rounds: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    drafted_rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=lambda: [0] * (COUNTED_DEPTHS + 1))

    def add(self, transcript: Transcript, commit: Commit, num_new: int) -> None:
        """Count a verdict that added so many tokens to a text."""
        self.rounds += 1
        self.tokens += num_new
        if transcript.num_tokens == num_new:
            self.prompt_tokens += transcript.prompt_len
        if commit.num_nodes:
            self.drafted_rounds += 1
            self.draft_tokens += commit.num_nodes
            self.accepted_tokens += commit.num_accepted
            self.accepted_lengths[min(commit.num_accepted, COUNTED_DEPTHS)] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the counts by their names."""
        return asdict(self)
