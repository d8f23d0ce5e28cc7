"""The options of a job: how to sample its tokens, and how to draft them.

Rule: `from_dict` and `validate` refuse wrong values, and name the field, the value and the allowed values. Options
travel as JSON. Options at their defaults are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import Field, dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, Self

from specq.protocol.bounds import (
    MAX_INT64,
    MAX_LISTED,
    MIN_TEMPERATURE,
    SAMPLING,
    SPECULATION,
    Bound,
    shown,
)
from specq.protocol.errors import JobError
from specq.protocol.grammars import grammar_text

MAX_SEED = MAX_INT64
MAX_DIGITS = 20  # of a token id as a string
KINDS = {  # the types of fields in a user's words
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "tuple[str, ...]": "a text, or a list of texts",
    "tuple[int, ...]": "a list of whole numbers",
    "tuple[tuple[int, ...], ...]": "a list of lists of whole numbers",
    "tuple[tuple[int, float], ...]": "an object of numbers by token id, or a list of such pairs",
}
GrammarText = str  # see `specq.protocol.grammars`


@dataclass(frozen=True, slots=True)
class Values:
    """Base of both: a frozen dataclass whose fields have defaults.

    - `LABEL`: what errors call one of its fields.
    - `BOUNDS`: the bound of each field except flags.
    """

    LABEL: ClassVar[str] = ""
    BOUNDS: ClassVar[Mapping[str, Bound]] = {}

    def validate(self) -> Self:
        """Return self.

        Raises JobError with the field, its value and the allowed values.
        """
        return self.check(self.BOUNDS)

    def check(self, names: Container[str]) -> Self:
        """Return self if these fields are within their bounds and all fields agree.

        Raises JobError as `validate` does.
        """
        for name, bound in self.BOUNDS.items():
            if name in names and not bound.admits(value := getattr(self, name)):
                raise _misfit(name, value, bound.allowed)
        self.check_agreement()
        return self

    def check_agreement(self) -> None:
        """Check that the fields go together.

        Raises JobError if they do not.
        """

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, as JSON-able values."""
        names, values_of, defaults = _layout(type(self))
        values = values_of(self)
        if values == defaults:
            return {}
        return {n: value for n, value, default in zip(names, values, defaults, strict=True) if value != default}

    @classmethod
    def check_names(cls, values: Mapping[str, Any]) -> None:
        """Check that all names are known.

        Raises JobError for an unknown name.
        """
        known = _fields(cls)
        if not values.keys() <= known.keys():
            unknown = min(values.keys() - known.keys())
            raise JobError(f"unknown {cls.LABEL} {shown(unknown)}; known: {', '.join(known)}", field=unknown)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build and validate from JSON values.

        Raises JobError for unknown names and wrong types.
        """
        cls.check_names(values)
        known = _fields(cls)
        given = {name: _read(name, value, str(known[name].type)) for name, value in values.items()}
        return cls(**given).check(given)  # defaults are within their bounds


class _Layout(NamedTuple):
    """The fields of a class: their names, a getter of their values, and their defaults."""

    names: tuple[str, ...]
    values_of: Callable[[Values], tuple[Any, ...]]
    defaults: tuple[Any, ...]


# Cached by class, since `dataclasses.fields` builds its result at each call.
_FIELDS: dict[type, dict[str, Field[Any]]] = {}
_LAYOUTS: dict[type, _Layout] = {}


def _fields(cls: type[Values]) -> dict[str, Field[Any]]:
    found = _FIELDS.get(cls)
    if found is None:
        found = _FIELDS[cls] = {field.name: field for field in fields(cls)}
    return found


def _layout(cls: type[Values]) -> _Layout:
    found = _LAYOUTS.get(cls)
    if found is None:
        known = _fields(cls)
        defaults = tuple(field.default for field in known.values())
        found = _LAYOUTS[cls] = _Layout(tuple(known), attrgetter(*known), defaults)
    return found


@dataclass(frozen=True, slots=True)
class SamplingParams(Values):
    """How tokens are sampled. The same for the target and its drafters.

    - temperature: in [0, 100]. 0 is greedy. Values below `bounds.MIN_TEMPERATURE` become 0.
    - top_k: keep the k likeliest tokens. 0 keeps all.
    - top_p: keep the smallest set of likeliest tokens whose mass reaches top_p, in [0, 1]. 0 is greedy and becomes
      temperature 0.
    - min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
    - seed: in [0, 2**63). It determines all random draws. Users may give any 64-bit number: see
      `specq.client.parameters.seed_used`.
    - max_tokens: maximum number of generated tokens, >= 1.
    - stop: at most 64 strings that end the text, each of at most 256 characters. The text does not include them.
    - stop_token_ids: tokens that end the text.
    - ignore_eos: continue past the model's end-of-sequence tokens.
    - strategy: a name in `specq.verification.STRATEGIES`.
    - threshold: of strategy `threshold`, accept above this target probability, in [0, 1].
    - typical_eps, typical_delta: of strategy `typical`, accept above min(eps, delta * exp(-entropy)), in [0, 1].
    - min_tokens: no end-of-sequence or stop token before this number of tokens. A stop string that is complete by then
      does not end the text.
    - logprobs: -1 gives none. n >= 0 gives the target's log-probability of each token, and of the n likeliest tokens
      there.
    - prompt_logprobs: the same for each token of the prompt except the first.
    - presence_penalty, frequency_penalty: subtracted from the logit of a generated token, once and per occurrence.
    - repetition_penalty: in [0.01, 100]. It divides a positive logit of a token of prompt or text, and multiplies a
      negative one.
    - logit_bias: pairs (token id, value added to its logit).
    - bad_token_ids: sequences of token ids that are never completed.
    - allowed_token_ids: the only tokens that are generated, the ends of the text included. Empty: all.
    - grammar: the JSON text of the grammar that the text follows, see `specq.protocol.grammars`. Users may give the
      object.
    """

    LABEL: ClassVar[str] = "sampling parameter"
    BOUNDS: ClassVar[Mapping[str, Bound]] = SAMPLING
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    strategy: str = "deterministic"
    threshold: float = 0.1
    typical_eps: float = 0.09
    typical_delta: float = 0.3
    min_tokens: int = 0
    logprobs: int = -1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarText = ""
    prompt_logprobs: int = -1
    allowed_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Set a greedy temperature to exactly 0, which judges and drafters test for."""
        is_greedy = self.top_p == 0
        object.__setattr__(self, "temperature", 0.0 if is_greedy else _or_zero(self.temperature))
        if is_greedy:
            object.__setattr__(self, "top_p", 1.0)

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def needs_history(self) -> bool:
        """Return whether judging needs `SessionStep.history`."""
        return self.has_penalties or bool(self.bad_token_ids) or self.min_tokens > 0

    def token_ids_named(self) -> set[int]:
        """Return all token ids in the parameters, for a check against a vocabulary."""
        banned = {token for sequence in self.bad_token_ids for token in sequence}
        named = set(self.stop_token_ids) | set(self.allowed_token_ids)
        return banned | named | {token for token, _ in self.logit_bias}

    def check_agreement(self) -> None:
        """Check that `min_tokens` is not greater than `max_tokens`.

        Raises JobError if it is.
        """
        if self.min_tokens > self.max_tokens:
            raise _misfit("min_tokens", self.min_tokens, SAMPLING["min_tokens"].allowed)


