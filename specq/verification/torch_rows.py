"""Target logits with torch, on any device: whole rows, cuts by a full sort.

The faster implementations must agree with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from specq.protocol import Float32Array, Float64Array, Int32Array, Int64Array
from specq.verification.host_kernels import CUT, GREEDY, Rows, by_kind, noise_keys
from specq.verification.packing import Drafted
from specq.verification.target_rows import Bars, Distributions, Edits, JudgedPaths, LookUp, Trees, check_numbers
from specq.verification.torch_noise import gumbel_torch

WIDE_ROWS = 64  # rows sorted at a time, to bound the memory
CHUNK = 512  # tokens; a draw finds its chunk first, then the token in it


class TorchRows:
    """See `specq.verification.target_rows.TargetRows`."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits

    def prefers_levels(self, num_sampled: int) -> bool:
        """See `TargetRows`. Return False: many small operations cost more than the rows."""
        return False

    def own_tokens(self, rows: Rows) -> Callable[[], Int32Array]:
        """See `TargetRows`."""
        tokens = np.empty(len(rows), np.int32)
        for kind, which, own in by_kind(rows):
            logits = self.take(own)
            scores = logits if kind == GREEDY else perturbed(logits, own, is_cut=kind == CUT)
            best = scores.max(-1)
            check_numbers(bool(best.values.isfinite().all()))
            tokens[which] = best.indices.cpu().numpy()
        return lambda: tokens

    def own_tokens_among(self, rows: Rows) -> Callable[[Int64Array], Int32Array]:
        """See `TargetRows`. It computes only the chosen rows."""
        return lambda which: self.own_tokens(rows[which])()

    def distributions(self, rows: Rows) -> LookUp:
        """See `TargetRows`."""
        logits = self.take(rows).float()
        scaled = scale(logits, rows)
        bounds = lower_bounds(scaled, rows)
        weights = torch.where(scaled >= bounds[:, None], scaled.double().exp(), 0)
        moments = (weights * scaled.clamp(min=-1e30)).sum(-1)
        found = torch.stack([logits.amax(-1).double(), bounds.double(), weights.sum(-1), moments], 1)
        return lambda which, token_ids: self.look_up(rows, found, which, token_ids)

    def look_up(
        self, rows: Rows, found: torch.Tensor, which: Int64Array, token_ids: Int64Array
    ) -> tuple[Distributions, Float64Array]:
        """Fetch distributions f64[rows, 4], and return the result of `LookUp`."""
        logits = self.logits[self._put(rows["logit_row"][which, None]), self._put(np.maximum(token_ids, 0))]
        distributions = Distributions(rows, found.cpu().numpy())
        check_numbers(bool(np.isfinite(distributions.found[:, 0]).all()))
        values: Float32Array = logits.float().cpu().numpy()
        return distributions, np.where(token_ids >= 0, distributions.probs(which, values), 0)

    def walk(self, rows: Rows, drafted: Drafted, residuals: Float64Array) -> JudgedPaths | None:
        """See `TargetRows`."""
        return None

    def longest(self, rows: Rows, warm: Rows, trees: Trees, bars: Bars) -> JudgedPaths | None:
        """See `TargetRows`."""
        return None

    def draw(self, distributions: Distributions, which: Int64Array, edits: Edits, uniforms: Float64Array) -> Int32Array:
        """See `TargetRows`."""
        rows = distributions.rows[which]
        top, bound, mass, _ = distributions.found[which].T[..., None]
        scaled = self.take(rows).float() - self._put(top.astype(np.float32))
        scaled.div_(self._put(rows["temperature"][:, None]))
        probs = scaled.masked_fill_(scaled < self._put(bound.astype(np.float32)), -torch.inf).double().exp_()
        values = edits.values * mass[edits.place, 0]
        probs[self._put(edits.place), self._put(edits.token_ids)] = self._put(values)
        return draw_by_chunks(probs, self._put(uniforms)).to(torch.int32).cpu().numpy()

    def take(self, rows: Rows) -> torch.Tensor:
        """Return the logits of some rows, without a copy if these are all rows in order."""
        at = rows["logit_row"]
        is_all = len(at) == self.logits.shape[0] and bool((at == np.arange(len(at))).all())
        return self.logits if is_all else self.logits[self._put(at)]

    def _put(self, array: Int64Array | Float64Array | Float32Array) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.logits.device)


