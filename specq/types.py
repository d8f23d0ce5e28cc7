"""The plain values that every room shares: sampling parameters, draft trees, judgements, statistics.

Rule: frozen dataclasses of numbers and NumPy arrays, no behaviour beyond derived counts and validation. Nothing here
imports another module of specq but `errors`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.errors import JobError

Int32Array = npt.NDArray[np.int32]
Float16Array = npt.NDArray[np.float16]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
UInt16Array = npt.NDArray[np.uint16]

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
NO_TOKENS: Int32Array = np.zeros(0, np.int32)
NO_TOKENS.flags.writeable = False

# How a completion ended; `None` while it runs.
FINISH_REASONS = ("stop", "length", "cancelled", "error")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What the user asked of the sampler; the same for the target and for those who draft for it.

    temperature   >= 0; 0 is greedy
    top_k         keep the k likeliest tokens; 0 keeps all
    top_p         keep the smallest set of likeliest tokens whose mass reaches top_p; in (0, 1]
    min_p         drop tokens less likely than min_p times the likeliest; in [0, 1]
    seed          in [0, 2**63); keys all random draws
    max_tokens    most tokens to generate, >= 1
    stop          strings that end the text (not part of it); stop_token_ids: tokens that end it
    ignore_eos    go on past the model's end-of-sequence tokens
    strategy      a name in `specq.verification.STRATEGIES`
    threshold     of strategy `threshold`: accept above this target probability; in [0, 1]
    typical_eps, typical_delta   of strategy `typical`: accept above min(eps, delta * exp(-entropy)); in [0, 1]
    min_tokens    no end-of-sequence or stop token before so many
    logprobs      -1: none; n >= 0: the target's log-probability of each token, and of the n likeliest there
    presence_penalty, frequency_penalty   taken off the logit of a generated token, once, and per occurrence
    repetition_penalty   > 0; divides a positive logit of a token of prompt or text, multiplies a negative one
    logit_bias    pairs (token id, what is added to its logit)
    bad_token_ids sequences of token ids that are never completed
    """

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

    def validate(self) -> SamplingParams:
        """Return self, or raise JobError that names the field, its value and what is allowed."""
        _require("temperature", self.temperature, 0 <= self.temperature < math.inf, "a finite number >= 0")
        _require("top_k", self.top_k, self.top_k >= 0, "0 (off) or a positive number of tokens")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "in (0, 1]")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "in [0, 1]")
        _require("seed", self.seed, 0 <= self.seed <= MAX_SEED, "in [0, 2**63)")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1")
        _require("stop", self.stop, all(self.stop), "non-empty strings")
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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, as JSON-able values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> SamplingParams:
        """Build and validate parameters from JSON values; unknown names and wrong types raise JobError."""
        known = {f.name: f for f in fields(SamplingParams)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise JobError(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(known)}")
        typed = {name: _coerce(name, value, str(known[name].type)) for name, value in values.items()}
        return replace(SamplingParams(), **typed).validate()


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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a worker's model is, as far as matching, routing and limits need it.

    `fingerprint` hashes the weights (equal text is claimed only between equal fingerprints and dtypes);
    `tokenizer_hash` hashes vocabulary, merges and added tokens. `vocab_size` counts the rows of the output head, which
    may be padded beyond the tokenizer's `num_tokens`.
    """

    name: str
    fingerprint: str
    dtype: str
    engine: str
    vocab_size: int
    num_tokens: int
    eos_ids: tuple[int, ...]
    max_length: int
    tokenizer_hash: str
    kv_slots: int = 0


@dataclass(frozen=True, slots=True)
class DraftLaws:
    """What the nodes of a tree were sampled from, for `probabilistic`.

    ids        i32[g, k], weights u16[g, k]: laws, probability = weight / sum of weights; unused places hold id -1 and
               weight 0
    rows       i32[n]: the law that each node was drawn from; -1: a point mass, chosen and not drawn. Sampled siblings
               name one row and stand in draw order: each was drawn from it without its elder siblings' tokens
    """

    ids: Int32Array
    weights: UInt16Array
    rows: Int32Array


@dataclass(frozen=True, slots=True)
class Tree:
    """Draft nodes of one session in an order in which parents come before children.

    token_ids  i32[n]
    parents    i32[n]: index of the parent node, -1 for a child of the committed context; parents[i] < i
    scores     f32[n]: the drafter's log-probability given the parent; 0 where unknown
    laws       None: all nodes are point masses
    waits      bool[n + 1] or None: for the context and each node, whether a sampled child that is not in the tree waits
               there, so that `probabilistic` neither judges other children there nor draws a token; None: nowhere
    """

    token_ids: Int32Array
    parents: Int32Array
    scores: Float32Array
    laws: DraftLaws | None = None
    waits: BoolArray | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    def depths(self) -> Int32Array:
        """Return i32[n]: 1 for children of the context, one more a generation."""
        depths = np.zeros(self.num_nodes, np.int32)
        for i, parent in enumerate(self.parents.tolist()):
            depths[i] = 1 if parent < 0 else depths[parent] + 1
        return depths


NO_TREE = Tree(NO_TOKENS, NO_TOKENS, np.zeros(0, np.float32))


@dataclass(frozen=True, slots=True)
class History:
    """What judging a session needs of its past, where `SamplingParams.needs_history`.

    token_ids   i32[base_len], the committed context, the step's tokens included; the first prompt_len are the prompt
    end_ids     tokens that end the text: end-of-sequence unless ignored, and stop tokens
    """

    token_ids: Int32Array
    prompt_len: int
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionStep:
    """One session's share of a forward pass.

    token_ids   i32[m], m >= 1: committed tokens whose KV is not there yet, at positions start .. start + m - 1; one
                for a decoding session, more for a prefill chunk
    tree        nodes hanging from the last of token_ids
    judged      False for a prefill chunk that does not reach the end of the context: no logits are wanted
    history     needed where `params.needs_history`
    """

    session_id: int
    start: int
    token_ids: Int32Array
    params: SamplingParams
    tree: Tree = NO_TREE
    judged: bool = True
    history: History | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids) + self.tree.num_nodes

    @property
    def num_judged_rows(self) -> int:
        return 1 + self.tree.num_nodes if self.judged else 0

    @property
    def base_len(self) -> int:
        """The committed length after token_ids: the position that the step's first new token will take."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The target's log-probabilities at emitted tokens: of its plain logits, before temperature, bias and penalties.

    tokens f32[m]: of the emitted token; top_ids i32[m, n], top f32[m, n]: of the n likeliest tokens, descending
    """

    tokens: Float32Array
    top_ids: Int32Array
    top: Float32Array


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a strategy decided for one session.

    path        indices into the step's tree of the accepted nodes, root to leaf
    token_ids   i32[len(path) + 1]: the accepted tokens, then the correction or bonus token; i32[len(path)], without
                that token, where `Tree.waits` forbids it
    logprobs    where `params.logprobs` asks for them
    """

    session_id: int
    path: tuple[int, ...]
    token_ids: Int32Array
    logprobs: Logprobs | None = None
