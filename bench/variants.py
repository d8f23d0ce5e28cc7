"""What is compared on one pair: ways to judge drafts, and shapes to draft in; each next to plain decoding, which is no
speculation at all, and to the verifier's own lookups without drafters.

To add one: a line here. `options` are parameters of the jobs, as `specq.Client.generate` takes them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specq.protocol import SamplingParams
from specq.verification import STRATEGIES, strategy


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to serve the same jobs."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    has_drafters: bool = True

    @property
    def strategy(self) -> str:
        return str(self.options.get("strategy", "deterministic"))

    @property
    def mode(self) -> str:
        return str(self.options.get("mode", "async"))

    def is_lossless(self, temperature: float) -> bool:
        return strategy(self.strategy).is_lossless(SamplingParams(temperature=temperature))

    def keeps_text(self, temperature: float) -> bool:
        """Is the text, with the same seed, plain decoding's own? Else it has the target's distribution at best."""
        return not strategy(self.strategy).samples_drafts(SamplingParams(temperature=temperature))


PLAIN = Variant("plain", {"mode": "plain"}, has_drafters=False)
LOOKUP = Variant("lookup", has_drafters=False)

# Sixteen nodes, wide at the top: the likeliest child gets the most descendants.
STATIC_TREE = [[0, 0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 2], [1, 0, 0], [1, 1], [2, 0], [3]]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_candidates": 1},
    "best-first": {},
    "candidates-2": {"num_candidates": 2},
    "candidates-4": {"num_candidates": 4},
    "static-tree": {"tree": STATIC_TREE},
}
# SSD's (K, F) of its README: a chain of seven, and three guesses after each of its tokens.
SSD = {"max_depth": 7, "fan_out_hit": [3] * 8, "fan_out_miss": [3] * 8}


def strategies() -> list[Variant]:
    """Return plain decoding, lookup alone, and each strategy with drafts of the default shape."""
    return [PLAIN, LOOKUP, *(Variant(name, {"strategy": name}) for name in STRATEGIES)]


def shapes() -> list[Variant]:
    """Return plain decoding, lookup alone, and each shape drafted ahead of the verdicts and, as in synchronous rounds,
    after them; and SSD's way: its fixed fan-outs, where a round that was not foreseen goes without drafts, and where one waits for a chain that is
    drafted just in time. Only `best-first` is helped out by lookups where drafters have sent nothing."""
    just_in_time, rounds = ({"mode": mode} for mode in ("jit", "sync"))
    return [
        PLAIN,
        LOOKUP,
        *(Variant(name, shape) for name, shape in SHAPES.items()),
        Variant("ssd", SSD),
        *(Variant(f"{name} jit", shape | just_in_time) for name, shape in {"ssd": SSD, "best-first": {}}.items()),
        *(Variant(f"{name} sync", shape | rounds) for name, shape in SHAPES.items()),
    ]
