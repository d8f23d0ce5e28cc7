"""Command-line options from the configuration: one for each key of a section, with its type, help and default.

Engines and proposers that ship with specq also have one option per key. Others use `--engine-option`.

The parameters of a request as options: one for each name in `specq.client.parameters.NAMES`, in groups.

To add one, add a line to `GROUPS`. A strategy declares its own parameters. Types and defaults are those of the field.
Values are checked where a request is read. An option and a key of a line give the same message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, TypeVar

import click

from specq.cli.groups import GroupedOption
from specq.cli.submit import read_grammar, read_schema
from specq.config import RENAMED, Cores, Options, OwnOptions, Section, Texts, kinds, of_one, read_tree, section_name
from specq.drafting import DRAFTERS
from specq.engines import ENGINES
from specq.protocol import GRAMMAR_KINDS, ConfigError, SamplingParams, Speculation
from specq.runtime import Number, OutFile, log
from specq.verification import STRATEGIES, strategy

F = TypeVar("F", bound=Callable[..., Any])

MAX_CORE = 65535


class Seconds(Number):
    """A number of seconds within a range."""

    name = "seconds"


def core_list(text: str) -> Cores:
    """Return CPU ids from a list such as `0,2-3`. Raises ValueError, which click reports, for other text."""
    try:
        return tuple(core for part in text.split(",") for core in _span(part))
    except ValueError:
        raise ValueError(f"{text!r} is not a list of CPU ids; expected e.g. 0,2-3, each at most {MAX_CORE}") from None


def _span(part: str) -> range:
    """Return the ids of a part such as `2` or `2-3`. Raises ValueError for an empty range or an id over MAX_CORE."""
    first, dash, last = part.partition("-")
    span = range(int(first), int(last if dash else first) + 1)
    if not span or span[-1] > MAX_CORE:
        raise ValueError(part)
    return span


def config_option(command: F) -> F:
    """Add `--config FILE`."""
    kind = click.Path(dir_okay=False)
    return click.option(
        "--config", "config_file", type=kind, help="TOML configuration file; command-line options override it."
    )(command)


def out_option(**kind: Any) -> Callable[[F], F]:
    """Add `--out`, a file for results or - for standard output; `kind`: further arguments of click.option."""
    return click.option(
        "--out",
        type=OutFile(or_stdout=True),
        default="-",
        show_default=True,
        help="File for the results; - is standard output.",
        **kind,
    )


def key_options(section: type[Section], names: Collection[str]) -> Callable[[F], F]:
    """Add the options of these keys of a section; `section_options` adds all."""

    def decorate(command: F) -> F:
        keys = _keys([(section_name(section), section)])
        for name in reversed([name for name in keys if name in names]):
            kind, owners = keys[name]
            command = _option(name, kind, _help(owners, 1))(command)
        return command

    return decorate


def section_options(
    *sections: type[Section], own: Mapping[str, Sequence[type[OwnOptions]]] | None = None
) -> Callable[[F], F]:
    """Add an option for each key of the sections, and `--config`. An option that is not given is None.

    `own`: see `own_key_options`.
    """

    def decorate(command: F) -> F:
        command = own_key_options(own or {}, len(sections))(command)
        named = [(section_name(section), section) for section in sections]
        for name, (kind, owners) in reversed(_keys(named).items()):
            command = _option(name, kind, _help(owners, len(sections)))(command)
        return config_option(_with_old_names(named, command))

    return decorate


def own_key_options(own: Mapping[str, Sequence[type[OwnOptions]]], num_roles: int = 1) -> Callable[[F], F]:
    """Add an option for each key of certain engines or proposers, by the section that chooses them.

    `num_roles`: number of sections of the command.
    """

    def decorate(command: F) -> F:
        each = [(section, kind) for section, types in own.items() for kind in types]
        for name, (kind, owners) in reversed(_keys(each).items()):
            command = _option(name, kind, _help(owners, num_roles))(command)
        return _with_old_names([(f"{section}.{kind.LABEL}", kind) for section, kind in each], command)

    return decorate


def _keys(sections: Iterable[tuple[str, type[Section]]]) -> dict[str, tuple[Any, dict[str, Field[Any]]]]:
    """Return for each key its type, and its field in each section with it."""
    keys: dict[str, tuple[Any, dict[str, Field[Any]]]] = {}
    for section, cls in sections:
        for f in fields(cls):
            if not f.metadata["is_hidden"]:
                keys.setdefault(f.name, (kinds(cls)[f.name], {}))[1].setdefault(section, f)
    return keys


def _help(owners: Mapping[str, Field[Any]], num_sections: int) -> str:
    """Return the help text of a key, with one text per section if they differ."""
    only = f" (--role {next(iter(owners))} only)" if len(owners) < num_sections else ""
    said = {owner: f"{f.metadata['help']}{only}{_default(f)}" for owner, f in owners.items()}
    texts = set(said.values())
    return texts.pop() if len(texts) == 1 else " ".join(f"--role {owner}: {text}" for owner, text in said.items())


def _default(f: Field[Any]) -> str:
    shown = ("off", "on")[f.default] if isinstance(f.default, bool) else f.default
    return "" if f.default in ("", ()) else f"  [default: {shown}]"


def _with_old_names(sections: Iterable[tuple[str, type[Section]]], command: F) -> F:
    """Add hidden options for the old names of renamed keys."""
    for name, section in sections:
        for old, new in RENAMED.get(name, {}).items():
            command = _option(old, kinds(section)[new], hidden=True)(command)
    return command


def _option(name: str, kind: Any, text: str = "", *, hidden: bool = False) -> Callable[[F], F]:
    """Return the decorator that adds the option of a key under this name."""
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text, hidden=hidden)
    if kind == Cores:
        return click.option(flag, name, type=core_list, metavar="LIST", help=text, hidden=hidden)
    if kind in (Options, Texts):
        return click.option(
            of_one(flag),
            name,
            multiple=True,
            callback=lambda _context, _parameter, values: values or None,
            metavar="NAME=VALUE" if kind == Options else None,
            help=text,
            hidden=hidden,
        )
    return click.option(flag, name, type=kind, help=text, hidden=hidden)


def log_options(default: str) -> Callable[[F], F]:
    """Add `--log-level` and `--log-json`, as `log_level` and `log_json`."""

    def decorate(command: F) -> F:
        level = click.option(
            "--log-level",
            type=click.Choice(log.LEVELS),
            default=default,
            show_default=True,
            help="Least severe level to log.",
        )
        as_json = click.option("--log-json", is_flag=True, help="Log JSON, one object per line.")
        return level(as_json(command))

    return decorate


RUNNING = ("engine", "engine_options")  # keys of [target] that choose the engine
OWN = {
    "target": [ENGINES.resolve(name).options for name in ENGINES],
    "draft": [DRAFTERS.resolve(name).options for name in DRAFTERS],
}
OWN_NAMES = {
    name
    for section, types in OWN.items()
    for kind in types
    for name in (*(f.name for f in fields(kind)), *RENAMED.get(f"{section}.{kind.LABEL}", ()))
}

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
        "mode": "async: drafters run ahead. sync: they wait for each verdict. plain: no speculation at all.",
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
            option: Any = {"cls": GroupedOption, "group": group, "help": text + _default_of(name), **_kind(name)}
            command = click.option("--" + name.replace("_", "-"), name, **option)(command)
    return command


def _default_of(name: str) -> str:
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
