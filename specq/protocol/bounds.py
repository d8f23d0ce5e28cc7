"""The allowed values of everything from outside: one table for broker, verifier, drafter and client.

- `Range`: a number within two limits.
- `OneOf`: one of a list of strings.
- `Text`: a string with limited length.
- `Items`: a tuple with a limited number of items, each within its own bound.
- `Json`: a free JSON object of limited depth and number of entries.
- `Elements`: the numbers in an array.

Rule: every number, string and list of every message names its bound here. `specq.protocol.wire` refuses to load a
message type with an unbounded field. A bound allows all honest uses. It stays within the limits of the code behind it.
An admitted value can neither overflow nor fill the memory. To add a field, give it a bound from the table, or add one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from specq.protocol.activations import BF16, INT8, MOST_ACTIVATION_BYTES
from specq.protocol.origins import ORIGINS

MAX_SHOWN = 80  # characters of a wrong value in an error message
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
HOUR_MS, YEAR_MS = 3_600_000, 366 * 24 * 3_600_000

# A temperature below this counts as 0, as in vLLM. Logits / T would overflow, and the likeliest token has all the mass
# anyway.
MIN_TEMPERATURE = 1e-5


class Bound(Protocol):
    """The allowed values of a field. `allowed` completes the phrase "it must be ..."."""

    @property
    def allowed(self) -> str: ...

    def admits(self, value: Any) -> bool:
        """Return whether a value of the right type is within the bound."""
        ...


@dataclass(frozen=True, slots=True)
class Range:
    """A number in [low, high]. NaN is never allowed. `extra` is allowed too, as a special value."""

    low: float
    high: float
    allowed: str = ""
    extra: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", self.allowed or f"from {self.low} to {self.high}")

    def admits(self, value: float) -> bool:
        return self.low <= value <= self.high or value == self.extra


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a list of strings."""

    values: tuple[str, ...]

    @property
    def allowed(self) -> str:
        return f"one of {', '.join(value or repr(value) for value in self.values)}"

    def admits(self, value: str) -> bool:
        return value in self.values


@dataclass(frozen=True, slots=True)
class Text:
    """A string of `least` to `most` characters."""

    most: int
    least: int = 0

    @property
    def allowed(self) -> str:
        return f"text of {f'{self.least} to' if self.least else 'at most'} {self.most} characters"

    def admits(self, value: str) -> bool:
        return self.least <= len(value) <= self.most


@dataclass(frozen=True, slots=True)
class Items:
    """A tuple of `least` to `most` items within the bound `of`. A dict counts as its pairs."""

    of: Bound
    most: int
    what: str
    least: int = 0

    @property
    def allowed(self) -> str:
        if self.least == self.most:
            return f"{self.most} {self.what}"
        return f"{f'{self.least} to' if self.least else 'at most'} {self.most} {self.what}"

    def admits(self, value: tuple[Any, ...]) -> bool:
        return self.least <= len(value) <= self.most and all(map(self.of.admits, value))


@dataclass(frozen=True, slots=True)
class PairBound:
    """Two values, each within its own bound."""

    first: Bound
    second: Bound

    @property
    def allowed(self) -> str:
        return f"a pair: {self.first.allowed}; {self.second.allowed}"

    def admits(self, value: tuple[Any, Any]) -> bool:
        return len(value) == 2 and self.first.admits(value[0]) and self.second.admits(value[1])


@dataclass(frozen=True, slots=True)
class Json:
    """A free JSON object with a maximum depth and number of entries. Its numbers are finite and fit into 64 bits."""

    depth: int
    entries: int

    @property
    def allowed(self) -> str:
        return f"a JSON object at most {self.depth} deep, with at most {self.entries} entries of finite 64-bit numbers"

    def admits(self, value: Any) -> bool:
        level, left = [value], self.entries
        for _ in range(self.depth + 1):
            if not all(map(_is_small, level)):
                return False
            inner = [one for one in level if type(one) in (dict, list)]
            level = [entry for one in inner for entry in (one.values() if type(one) is dict else one)]
            left -= len(level)
            if not level or left < 0:
                break
        return not level and left >= 0


def _is_small(value: Any) -> bool:
    """Return whether a value is small enough to store and add. Only numbers can fail."""
    if type(value) is int:
        return -MAX_INT64 <= value <= MAX_INT64
    return type(value) is not float or math.isfinite(value)


@dataclass(frozen=True, slots=True)
class Elements:
    """The numbers in an array, little-endian.

    - `is_plain`: checks the bytes first. A message has few bytes. NumPy calls would cost more than the rest of its
      decoding. None: all values are allowed.
    - `admits`: checks the values if `is_plain` was false. None: then the values are wrong.
    - `most`: the maximum number of values. A frame has a limit, too.
    """

    allowed: str
    is_plain: Callable[[bytes], object] | None = None
    admits: Callable[[npt.NDArray[Any]], bool] | None = None
    most: int = 1 << 24


