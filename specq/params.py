"""What a job may ask for: how its tokens are sampled, and how they shall be drafted.

Rule: values that are wrong are refused where they are made, with the name, the value and what is allowed. They travel as
JSON, without what is left at its default.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from specq.errors import JobError

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_CANDIDATES = 64
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 256  # characters of one: so many of a text may be held back at most
MODES = ("async", "sync", "plain")


@dataclass(frozen=True, slots=True)
class Values:
    """Base of both: a frozen dataclass with defaults, checked when it is read from JSON; `LABEL` names it in messages."""

    LABEL: ClassVar[str] = ""

    def validate(self) -> Self:
        """Return self, or raise JobError that names the field, its value and what is allowed."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, as JSON-able values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build and validate from JSON values; unknown names and wrong types raise JobError."""
        known = {f.name: f for f in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise JobError(f"unknown {cls.LABEL} {unknown[0]!r}; known are {', '.join(known)}")
        return cls(**{name: _coerce(name, value, str(known[name].type)) for name, value in values.items()}).validate()


@dataclass(frozen=True, slots=True)
class SamplingParams(Values):
    """What the user asked of the sampler; the same for the target and for those who draft for it.

    temperature   >= 0; 0 is greedy
    top_k         keep the k likeliest tokens; 0 keeps all
    top_p         keep the smallest set of likeliest tokens whose mass reaches top_p; in (0, 1]
    min_p         drop tokens less likely than min_p times the likeliest; in [0, 1]
    seed          in [0, 2**63); keys all random draws
    max_tokens    most tokens to generate, >= 1
    stop          at most 64 strings that end the text (not part of it), each of at most 256 characters
    stop_token_ids   tokens that end the text
    ignore_eos    go on past the model's end-of-sequence tokens
    strategy      a name in `specq.verification.STRATEGIES`
    threshold     of strategy `threshold`: accept above this target probability; in [0, 1]
    typical_eps, typical_delta   of strategy `typical`: accept above min(eps, delta * exp(-entropy)); in [0, 1]
    min_tokens    no end-of-sequence or stop token before so many, and no end by a stop string that is complete by then
    logprobs      -1: none; n >= 0: the target's log-probability of each token, and of the n likeliest there
    presence_penalty, frequency_penalty   taken off the logit of a generated token, once, and per occurrence
    repetition_penalty   > 0; divides a positive logit of a token of prompt or text, multiplies a negative one
    logit_bias    pairs (token id, what is added to its logit)
    bad_token_ids sequences of token ids that are never completed
    """

    LABEL: ClassVar[str] = "sampling parameter"
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

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def needs_history(self) -> bool:
        """Whether judging needs `SessionStep.history`."""
        return self.has_penalties or bool(self.bad_token_ids) or self.min_tokens > 0

    def token_ids_named(self) -> set[int]:
        """Return all token ids that the parameters name, to be checked against a vocabulary."""
        banned = {token for sequence in self.bad_token_ids for token in sequence}
        return banned | set(self.stop_token_ids) | {token for token, _ in self.logit_bias}

    def validate(self) -> Self:
        """Return self, or raise JobError that names the field, its value and what is allowed."""
        _require("temperature", self.temperature, 0 <= self.temperature < math.inf, "a finite number >= 0")
        _require("top_k", self.top_k, self.top_k >= 0, "0 (off) or a positive number of tokens")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _require("seed", self.seed, 0 <= self.seed <= MAX_SEED, "in [0, 2**63)")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _require(
            "the number of stop strings",
            len(self.stop),
            len(self.stop) <= MAX_STOP_STRINGS,
            f"at most {MAX_STOP_STRINGS}",
        )
        fits = all(0 < len(text) <= MAX_STOP_LENGTH for text in self.stop)
        _require("stop", self.stop, fits, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        _require("stop_token_ids", self.stop_token_ids, all(t >= 0 for t in self.stop_token_ids), "token ids >= 0")
        for name in ("threshold", "typical_eps", "typical_delta"):
            _require(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "in [0, 1]")
        self._validate_shaping()
        return self

    def _validate_shaping(self) -> None:
        """Check what changes logits beyond temperature and cuts; ranges as OpenAI's and vLLM's."""
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, "in [0, max_tokens]")
        _require("logprobs", self.logprobs, -1 <= self.logprobs <= MAX_LOGPROBS, f"in [-1, {MAX_LOGPROBS}]")
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "in [-2, 2]")
        _require("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "above 0")
        bias_ok = all(token >= 0 and -100 <= bias <= 100 for token, bias in self.logit_bias)
        _require("logit_bias", self.logit_bias, bias_ok, "pairs of a token id and a bias in [-100, 100]")
        words_ok = all(word and min(word) >= 0 for word in self.bad_token_ids)
        _require("bad_token_ids", self.bad_token_ids, words_ok, "non-empty sequences of token ids")


@dataclass(frozen=True, slots=True)
class Speculation(Values):
    """How drafters shall draft for a job. Under `deterministic` it changes speed, never text.

    mode            "async": drafters run ahead of the verdicts; "sync": they wait for each; "plain": nobody drafts,
                    neither drafters nor the verifier
    num_candidates  0: the tree grows best first, as the verifier's need says; N >= 1: a round drafts N candidates, as one
                    tree: the N likeliest first tokens, each followed by its likeliest continuation
    candidate_temp  temperature that drafts are made with; -1: the job's
    candidate_top_p top-p that drafts are made with; 0: the job's
    max_depth       most tokens drafted ahead of what is committed; 0: the drafter's own limit
    max_nodes       most nodes of a session's tree at any time; 0: the drafter's own limit
    tree            a static tree as a list of paths (Cai et al. 2024, Medusa): (0, 2) is the third likeliest child of the
                    likeliest first token; its prefixes are part of the tree. Empty: none
    fan_out_hit, fan_out_miss   fixed fan-outs as SSD has them: how many guesses are drafted for each token of a chain,
                    after a round whose outcome was drafted, and after one whose was not. Empty: none
    """

    LABEL: ClassVar[str] = "drafting parameter"
    mode: str = "async"
    num_candidates: int = 0
    candidate_temp: float = -1.0
    candidate_top_p: float = 0.0
    max_depth: int = 0
    max_nodes: int = 0
    tree: tuple[tuple[int, ...], ...] = ()
    fan_out_hit: tuple[int, ...] = ()
    fan_out_miss: tuple[int, ...] = ()

    @property
    def has_fixed_shape(self) -> bool:
        return bool(self.tree or self.num_candidates or self.fan_out_hit or self.fan_out_miss)

    def validate(self) -> Self:
        """Return self, or raise JobError that names the field, its value and what is allowed."""
        _require("mode", self.mode, self.mode in MODES, f"one of {', '.join(MODES)}")
        ok = 0 <= self.num_candidates <= MAX_CANDIDATES
        _require("num_candidates", self.num_candidates, ok, f"in [0, {MAX_CANDIDATES}]")
        warm = self.candidate_temp == -1 or 0 <= self.candidate_temp < math.inf
        _require("candidate_temp", self.candidate_temp, warm, "a finite number >= 0, or -1 for the job's")
        _require("candidate_top_p", self.candidate_top_p, 0 <= self.candidate_top_p <= 1, "in [0, 1], 0 for the job's")
        _require("max_depth", self.max_depth, 0 <= self.max_depth <= 1024, "in [0, 1024]")
        _require("max_nodes", self.max_nodes, 0 <= self.max_nodes <= 1024, "in [0, 1024]")
        paths_ok = all(path and min(path) >= 0 and max(path) < MAX_CANDIDATES for path in self.tree)
        _require("tree", self.tree, paths_ok, f"non-empty paths of ranks in [0, {MAX_CANDIDATES})")
        for name in ("fan_out_hit", "fan_out_miss"):
            ok = all(0 <= count <= MAX_CANDIDATES for count in getattr(self, name))
            _require(name, getattr(self, name), ok, f"numbers in [0, {MAX_CANDIDATES}]")
        shapes = [name for name in ("tree", "num_candidates", "fan_out_hit", "fan_out_miss") if getattr(self, name)]
        if len(shapes) > 1 and shapes != ["fan_out_hit", "fan_out_miss"]:
            raise JobError(f"{' and '.join(shapes)} are given together; give one of them")
        return self


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise JobError(f"{name} is {value!r}; it must be {allowed}")


def _coerce(name: str, value: Any, annotation: str) -> Any:
    """Check one JSON value against the field's annotation; lists become tuples, whole floats stay floats."""
    if annotation == "float" and type(value) in (int, float):
        return float(value)
    if annotation == "tuple[str, ...]" and isinstance(value, str):
        return (value,)
    kinds = {"int": int, "bool": bool, "str": str}
    if annotation in kinds and type(value) is kinds[annotation]:
        return value
    element = {"tuple[str, ...]": str, "tuple[int, ...]": int}.get(annotation)
    if element and isinstance(value, (list, tuple)) and all(type(v) is element for v in value):
        return tuple(value)
    if annotation.startswith("tuple[tuple[") and isinstance(value, (list, tuple, dict)):
        return _coerce_nested(name, value, annotation)
    raise JobError(f"{name} is {value!r}; it must be of type {annotation}")


def _coerce_nested(name: str, value: Any, annotation: str) -> Any:
    """Check sequences of token ids, or pairs (token id, float), for which {"token id": float} is taken too."""
    try:
        if annotation == "tuple[tuple[int, float], ...]":
            pairs = value.items() if isinstance(value, dict) else value
            return tuple((int(token), _coerce(name, bias, "float")) for token, bias in pairs)
        return tuple(_coerce(name, sequence, "tuple[int, ...]") for sequence in value)
    except (TypeError, ValueError):
        raise JobError(f"{name} is {value!r}; it must be of type {annotation}") from None
