"""The parameters of a request as options: one for each name in `specq.client.parameters.NAMES`, in groups.

To add one, add a line to `GROUPS`. A strategy declares its own parameters. Types and defaults are those of the field.
Values are checked where a request is read. An option and a key of a line give the same message.

Grammars and JSON schemas come from the command line or from files. `specq.protocol.grammars` checks what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from specq.cli.groups import GroupedOption
from specq.config import read_tree
from specq.protocol import GRAMMAR_KINDS, ConfigError, SamplingParams, Speculation, shown
from specq.verification import STRATEGIES, strategy

F = TypeVar("F", bound=Callable[..., Any])

GROUPS: dict[str, dict[str, str]] = {
    "Length": {
        "max_tokens": "Maximum number of tokens to generate.",
        "min_tokens": "Minimum number of tokens before the text may end.",
        "stop": "Stop string; ends a completion and is removed from it. Repeatable.",
        "stop_token_ids": "Token ids that end a completion, e.g. 5,17.",
        "ignore_eos": "Continue after the model's end-of-text tokens.",
    },
    "Sampling": {
        "temperature": "Sampling temperature; 0 is greedy.",
        "top_k": "Sample from the K most likely tokens; 0: all.",
        "top_p": "Sample from the most likely tokens with this total probability, in [0, 1]. 0: greedy.",
        "min_p": "Exclude tokens below this fraction of the highest probability.",
        "seed": "Random seed; with strategy deterministic, the same seed gives the same text.  [default: random]",
        "n": "Number of completions per prompt, each with a seed derived from --seed.",
        "logprobs": "Report the log-probability of each token and of the N most likely tokens; 0: only of each token.",
        "prompt_logprobs": "Report the same for each token of the prompt except the first.",
    },
    "Shaping": {
        "presence_penalty": "Subtract from the logit of each generated token, in [-2, 2].",
        "frequency_penalty": "Subtract from a token's logit once per generated occurrence, in [-2, 2].",
        "repetition_penalty": "Penalty factor for tokens of the prompt or the text; above 1 discourages repetition.",
        "logit_bias": "Bias to add to a token's logit, e.g. 42=-1.5. Repeatable.",
        "allowed_token_ids": "The only token ids to generate, e.g. 5,17; include the end of the text.",
        "bad_words": "Forbidden text, alone or after a space. Repeatable.",
        "bad_token_ids": "Forbidden sequence of token ids, e.g. 5,17. Repeatable.",
        "grammar": f"Grammar that the text follows, as JSON or a file of it. Kinds: {', '.join(GRAMMAR_KINDS)}.",
    },
    "Verification": {
        "strategy": f"Verification strategy: {', '.join(STRATEGIES)}.",
        **{name: text for own in STRATEGIES for name, text in strategy(own).parameters.items()},
    },
    "Drafting": {
        "mode": "async: drafters run ahead. sync: they wait for verdicts. jit: only without drafts. plain: no drafts.",
        "num_candidates": "Number of candidates to draft per round, as one tree; 0: grow a tree best first.",
        "candidate_temp": "Temperature for drafting; -1: as --temperature.",
        "candidate_top_p": "Top-p for drafting; 0: as --top-p.",
        "max_depth": "Maximum number of tokens to draft ahead; 0: the drafter chooses.",
        "max_nodes": "Maximum number of nodes per draft tree; 0: the drafter chooses.",
        "tree": "Fixed draft tree as paths of ranks, e.g. '[[0],[0,0],[1]]', or a file of them.",
        "fan_out_hit": "Fixed guesses per token of a chain, after a predicted round, e.g. 3,2,1.",
        "fan_out_miss": "Fixed guesses per token of a chain, after an unpredicted round.",
    },
}
_DEFAULTS = {f.name: f.default for section in (SamplingParams, Speculation) for f in fields(section)} | {"n": 1}
_NOT_SHOWN = ("seed", "logprobs", "prompt_logprobs")  # their defaults have a special meaning


def parameter_options(command: F) -> F:
    """Add an option for each parameter. One that is not given is None, or () if it is repeatable."""
    for group, helps in reversed(GROUPS.items()):
        for name, text in reversed(helps.items()):
            option: Any = {"cls": GroupedOption, "group": group, "help": text + _default(name), **_kind(name)}
            command = click.option("--" + name.replace("_", "-"), name, **option)(command)
    return command


def _default(name: str) -> str:
    value = _DEFAULTS.get(name, ())
    if value in ((), "") or isinstance(value, bool) or name in _NOT_SHOWN:
        return ""
    return f"  [default: {value:g}]" if isinstance(value, float) else f"  [default: {value}]"


def schema_option(what: str, **options: Any) -> Callable[[F], F]:
    """Add `--schema FILE`, which `given` takes as a grammar. `what`: what follows the schema."""
    text = f"JSON schema in a file, which {what} follows.  [default: none]"
    return click.option("--schema", type=_schema, metavar="FILE", help=text, **options)


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Return the given parameters. Raises click's UsageError if a schema and a grammar are given."""
    found = {name: value for name, value in values.items() if value not in (None, ())}
    if "schema" in found:
        if "grammar" in found:
            raise click.UsageError("--schema and --grammar exclude each other: a schema is a grammar")
        found["grammar"] = {"json_schema": found.pop("schema")}
    return found