def shown(value: object) -> str:
    """Return a wrong value as text for an error message.

    It is clipped before formatting, since the error travels in a message.
    """
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > MAX_SHOWN:
        kind = "entries" if isinstance(value, (list, tuple)) else "characters"
        return f"{repr(value[:MAX_SHOWN])[:MAX_SHOWN]}... ({len(value)} {kind})"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


# --- arrays -----------------------------------------------------------------------------------------------------------

# The highest byte of an integer has its sign. The highest byte of a float32 nearly decides whether it is finite.
_F4_NUMBERS = bytes(byte for byte in range(256) if byte & 0x7F != 0x7F)
_FEW = 64  # up to this size, a list is faster than NumPy


def _least(array: npt.NDArray[Any]) -> int:
    return int(min(array.tolist()) if len(array) <= _FEW else array.min())


def _are_ascii4(data: bytes) -> bool:
    """Return whether all 32-bit numbers are non-negative. Their highest bytes are then below 128, as in ASCII."""
    return data[3::4].isascii()


TOKEN_IDS = Elements("token ids from 0 to 2**31 - 1", _are_ascii4)
NODE_IDS = LENGTHS = Elements("numbers from 0 to 2**31 - 1", _are_ascii4)
REFERENCES = Elements("-1 or up to 2**31 - 1", _are_ascii4, lambda array: _least(array) >= -1)
IDS = Elements("ids from 0 to 2**63 - 1", lambda data: data[7::8].isascii())
FLAGS = Elements("0 or 1", lambda data: not data.translate(None, b"\0\1"))
BYTES = Elements("any bytes")
_ORIGINS = bytes(range(len(ORIGINS)))
ORIGIN_BYTES = Elements(
    f"codes of origins, from 0 to {len(ORIGINS) - 1}", lambda data: not data.translate(None, _ORIGINS)
)
WEIGHTS = Elements("any 16-bit numbers")
LOGPROBS = Elements(
    "finite or -inf",
    lambda data: not data[3::4].translate(None, _F4_NUMBERS),
    lambda array: bool(np.all(array < np.float32(np.inf))),
)

PROBABILITIES = Elements(
    "numbers from 0 to 1", lambda data: not data, lambda array: bool(np.all((array >= 0) & (array <= 1)))
)

MAX_NODES = 4096  # of one session, in one message
NODE_FLAGS, NODE_LANES = replace(FLAGS, most=MAX_NODES), replace(BYTES, most=MAX_NODES)
NODE_PROBS = replace(PROBABILITIES, most=MAX_NODES)
NODE_NAMES, NODE_DISTRIBUTIONS = replace(NODE_IDS, most=MAX_NODES), replace(REFERENCES, most=MAX_NODES)
# For drafts, the most frequent messages: `specq.protocol.draft_checks` checks each of their numbers more strictly.
NODE_TOKENS = Elements("token ids of the vocabulary", most=MAX_NODES)
NODE_PARENTS = Elements("ids of nodes before the child's, or -1", most=MAX_NODES)
DRAFT_SCORES = Elements("log-probabilities: 0 or less, and no NaN")
NODE_SCORES = replace(DRAFT_SCORES, most=MAX_NODES)

# Log-probabilities of a prompt (`specq.protocol.logprobs`), with room for the other bytes of a journal's row.
MAX_PROMPT_ROWS = 8 * 1024 * 1024
PROMPT_ROWS = replace(BYTES, most=MAX_PROMPT_ROWS)

# Hidden states for a drafter: bytes of at most one MiB, see `specq.protocol.activations`.
ACTIVATIONS = replace(BYTES, most=MOST_ACTIVATION_BYTES)
SCALES = Elements(
    "numbers of at least 0, and finite",
    lambda data: not data,
    lambda array: bool(np.all((array >= 0) & (array < np.float32(np.inf)))),
    most=1 << 18,
)

MAX_TRACED = 1024  # events in one message
TRACE_KINDS, TRACE_TIMES = replace(BYTES, most=MAX_TRACED), replace(IDS, most=MAX_TRACED)
TRACE_VALUES = replace(LENGTHS, most=8 * MAX_TRACED)

# --- scalars of messages ----------------------------------------------------------------------------------------------

ID = Range(0, MAX_INT64, "from 0 to 2**63 - 1")  # of a session, a job, an epoch, a start of a process
COUNT = Range(0, MAX_INT32, "from 0 to 2**31 - 1")  # of tokens, positions, nodes
STEPS = CLOCK_US = Range(0, MAX_INT64, "from 0 to 2**63 - 1")
LANE = Range(0, 255)
PRIORITY = Range(-1000, 1000)
DEADLINE_MS = Range(0, YEAR_MS, f"from 0 (none) to {YEAR_MS} (a year)")
HEARTBEAT_MS = Range(1, HOUR_MS)
STEP_MS = Range(0, HOUR_MS)
ELAPSED_MS = Range(0, 2**53, "from 0 to 2**53")
MIN_ACCEPT_PROB = Range(0, 9999)
SEEN = Items(Range(-1, MAX_INT32, "from -1 to 2**31 - 1"), 512, "lanes and node ids, from -1 to 2**31 - 1")
STEP_US = Items(Range(0, 2**32 - 1), 2, "times in microseconds, from 0 to 2**32 - 1", least=2)
TAP_LAYERS = Items(Range(-1, 4095), 16, "layers of a target, from -1 (after the last norm) to 4095")
TAP_FORM = OneOf((BF16, INT8))
TAP_WINDOW = Range(0, 65_536)
PIECES = Range(1, 256)  # of a tokenizer, of at most 1 MiB each
PIECE = Range(0, 255)

