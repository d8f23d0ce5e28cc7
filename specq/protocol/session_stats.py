"""What only a verifier can count of a session; a job's last `Tokens` carries it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from specq.protocol.bounds import MAX_INT64, MAX_NODES


@dataclass(slots=True)
class SessionStats:
    """Counts that only the verifier can make.

    drafted, stale, orphans   nodes that arrived; that the transcript contradicted; whose parent is unknown
    hits, misses   rounds that began with live nodes, and rounds that began without
    drafted_rounds   rounds that verified nodes
    leaves, depths   sums over these rounds of their trees' leaves and depths: N and K of N candidates of K tokens
    min_accept_probs   sum over rounds of `Verdict.min_accept_prob`
    positions [i] = [verified, accepted] nodes at depth i + 1
    """

    drafted: int = 0
    stale: int = 0
    orphans: int = 0
    hits: int = 0
    misses: int = 0
    drafted_rounds: int = 0
    leaves: int = 0
    depths: int = 0
    min_accept_probs: int = 0
    positions: list[list[int]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return all counts by name, as JSON-able values of their own."""
        counts = {name: getattr(self, name) for name in self.__slots__}
        return counts | {"positions": [list(pair) for pair in self.positions]}


class RenamedCounts(dict[str, Any]):
    """Counts by name; a name of the version before is an alias, with a warning."""

    OLD: ClassVar[dict[str, str]] = {"worth": "min_accept_prob", "worths": "min_accept_probs"}

    def __missing__(self, name: str) -> Any:
        if self.OLD.get(name) not in self:
            raise KeyError(name)
        warnings.warn(f"{name} is now {self.OLD[name]}; the next version does not know it", FutureWarning, stacklevel=2)
        return self[self.OLD[name]]

    @classmethod
    def renamed(cls, counts: dict[str, Any]) -> dict[str, Any]:
        """Return counts that the version before may have stored, under their names of today."""
        return {cls.OLD.get(name, name): value for name, value in counts.items()}


class StatsBound:
    """The bound of what `SessionStats.to_dict` gives, or of some of it."""

    allowed = "counts that `specq.protocol.session_stats` names, from 0 to 2**63 - 1"
    _COUNTS: ClassVar[set[str]] = {f.name for f in fields(SessionStats) if f.name != "positions"}

    def admits(self, value: dict[str, Any]) -> bool:
        counts = [value[name] for name in self._COUNTS & value.keys()]
        positions = value.get("positions", [])
        if type(positions) is not list or len(positions) > MAX_NODES or value.keys() - self._COUNTS - {"positions"}:
            return False
        pairs = all(type(pair) is list and len(pair) == 2 for pair in positions)
        return pairs and all(map(_is_count, [*counts, *(number for pair in positions for number in pair)]))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT64


SESSION_STATS = StatsBound()
