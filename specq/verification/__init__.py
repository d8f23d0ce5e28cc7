"""Strategies judge draft trees: target logits in, accepted paths and one more token out.

To add a strategy, write a file with a class that implements `Strategy`, traits and parameters included. Add a line in
`STRATEGIES`. Another package adds an entry point of the group `specq.strategies` instead. tests/verification/ runs over
the table.

`specq.verification.judge` groups the sessions of a step by strategy. `StepBatch` has the steps of many sessions as
arrays, and `Judgements` has the results.
"""

from functools import cache

from specq.protocol import ConfigError
from specq.runtime import Table
from specq.verification.calibration import NUM_BINS, Calibration
from specq.verification.device_tokens import (
    NO_TOKEN,
    DeviceLines,
    DeviceTokens,
    handles,
    is_handle,
    known_tokens,
    places_of,
    without_handles,
)
from specq.verification.host_kernels import ROW, Rows, make_rows
from specq.verification.host_logits import Logits, on_host
from specq.verification.interface import Strategy
from specq.verification.judgements import CORRECTION, Judgements, ends_of, places_in_runs, starts_of
from specq.verification.noise import derived_seed
from specq.verification.step_batch import (
    NO_EXTRA,
    NO_SCORES,
    WITH_GRAMMAR,
    WITH_LOGPROBS,
    Extra,
    StepBatch,
    traits_of,
)
from specq.verification.token_masks import JudgedSteps, MaskedSteps, ReadyTokenMasks, TokenMasks, host_memory

STRATEGIES = Table(
    "strategy",
    "specq.strategies",
    {
        "deterministic": "specq.verification.strategies.deterministic:Deterministic",
        "probabilistic": "specq.verification.strategies.probabilistic:Probabilistic",
        "threshold": "specq.verification.strategies.threshold:Threshold",
        "typical": "specq.verification.strategies.typical:Typical",
        "greedy": "specq.verification.strategies.greedy:Greedy",
    },
)


@cache
def strategy(name: str) -> Strategy:
    """Return the strategy of that name, without importing torch.

    Raises ConfigError with the known names for an unknown name.
    """
    found: Strategy = STRATEGIES.resolve(name)()
    return found


def reason_against(name: str) -> str:
    """Return why this process cannot use the strategy of that name, or ""."""
    try:
        strategy(name)
    except ConfigError as error:
        return str(error)
    return ""


__all__ = [
    "CORRECTION",
    "NO_EXTRA",
    "NO_SCORES",
    "NO_TOKEN",
    "NUM_BINS",
    "ROW",
    "STRATEGIES",
    "WITH_GRAMMAR",
    "WITH_LOGPROBS",
    "Calibration",
    "DeviceLines",
    "DeviceTokens",
    "Extra",
    "JudgedSteps",
    "Judgements",
    "Logits",
    "MaskedSteps",
    "ReadyTokenMasks",
    "Rows",
    "StepBatch",
    "Strategy",
    "TokenMasks",
    "derived_seed",
    "ends_of",
    "handles",
    "host_memory",
    "is_handle",
    "known_tokens",
    "make_rows",
    "on_host",
    "places_in_runs",
    "places_of",
    "reason_against",
    "starts_of",
    "strategy",
    "traits_of",
    "without_handles",
]