def scale(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return f32[rows, vocab]: logits relative to each row's largest (so that no temperature overflows), over T > 0."""
    logits = logits.float()
    temperature = torch.from_numpy(rows["temperature"][:, None].copy()).to(logits.device)
    return (logits - logits.amax(-1, keepdim=True)).div_(temperature)


def perturbed(logits: torch.Tensor, rows: Rows, *, is_cut: bool) -> torch.Tensor:
    """Return f32[rows, vocab]: scaled logits plus noise, -inf where top-k, top-p or min-p cuts."""
    scaled = scale(logits, rows)
    if is_cut:
        scaled.masked_fill_(scaled < lower_bounds(scaled, rows)[:, None], -torch.inf)
    return add_noise(scaled, rows)


def add_noise(scaled: torch.Tensor, rows: Rows, token_ids: Int32Array | None = None) -> torch.Tensor:
    """Add the rows' noise to scaled logits f32[rows, columns], in place.

    The columns are those of `token_ids`, if given.
    """
    columns = np.arange(scaled.shape[1], dtype=np.int32) if token_ids is None else token_ids
    keys, tokens = (torch.from_numpy(array).to(scaled.device) for array in (noise_keys(rows), columns))
    return scaled.add_(gumbel_torch(keys, tokens))


def lower_bounds(scaled: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return f32[rows]: the least scaled logit of f32[rows, vocab] that top-k, top-p and min-p keep.

    -inf if they cut no token.
    """
    bounds = torch.from_numpy(rows["log_min_p"].copy()).to(scaled.device)
    ranked = np.flatnonzero((rows["top_k"] > 0) | (rows["top_p"] < 1))
    for first in range(0, len(ranked), WIDE_ROWS):
        part = ranked[first : first + WIDE_ROWS]
        at = torch.from_numpy(part).to(scaled.device)
        bounds[at] = bounds[at].maximum(_bounds_by_rank(scaled[at], rows[part]))
    return bounds


def _bounds_by_rank(scaled: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return f32[rows]: the bounds of top-k and top-p, by sorting."""
    vocab = scaled.shape[1]
    widths = np.where(rows["top_k"] > 0, np.minimum(rows["top_k"], vocab), vocab)
    top_k, top_p = (torch.from_numpy(a.copy()).to(scaled.device)[:, None] for a in (widths, rows["top_p"]))
    ordered = scaled.sort(dim=1, descending=True).values
    by_k = torch.where(top_k < vocab, ordered.gather(1, top_k - 1), -torch.inf)
    weights = torch.where(ordered >= by_k, ordered.double().exp_(), 0).cumsum(1)
    num_below = (weights < top_p * weights[:, -1:]).sum(1, keepdim=True)
    by_p = ordered.gather(1, num_below.clamp(max=vocab - 1))
    return torch.where(top_p < 1, by_k.maximum(by_p), by_k)[:, 0]


def draw_by_chunks(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw a token i64[n] of each unnormalised distribution f64[n, vocab], by inversion of uniforms f64[n]."""
    num, vocab = probs.shape
    chunks = torch.nn.functional.pad(probs, (0, -vocab % CHUNK)).view(num, -1, CHUNK)
    reached = chunks.sum(2).cumsum(1)
    aims = uniforms[:, None] * reached[:, -1:]
    # The first token with more than the aim, never one of probability 0.
    chunk = torch.searchsorted(reached, aims, right=True).clamp(max=chunks.shape[1] - 1)
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, CHUNK))[:, 0].cumsum(1)
    before = torch.where(chunk > 0, reached.gather(1, (chunk - 1).clamp(min=0)), 0)
    aims = torch.minimum(aims - before, inside[:, -1:] * (1 - 2.0**-52))  # rounding must not lead beyond the chunk
    return (chunk * CHUNK + torch.searchsorted(inside, aims, right=True))[:, 0]