ROLE = Text(100)
NAME = Text(1000)  # of a model, worker, engine; also hashes
LABEL = Text(1000)
TENANT = Text(64)
CACHE_SALT = Text(1000)
ENDPOINT = Text(1000)
REASON = Text(10_000)
CODE = Text(100)
ADDRESSES = Items(ENDPOINT, 64, "addresses of at most 1000 characters")
CAPABILITIES = Items(Text(100), 64, "names of at most 100 characters")
STATE = OneOf(("loading", "ready", "draining", "leaving", "failed"))
FINISH = OneOf(("", "stop", "length", "cancelled", "error"))
VERDICT_FINISH = OneOf(("", "stop", "length"))
STATS = Json(depth=4, entries=8192)
REPORT = Json(depth=8, entries=300_000)  # of 4,096 workers (128 with metrics), and 1,000 sessions

# --- what a model is --------------------------------------------------------------------------------------------------

_TOKEN = Range(0, MAX_INT32, "a token id from 0 to 2**31 - 1")
EOS_IDS = Items(_TOKEN, 1024, "token ids from 0 to 2**31 - 1")

# --- what a job may ask for -------------------------------------------------------------------------------------------

MAX_LOGPROBS = 20
MAX_CANDIDATES = 64  # children of one node, and levels of a shape
MAX_STOPS, MAX_STOP_LENGTH = 64, 256  # a text may hold back at most this many characters
MAX_LISTED = 16_384  # more than a message can hold
MAX_GRAMMAR = 65_536  # characters of a grammar as JSON
MODES = ("async", "sync", "plain", "jit")

_SHARE = Range(0, 1, "in [0, 1]")
_PENALTY = Range(-2, 2, "in [-2, 2]")
_TOKENS = Items(_TOKEN, MAX_LISTED, "token ids from 0 to 2**31 - 1")
_RANKS = Items(Range(0, MAX_CANDIDATES - 1), MAX_CANDIDATES, f"ranks in [0, {MAX_CANDIDATES})", least=1)
_FAN_OUT = Items(Range(0, MAX_CANDIDATES), MAX_CANDIDATES, f"numbers in [0, {MAX_CANDIDATES}]")

_LOGPROBS = Range(0, MAX_LOGPROBS, f"from 0 to {MAX_LOGPROBS}, or -1 for none", extra=-1)

SAMPLING: dict[str, Bound] = {
    "temperature": Range(0, 100, "in [0, 100]"),
    "top_k": Range(0, MAX_INT32, "0 (off) or a number of tokens below 2**31"),
    "top_p": _SHARE,
    "min_p": _SHARE,
    "seed": Range(0, MAX_INT64, "in [0, 2**63)"),
    "max_tokens": Range(1, MAX_INT32, "at least 1, and below 2**31"),
    "stop": Items(
        Text(MAX_STOP_LENGTH, 1), MAX_STOPS, f"non-empty strings of at most {MAX_STOP_LENGTH} characters each"
    ),
    "stop_token_ids": _TOKENS,
    "strategy": Text(100),
    "threshold": _SHARE,
    "typical_eps": _SHARE,
    "typical_delta": _SHARE,
    "min_tokens": Range(0, MAX_INT32, "in [0, max_tokens]"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": Range(0.01, 100, "in [0.01, 100]"),
    "logit_bias": Items(
        PairBound(_TOKEN, Range(-100, 100)), MAX_LISTED, "pairs of a token id and a bias in [-100, 100]"
    ),
    "allowed_token_ids": _TOKENS,
    "bad_token_ids": Items(
        Items(_TOKEN, MAX_LISTED, "token ids", least=1), MAX_LISTED, "non-empty sequences of token ids"
    ),
    "grammar": Text(MAX_GRAMMAR),
}

SPECULATION: dict[str, Bound] = {
    "mode": OneOf(MODES),
    "num_candidates": Range(0, MAX_CANDIDATES, f"in [0, {MAX_CANDIDATES}]"),
    "candidate_temp": Range(0, 100, "in [0, 100], or -1 for the job's", extra=-1),
    "candidate_top_p": Range(0, 1, "in [0, 1], 0 for the job's"),
    "max_depth": Range(0, 1024, "in [0, 1024]"),
    "max_nodes": Range(0, 1024, "in [0, 1024]"),
    "tree": Items(_RANKS, 1024, f"non-empty paths of ranks in [0, {MAX_CANDIDATES}), each of at most {MAX_CANDIDATES}"),
    "fan_out_hit": _FAN_OUT,
    "fan_out_miss": _FAN_OUT,
}
