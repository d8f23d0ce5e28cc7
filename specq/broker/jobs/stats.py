"""What is counted of a job, as its last `Tokens` carries it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specq.broker.jobs.commits import Commit


@dataclass(slots=True)
class JobStats:
    """Counts of one job (a round is one step of one session, plain or not).

    accepted_lengths  [i] = rounds in which i nodes were accepted
    cached_tokens     of the prompt: those whose KV was there when the session was opened that gave the first token
    verifier          what the verifier counts: `specq.protocol.stats.SessionStats`
    final             of a job that ended before the broker started: all its counts, which nothing is added to
    """

    rounds: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_lengths: list[int] = field(default_factory=list)
    draft_bytes: int = 0
    verdict_bytes: int = 0
    forward_us: int = 0
    queue_us: int = 0
    verifier: dict[str, Any] = field(default_factory=dict)
    final: dict[str, Any] = field(default_factory=dict)

    def add(self, commit: Commit) -> None:
        """Count one verdict."""
        accepted = commit.num_accepted
        self.rounds += 1
        self.draft_tokens += commit.num_nodes
        self.accepted_tokens += accepted
        if accepted >= len(self.accepted_lengths):
            self.accepted_lengths.extend([0] * (accepted + 1 - len(self.accepted_lengths)))
        self.accepted_lengths[accepted] += 1
        self.verdict_bytes += commit.num_bytes
        if commit.us:
            self.forward_us += commit.us[0]
            self.queue_us += commit.us[1]
        if commit.stats:
            self.verifier = commit.stats

    def to_dict(self) -> dict[str, Any]:
        """Return the counts under the names that `Tokens.stats` uses."""
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("verifier", "final")}
        return self.final or self.verifier | own