@dataclass(frozen=True, slots=True)
class Speculation(Values):
    """How a job is drafted for. Under `deterministic` this changes the speed, never the text.

    - mode "async": drafters run ahead of the verdicts.
    - mode "sync": they wait for each verdict.
    - mode "plain": neither drafters nor the verifier draft.
    - mode "jit": as "async", but a session waits if no drafted node fits its text. Its drafter then drafts a chain just
      in time (SSD's backup for a miss of its cache).
    - num_candidates 0: the tree grows best first, guided by the verifier's `min_accept_prob`.
    - num_candidates N >= 1: a round drafts N candidates as one tree. They are the N likeliest first tokens, each
      followed by its likeliest continuation.
    - candidate_temp: temperature of drafts. -1: the job's.
    - candidate_top_p: top-p of drafts. 0: the job's.
    - max_depth: maximum number of tokens drafted ahead of the committed text. 0: the drafter's own limit.
    - max_nodes: maximum number of nodes of a session's tree at any time. 0: the drafter's own limit.
    - tree: a static tree as a list of paths (Cai et al. 2024, Medusa). (0, 2) is the third likeliest child of the
      likeliest first token. All prefixes of a path are part of the tree. Empty: none.
    - fan_out_hit, fan_out_miss: fixed fan-outs, as in SSD. They are the numbers of guesses for each token of a chain.
      The first applies after a round whose outcome was drafted, the second after all others. Empty: none.
    """

    LABEL: ClassVar[str] = "drafting parameter"
    BOUNDS: ClassVar[Mapping[str, Bound]] = SPECULATION
    mode: str = "async"
    num_candidates: int = 0
    candidate_temp: float = -1.0
    candidate_top_p: float = 0.0
    max_depth: int = 0
    max_nodes: int = 0
    tree: tuple[tuple[int, ...], ...] = ()
    fan_out_hit: tuple[int, ...] = ()
    fan_out_miss: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "candidate_temp", _or_zero(self.candidate_temp))

    @property
    def waits(self) -> bool:
        """Return whether a session waits for its drafter: before each round, or if no drafted node fits."""
        return self.mode in ("sync", "jit")

    @property
    def has_fixed_shape(self) -> bool:
        return bool(self.tree or self.num_candidates or self.fan_out_hit or self.fan_out_miss)

    def check_agreement(self) -> None:
        """Check that at most one shape is given.

        Raises JobError for more.
        """
        if not self.has_fixed_shape:
            return
        shapes = [name for name in ("tree", "num_candidates", "fan_out_hit", "fan_out_miss") if getattr(self, name)]
        if len(shapes) > 1 and shapes != ["fan_out_hit", "fan_out_miss"]:
            raise JobError(f"{' and '.join(shapes)} are given together; give one of them", field=shapes[1])