def _kind(name: str) -> dict[str, Any]:
    """Return the arguments of click.option for an option of this name."""
    special: dict[str, dict[str, Any]] = {
        "stop": {"multiple": True},
        "bad_words": {"multiple": True},
        "ignore_eos": {"is_flag": True, "default": None},
        "stop_token_ids": {"type": _integers, "metavar": "LIST"},
        "allowed_token_ids": {"type": _integers, "metavar": "LIST"},
        "fan_out_hit": {"type": _integers, "metavar": "LIST"},
        "fan_out_miss": {"type": _integers, "metavar": "LIST"},
        "bad_token_ids": {"type": _integers, "metavar": "LIST", "multiple": True},
        "logit_bias": {"type": _bias, "metavar": "ID=BIAS", "multiple": True},
        "tree": {"type": _paths, "metavar": "PATHS"},
        "grammar": {"type": _grammar, "metavar": "JSON"},
    }
    return special.get(name) or {"type": type(_DEFAULTS[name])}


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of integers; expected e.g. 5,17") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a token id with a bias; expected e.g. 42=-1.5") from None


def _grammar(text: str) -> Any:
    try:
        return read_grammar(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def _schema(name: str) -> Any:
    try:
        return read_schema(name)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def _paths(text: str) -> Any:
    try:
        return read_tree(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


MOST_BYTES = 1 << 20  # of a file; a grammar has a lower limit of its own


def read_grammar(said: str) -> dict[str, Any]:
    """Return the grammar in `said`, or in the file of this name.

    Raises ConfigError for text that is neither.
    """
    if said.lstrip().startswith("{"):
        return _object(said, "grammar", f"an object with one of {', '.join(GRAMMAR_KINDS)}")
    return _object(_content(said, "grammar"), said, f"an object with one of {', '.join(GRAMMAR_KINDS)}")


def read_schema(name: str) -> dict[str, Any]:
    """Return the JSON schema in a file.

    Raises ConfigError with the place of an error.
    """
    return _object(_content(name, "JSON schema"), name, 'a JSON schema such as {"type": "object", "properties": ...}')


def _object(text: str, where: str, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise ConfigError(f"{where} is not valid JSON: {error.msg} at {place}; expected {wanted}") from None
    except (RecursionError, ValueError) as error:  # too deep, or a number with too many digits
        raise ConfigError(f"{where} cannot be read as JSON: {error}; expected {wanted}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{where} is {shown(found)}, but must be {wanted}")
    return found


def _refuse(constant: str) -> None:
    """Refuse NaN and infinities, which other readers of JSON do not know."""
    raise ValueError(f"{constant} is not a number in JSON")


def _content(name: str, what: str) -> str:
    """Return the text of a file of the user."""
    path = Path(name).expanduser()
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{name} has {size} bytes; a {what} has at most {MOST_BYTES}")
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is not UTF-8 at byte {error.start}; a {what} is JSON in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{shown(name)} cannot be read: {reason}; expected a file with a {what}") from None
