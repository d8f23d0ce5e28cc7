"""Strategies judge draft trees: target logits in, accepted paths and one more token out.

To add one: a file with a class that fulfils `specq.verification.judge.Strategy`, a line in `STRATEGIES`, and one in
`LOSSY` if it can emit what the target would not; tests/verification/ runs over the table. `specq.verification.judge`
groups the sessions of a step by strategy.
"""

from specq.verification.seeds import derived_seed

STRATEGIES = {
    "deterministic": "specq.verification.strategies.deterministic:Deterministic",
    "probabilistic": "specq.verification.strategies.probabilistic:Probabilistic",
    "threshold": "specq.verification.strategies.threshold:Threshold",
    "typical": "specq.verification.strategies.typical:Typical",
    "greedy": "specq.verification.strategies.greedy:Greedy",
}

# Strategies that change what a job says at T > 0; `greedy` alone is lossless at T = 0.
LOSSY = frozenset({"threshold", "typical", "greedy"})


def is_lossless(strategy: str, temperature: float) -> bool:
    """Return whether the strategy's text follows the target's own law."""
    return strategy not in LOSSY or (strategy == "greedy" and temperature == 0)


__all__ = ["LOSSY", "STRATEGIES", "derived_seed", "is_lossless"]
