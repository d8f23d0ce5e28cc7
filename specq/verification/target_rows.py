"""The judge's view of target logits on any device: own tokens, distributions, draws.

Only small arrays reach the host.

`specq.verification.sampling` defines how a row's distribution follows from its logits. `torch_rows` computes it on any
device, and is the reference. `host_rows` (C on a CPU) and `cuda_rows` (Triton on a GPU) give the same with far fewer
passes and calls. `specq.verification.devices` chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from specq.protocol import EngineError, Float32Array, Float64Array, Int32Array, Int64Array
from specq.verification.host_kernels import Rows
from specq.verification.judgements import NodePaths
from specq.verification.packing import Drafted


@dataclass(frozen=True, slots=True)
class Distributions:
    """The distributions of rows with T > 0.

    p(token) = exp(s) / mass if s >= bound, with s = (logit - top) / T in float32.

    `found`: f64[rows, 4] with top and bound (float32 values), mass, and moment. The moment is the sum of exp(s) * s
    over the kept tokens.
    """

    rows: Rows
    found: Float64Array

    def probs(self, which: Int64Array, logits: Float32Array) -> Float64Array:
        """Return f64[n, c], the probabilities of tokens with logits f32[n, c] in rows `which` i64[n]."""
        top, bound, mass, _ = self.found[which].T[..., None]
        with np.errstate(over="ignore"):  # at a low temperature all but the largest may become -inf
            scaled = (logits - top.astype(np.float32)) / self.rows["temperature"][which, None]
        probs: Float64Array = np.where(scaled >= bound, np.exp(scaled, dtype=np.float64), 0) / mass
        return probs

    def entropies(self) -> Float64Array:
        """Return f64[rows], in nats."""
        _, _, masses, moments = self.found.T
        entropies: Float64Array = np.log(masses) - moments / masses
        return entropies


class Edits(NamedTuple):
    """Probabilities that replace a distribution's own.

    - `place`: i64[m] among the drawn, ascending.
    - `token_ids`: i64[m].
    - `values`: f64[m].
    """

    place: Int64Array
    token_ids: Int64Array
    values: Float64Array


# Given places i64[n] among rows and token ids i64[n, c], return the distributions and the tokens' probabilities f64[n,
# c].
LookUp = Callable[[Int64Array, Int64Array], tuple[Distributions, Float64Array]]


class Trees(NamedTuple):
    """The drafted nodes of some steps.

    - `firsts`: i64[steps + 1], the start of each step's nodes, and the end of the last.
    - `parents`: i32[n], as in the step's own tree.
    - `token_ids`: i64[n].
    """

    firsts: Int64Array
    parents: Int32Array
    token_ids: Int64Array


class Bars(NamedTuple):
    """The bars for probabilities in some rows: the lesser of limits f64[rows] and deltas f64[rows] * exp(-entropy)."""

    limits: Float64Array
    deltas: Float64Array

    def of(self, distributions: Distributions, which: Int64Array | slice) -> Float64Array:
        """Return the bars of some rows, which have these distributions."""
        found: Float64Array = np.minimum(self.limits[which], self.deltas[which] * np.exp(-distributions.entropies()))
        return found


# The accepted paths, and the tokens i32[steps] that follow them, when the device has them.
JudgedPaths = Callable[[], tuple[NodePaths, Int32Array]]


class TargetRows(Protocol):
    """The logits [rows, vocab] of one step.

    A method that returns a function starts the work on the device. Call the function to wait for the result. All raise
    EngineError if a row has no token, because its logits are NaN, infinite, or all banned.
    """

    def prefers_levels(self, num_sampled: int) -> bool:
        """Return whether `num_sampled` rows with T > 0 are better computed level by level, as paths reach them."""
        ...

    def own_tokens(self, rows: Rows) -> Callable[[], Int32Array]:
        """Choose each row's own token, i32[rows]: the argmax of its perturbed scores."""
        ...

    def own_tokens_among(self, rows: Rows) -> Callable[[Int64Array], Int32Array]:
        """Choose the own tokens i32[n] of some rows. The returned function takes their places i64[n]."""
        ...

    def distributions(self, rows: Rows) -> LookUp:
        """Find the distributions of rows with T > 0."""
        ...

    def walk(self, rows: Rows, drafted: Drafted, residuals: Float64Array) -> JudgedPaths | None:
        """Judge trees with these rows by the rule of `specq.verification.strategies.probabilistic`.

        Draw the next tokens too.

        `residuals`: f64[rows], the random numbers of the draws, one for each possible end of a path. Return None if the
        host must walk the trees.
        """
        ...

    def longest(self, rows: Rows, warm: Rows, trees: Trees, bars: Bars) -> JudgedPaths | None:
        """Judge trees with these rows by the rule of `specq.verification.longest`, with the distributions of `warm`.

        `warm` are the same rows if T > 0. Own tokens follow the paths. Return None if the host must walk the trees.
        """
        ...

    def draw(self, distributions: Distributions, which: Int64Array, edits: Edits, uniforms: Float64Array) -> Int32Array:
        """Draw a token i32[n] from each of some edited distributions, by inversion of uniforms f64[n] in (0, 1)."""
        ...


def check_numbers(ok: bool) -> None:
    """Check that each row has a finite largest score.

    Raises EngineError if `ok` is False. `specq.verification.judge` finds the row at fault.
    """
    if not ok:
        raise EngineError("the target's logits are not finite numbers, or every token is banned")