def _or_zero(temperature: float) -> float:
    return 0.0 if 0 < temperature < MIN_TEMPERATURE else temperature


def _misfit(name: str, value: object, allowed: str) -> JobError:
    return JobError(f"{name} is {shown(value)}, but must be {allowed}", field=name)


def _read(name: str, value: Any, annotation: str) -> Any:
    """Check one JSON value against the field's annotation."""
    return grammar_text(value) if annotation == "GrammarText" else _coerce(name, value, annotation)


def _coerce(name: str, value: Any, annotation: str) -> Any:
    """Check one JSON value against the field's annotation. Lists become tuples, and whole floats stay floats."""
    if isinstance(value, (list, tuple, dict)) and len(value) > MAX_LISTED:  # before looking at each entry
        raise JobError(f"{name} is {shown(value)}, but must be limited to {MAX_LISTED} entries", field=name)
    if annotation == "float" and type(value) in (int, float):
        return _float(name, value)
    if annotation == "tuple[str, ...]" and isinstance(value, str):
        return (value,)
    kinds = {"int": int, "bool": bool, "str": str}
    if annotation in kinds and type(value) is kinds[annotation]:
        return value
    element = {"tuple[str, ...]": str, "tuple[int, ...]": int}.get(annotation)
    if element and isinstance(value, (list, tuple)) and all(type(v) is element for v in value):
        return tuple(value)
    if annotation == "tuple[tuple[int, float], ...]" and isinstance(value, (list, tuple, dict)):
        return _coerce_pairs(name, value)
    if annotation == "tuple[tuple[int, ...], ...]" and isinstance(value, (list, tuple)):
        return tuple(_coerce(name, sequence, "tuple[int, ...]") for sequence in value)
    raise JobError(f"{name} is {shown(value)}, but must be {KINDS[annotation]}", field=name)


def _float(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        raise JobError(f"{name} is {shown(value)}, but must be a number that a float can hold", field=name) from None


def _coerce_pairs(name: str, value: Any) -> Any:
    """Check pairs (token id, float). {"token id": float} is accepted too, since keys of JSON are strings."""
    pairs = [(_token(token), bias) for token, bias in value.items()] if isinstance(value, dict) else value
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 and type(pair[0]) is int for pair in pairs):
        raise JobError(f"{name} is {shown(value)}, but must be {KINDS['tuple[tuple[int, float], ...]']}", field=name)
    return tuple((token, _coerce(name, bias, "float")) for token, bias in pairs)


def _token(key: object) -> object:
    """Return the integer that a key spells, or the unchanged key."""
    return int(key) if isinstance(key, str) and len(key) < MAX_DIGITS and key.isdecimal() else key
