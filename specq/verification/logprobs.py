"""Log-probabilities of emitted tokens and of the likeliest ones, from plain logits.

They are the target's own, before temperature, bias, penalties and cuts. OpenAI's API and vLLM's default report the
same. On a device the work begins at once, and the host waits for it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from specq.protocol import Float32Array, Float64Array, Int32Array, Int64Array, Logprobs, ScoredRows
from specq.verification.host_logits import Logits, on_host
from specq.verification.transfers import Fetched, to_device

if TYPE_CHECKING:
    import torch

ROWS = 64  # processed at a time on the host, to bound the memory
PART = 64  # logits of which only the largest is looked at first


class BegunLogprobs:
    """Log-probabilities of emitted tokens i64[m] and of the `num_top` likeliest, on their way to the host.

    `logits`: [m, vocab] on a device, as are the tokens.
    """

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> None:
        import torch

        logits = logits.float()
        norm = logits.logsumexp(-1, keepdim=True)
        top, top_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
        own = logits.gather(1, token_ids[:, None])
        self._values = Fetched(torch.cat((own, top), 1) - norm)
        self._top_ids = Fetched(top_ids.to(torch.int32))

    def wait(self) -> tuple[Float32Array, Int32Array]:
        """Return f32[m, 1 + num_top], of the emitted tokens first, and the ids of the others, i32[m, num_top]."""
        return self._values.wait(), self._top_ids.wait()


class KnownLogprobs:
    """The same for logits f32[m, vocab] in the host's memory, computed at once."""

    def __init__(self, logits: Float32Array, token_ids: Int64Array, num_top: int) -> None:
        num_top = min(num_top, logits.shape[1])
        self._values = np.empty((len(logits), 1 + num_top), np.float32)
        self._top_ids = np.empty((len(logits), num_top), np.int32)
        for first in range(0, len(logits), ROWS):
            rows = slice(first, first + ROWS)
            own, values, top_ids = logits[rows], self._values[rows], self._top_ids[rows]
            values[:, 0] = np.take_along_axis(own, token_ids[rows, None], 1)[:, 0]
            top_ids[:] = likeliest(own, num_top)
            values[:, 1:] = np.take_along_axis(own, top_ids.astype(np.int64), 1)
            values -= log_mass(own)

    def wait(self) -> tuple[Float32Array, Int32Array]:
        """See `BegunLogprobs`."""
        return self._values, self._top_ids


def log_mass(logits: Float32Array) -> Float32Array:
    """Return f32[m, 1]: log of the sum of exp(logits), f32[m, vocab]."""
    highest = logits.max(1, keepdims=True)
    with np.errstate(all="ignore"):
        found: Float32Array = highest + np.log(np.exp(logits - highest).sum(1, keepdims=True, dtype=np.float64))
    return found.astype(np.float32)


def likeliest(logits: Float32Array | Float64Array, count: int) -> Int64Array:
    """Return i64[m, count]: the tokens with the largest logits f32[m, vocab], best first; the lowest id of equals."""
    if not count:
        return np.zeros((len(logits), 0), np.int64)
    if count == 1:
        best: Int64Array = logits.argmax(1)[:, None]
        return best
    bounds = _bounds(logits, count)
    found = np.empty((len(logits), count), np.int64)
    for row, own in enumerate(logits):
        may = np.flatnonzero(~(own < bounds[row]))  # what is not a number comes last
        found[row] = may[np.argsort(-own[may], kind="stable")[:count]]
    return found


def _bounds(logits: Float32Array | Float64Array, count: int) -> Float32Array | Float64Array:
    """Return [m]: at least `count` logits of each row are not below this, and usually few more.

    It is the count-th largest of the maxima of parts of a row, which costs less than to sort.
    """
    num_rows, vocab = logits.shape
    num_parts = vocab // PART
    if num_parts < count:
        return np.full(num_rows, -np.inf, logits.dtype)
    highest = logits[:, : num_parts * PART].reshape(num_rows, num_parts, PART).max(2)
    return np.partition(highest, num_parts - count, 1)[:, num_parts - count]


def begin_logprobs(logits: Logits, token_ids: Int32Array, num_top: int) -> BegunLogprobs | KnownLogprobs:
    """Begin to compute those of emitted tokens i32[m] and of the num_top likeliest, from logits [m, vocab]."""
    logits, index = on_host(logits), token_ids.astype(np.int64)
    if isinstance(logits, np.ndarray):
        return KnownLogprobs(logits, index, num_top)
    return BegunLogprobs(logits, to_device(index, logits.device), num_top)


def logprobs(logits: Logits, token_ids: Int32Array, num_top: int) -> Logprobs:
    """Return what `begin_logprobs` begins to compute."""
    return _ended(begin_logprobs(logits, token_ids, num_top))


def _ended(begun: BegunLogprobs | KnownLogprobs) -> Logprobs:
    values, top_ids = begun.wait()
    return Logprobs(tokens=values[:, 0].copy(), top_ids=top_ids.copy(), top=values[:, 1:].copy())


class ScoredLogprobs:
    """The log-probabilities of scored rows (`ScoredRows`), on their way to the host."""

    def __init__(self, scored: Mapping[int, ScoredRows], logits: Logits) -> None:
        """Start to compute them.

        `scored`: by the places of the steps. `logits` [rows, vocab] are the plain ones, in that order.
        """
        self._parts = {}
        first = 0
        for at, rows in scored.items():
            own = logits[first : first + rows.num_rows]
            self._parts[at] = begin_logprobs(own, rows.token_ids, rows.num_top)
            first += rows.num_rows

    def wait(self) -> dict[int, Logprobs]:
        """Return them by the places of the steps."""
        return {at: _ended(begun) for at, begun in self._parts.items()}
