"""The parameters of a request as options: one for each name in `specq.client.parameters.NAMES`, in groups.

To add one: a line in `GROUPS`; a strategy's own are declared by the strategy. Types and defaults are those of the
field; values are checked where a request is read, so an option and the key of a line are refused with the same words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import click

from specq.cli.groups import GroupedOption
from specq.config import read_tree
from specq.protocol import ConfigError, SamplingParams, Speculation
from specq.verification import STRATEGIES, strategy

F = TypeVar("F", bound=Callable[..., Any])

GROUPS: dict[str, dict[str, str]] = {
    "Length": {
        "max_tokens": "Most tokens to generate.",
        "min_tokens": "No end before this many tokens.",
        "stop": "Text that ends a completion and is not part of it; may be repeated.",
        "stop_token_ids": "Tokens that end a completion, as in 5,17.",
        "ignore_eos": "Go on past the model's end-of-text tokens.",
    },
    "Sampling": {
        "temperature": "0 is greedy.",
        "top_k": "Sample among the K likeliest tokens; 0: all.",
        "top_p": "Sample among the likeliest tokens of this mass, in [0, 1]. 0: greedy.",
        "min_p": "Drop tokens less likely than this share of the likeliest.",
        "seed": "Under deterministic, the same seed gives the same text. Drawn if temperature > 0 and none is given.",
        "n": "Completions of each prompt, from seeds made of the seed.",
        "logprobs": "Report the log-probability of each token, and of the N likeliest; 0: of no others.",
    },
    "Shaping": {
        "presence_penalty": "Taken off the logit of a token that was generated, in [-2, 2].",
        "frequency_penalty": "Taken off for each time that it was, in [-2, 2].",
        "repetition_penalty": "Divides the logit of a token of prompt or text; above 1 discourages.",
        "logit_bias": "Added to a token's logit, as in 42=-1.5; may be repeated.",
        "bad_words": "Text whose tokens, alone or after a space, never come in a row; may be repeated.",
        "bad_token_ids": "Tokens that never come in a row, as in 5,17; may be repeated.",
    },
    "Verification": {
        "strategy": f"How drafts are judged: {', '.join(STRATEGIES)}.",
        **{name: text for own in STRATEGIES for name, text in strategy(own).parameters.items()},
    },
    "Drafting": {
        "mode": "async: drafters run ahead; sync: they wait for each verdict; plain: nobody drafts, the verifier's "
        "lookups included.",
        "num_candidates": "Draft N candidates a round, as one tree; 0: grow a tree best first.",
        "candidate_temp": "Temperature of drafts; -1: that of sampling.",
        "candidate_top_p": "Top-p of drafts; 0: that of sampling.",
        "max_depth": "Most tokens drafted ahead; 0: as the drafter likes.",
        "max_nodes": "Most nodes of a tree; 0: as the drafter likes.",
        "tree": "A fixed tree, as paths of ranks: '[[0],[0,0],[1]]'; or a file of them, as Medusa's choices.",
        "fan_out_hit": "Fixed guesses for each token of a chain, after a round that was foreseen, as in 3,2,1.",
        "fan_out_miss": "The same after a round that was not.",
    },
}
_DEFAULTS = {f.name: f.default for section in (SamplingParams, Speculation) for f in fields(section)} | {"n": 1}
_NOT_SHOWN = ("seed", "logprobs")  # whose defaults have another meaning


def parameter_options(command: F) -> F:
    """Add an option for each parameter; one that is not given is None, or () where it may be repeated."""
    for group, helps in reversed(GROUPS.items()):
        for name, text in reversed(helps.items()):
            option: Any = {"cls": GroupedOption, "group": group, "help": text + _default(name), **_kind(name)}
            command = click.option("--" + name.replace("_", "-"), name, **option)(command)
    return command


def _default(name: str) -> str:
    value = _DEFAULTS.get(name, ())
    if value == () or isinstance(value, bool) or name in _NOT_SHOWN:
        return ""
    return f"  [default: {value:g}]" if isinstance(value, float) else f"  [default: {value}]"


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters that were given."""
    return {name: value for name, value in values.items() if value not in (None, ())}


def _kind(name: str) -> dict[str, Any]:
    """Return what click needs to read an option of this name."""
    special: dict[str, dict[str, Any]] = {
        "stop": {"multiple": True},
        "bad_words": {"multiple": True},
        "ignore_eos": {"is_flag": True, "default": None},
        "stop_token_ids": {"type": _integers, "metavar": "LIST"},
        "fan_out_hit": {"type": _integers, "metavar": "LIST"},
        "fan_out_miss": {"type": _integers, "metavar": "LIST"},
        "bad_token_ids": {"type": _integers, "metavar": "LIST", "multiple": True},
        "logit_bias": {"type": _bias, "metavar": "ID=BIAS", "multiple": True},
        "tree": {"type": _paths, "metavar": "PATHS"},
    }
    return special.get(name) or {"type": type(_DEFAULTS[name])}


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of whole numbers such as 5,17") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a token id and a bias such as 42=-1.5") from None


def _paths(text: str) -> Any:
    try:
        return read_tree(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None
