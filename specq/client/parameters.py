"""The parameters of a request, by their flat names: how to sample, how to draft, how many completions.

    n           completions of the prompt, in [1, 128]; with n > 1 completion i has the seed `derived_seed(seed, i)`
    bad_words   texts that are banned; `specq.client.bad_words` says which tokens that means
    seed        any 64-bit number, signed or not: see `seed_used`
    the others  fields of `SamplingParams` and `Speculation`

Rule: a wrong value is a JobError (code `invalid`) that names the parameter (`JobError.field`) and says what is allowed.
So is a value that the other parameters would make the verifier ignore.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

from specq.client.job_options import LINE_OPTIONS, keyed_number
from specq.protocol import MAX_LISTED, MAX_SEED, JobError, SamplingParams, Speculation, known_names, shown
from specq.verification import STRATEGIES, reason_against, strategy

MAX_COMPLETIONS = 128
LEAST_SEED, MOST_SEED = -(2**63), 2**64 - 1
SAMPLING = tuple(f.name for f in fields(SamplingParams))
DRAFTING = tuple(f.name for f in fields(Speculation))
NAMES = (*SAMPLING, "n", "bad_words", *DRAFTING)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Checked parameters; `n` is None where it was not given: one completion."""

    sampling: SamplingParams
    speculation: Speculation
    n: int | None = None
    bad_words: tuple[str, ...] = ()


def read_parameters(given: dict[str, Any]) -> Parameters:
    """Return checked parameters."""
    unknown = sorted(set(given) - set(NAMES))
    if unknown:
        known = (*NAMES, *LINE_OPTIONS, "explain")
        reason = f"unknown parameter {shown(unknown[0])}; {known_names(unknown[0], known)}"
        raise JobError(reason, field=unknown[0])
    given = given | ({"seed": seed_used(given["seed"])} if "seed" in given else {})
    sampling = SamplingParams.from_dict({name: value for name, value in given.items() if name in SAMPLING})
    speculation = Speculation.from_dict({name: value for name, value in given.items() if name in DRAFTING})
    _check_sampling(sampling)
    _check_honoured(sampling, speculation, given)
    return Parameters(sampling, speculation, _count(given.get("n")), _words(given.get("bad_words", ())))


def seed_used(seed: Any) -> int:
    """Return the seed in [0, MAX_SEED] that a given one stands for: itself where it is one of these; for other numbers
    of 64 bits the first 8 bytes of BLAKE2b (of that digest size) of the text `seed N`, N in decimal, as a little-endian
    number, halved. Raises JobError for others."""
    if type(seed) is not int or not LEAST_SEED <= seed <= MOST_SEED:
        raise JobError(f"seed is {shown(seed)}; it must be a whole number from -2**63 to 2**64 - 1", field="seed")
    return seed if 0 <= seed <= MAX_SEED else keyed_number(f"seed {seed}")


def _check_sampling(params: SamplingParams) -> None:
    """Check what `SamplingParams` does not check itself."""
    if reason := reason_against(params.strategy):
        raise JobError(reason, field="strategy")
    biased = Counter(token for token, _ in params.logit_bias)
    for token, count in biased.items():
        if count > 1:
            raise JobError(f"logit_bias names token {token} more than once", field="logit_bias")
    for text in params.stop:
        _check_text("stop", text)


def _check_honoured(params: SamplingParams, speculation: Speculation, given: dict[str, Any]) -> None:
    """Refuse parameters that the strategy or the mode would ignore."""
    own = strategy(params.strategy).parameters
    for owner in STRATEGIES:
        for name in strategy(owner).parameters:
            if name in given and name not in own:
                reason = f"{name} is given with strategy {params.strategy}; only strategy {owner} has one"
                raise JobError(reason, field=name)
    idle = [name for name in speculation.to_dict() if name != "mode"]
    if speculation.mode == "plain" and idle:
        raise JobError(f"{idle[0]} is given with mode plain, in which nothing is drafted", field=idle[0])


def _count(n: Any) -> int | None:
    if n is not None and (type(n) is not int or not 1 <= n <= MAX_COMPLETIONS):
        raise JobError(f"n is {shown(n)}; it must be a whole number in [1, {MAX_COMPLETIONS}]", field="n")
    return n


def _words(words: Any) -> tuple[str, ...]:
    """Return bad words as given: one text, or several."""
    listed = (words,) if isinstance(words, str) else words
    if isinstance(listed, (list, tuple)) and len(listed) > MAX_LISTED:
        raise JobError(f"bad_words has {len(listed)} entries; it must have at most {MAX_LISTED}", field="bad_words")
    if not isinstance(listed, (list, tuple)) or not all(isinstance(word, str) and word.strip(" ") for word in listed):
        reason = f"bad_words is {shown(words)}; it must be a list of texts that are more than spaces"
        raise JobError(reason, field="bad_words")
    for word in listed:
        _check_text("bad_words", word)
    return tuple(listed)


def _check_text(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"{name} is {shown(text)}; it is not valid Unicode at character {error.start}: {error.reason}"
        raise JobError(reason, field=name) from None
