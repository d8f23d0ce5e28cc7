"""`probabilistic`: speculative sampling, exact over chains, N candidates and trees.

The rule is from Leviathan et al. 2023, "Fast inference from transformers via speculative decoding", algorithm 1, and
Chen et al. 2023. For siblings it is recursive rejection sampling without replacement (Yang et al. 2024, and Jeon et al.
2024). At a position with target distribution t, judge the children in order. Child x, drawn from draft distribution d,
is accepted with probability min(1, t(x) / d(x)). If it is rejected, t becomes norm(max(t - d, 0)) and the next child is
judged. After the last child, the token is drawn from the remaining t. After an accepted leaf, it is drawn from the
target's own distribution (the bonus).

- Sampled siblings are drawn without replacement from one draft distribution (`DraftDistributions`). Each is drawn from
  that distribution without the tokens of earlier siblings, renormalised. They are judged first, in draw order. Then
  come the point masses, whose draft distribution is all on their token. They are accepted with probability t(x).

The seed project accepts a mismatch with min(1, p/q) but emits no residual sample. It also picks the longest of N
accepted candidates. Both bias the text (tests/verification/ has them as mutants). Here depth and choice follow from the
rule.

A step does not wait for a sampled child that was drafted but is not in the step. Whether a child is verified is decided
without its token. So drawing the target's own token there is exact. The child's subtree stays only if the two agree.

Target distributions are kept unnormalised. `walks.SiblingGroup.residual` holds them at the tokens of children or their
distributions. All other tokens keep the target's own probabilities, and `mass` is the sum. So a rejection changes k
numbers, not a vocabulary. The device computes distributions, probabilities at those tokens, and residual draws for all
sessions at once. The walk in between needs a few numbers per session.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specq.protocol import Int32Array, Int64Array, Judgement, SamplingParams
from specq.verification.drafted import Drafted
from specq.verification.interface import Draws, Strategy
from specq.verification.judgements import Judgements
from specq.verification.packing import JudgedStep, Packed, Placed, by_temperature, pack
from specq.verification.strategies.deterministic import Deterministic
from specq.verification.target_rows import Distributions, TargetRows
from specq.verification.walks import Paths, extend

ALL_LEVELS = 2**31 - 1


class Probabilistic(Strategy):
    """See the module. At T = 0 the target's distribution is a point mass, and the rule is that of `deterministic`."""

    takes_distributions = True
    stops_at_accepted = True

    def is_lossless(self, params: SamplingParams) -> bool:
        """Return True: it is exact in distribution."""
        return True

    def says_own(self, params: SamplingParams) -> bool:
        """Return True at T = 0. Otherwise the token is drawn with a uniform number."""
        return params.temperature == 0

    def judge(self, steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Sequence[Judgement]:
        """See `Strategy.judge`."""
        return by_temperature(
            steps,
            lambda of: Deterministic().judge(of, target, draws),
            lambda of: _judge_warm(of, target, draws),
        )


def _judge_warm(steps: Sequence[JudgedStep], target: TargetRows, draws: Draws) -> Judgements:
    batch, packed = Placed.of(steps).batch, pack(steps)
    look_up = None if target.prefers_levels(len(packed.rows)) else target.distributions(packed.rows)  # a GPU begins
    drafted = Drafted.of(batch, packed)
    at = packed.rows[packed.parent_rows]
    drafted.uniforms[:] = draws.accept(at["seed"], at["position"], drafted.named[:, -1])
    rows = packed.rows
    judged = None if look_up is None else target.walk(rows, drafted, draws.residual(rows["seed"], rows["position"]))
    if judged is not None:
        found, last = judged()
        return Judgements.of_paths(batch.session_ids, found, drafted.named[:, -1], last)
    paths, tokens = Paths.of(drafted), np.zeros(len(steps), np.int32)
    if look_up is None:
        _walk_by_level(paths, tokens, packed, drafted, target, draws)
    else:
        distributions, probs = look_up(packed.parent_rows, drafted.named)
        extend(paths, drafted, probs, levels=ALL_LEVELS)
        everyone = np.arange(len(steps))
        tokens[:] = draw_tokens(paths, everyone, distributions, _end_rows(paths, packed), target, draws)
    return Judgements.of_paths(batch.session_ids, paths.of_nodes(drafted), drafted.named[:, -1], tokens)


def _walk_by_level(
    paths: Paths, tokens: Int32Array, packed: Packed, drafted: Drafted, target: TargetRows, draws: Draws
) -> None:
    """Judge level by level: get the distributions of the rows that paths reach. Fill in the next tokens i32[steps]."""
    probs = np.zeros(drafted.named.shape)
    while len(live := np.flatnonzero(~paths.has_ended)):
        rows = _end_rows(paths, packed)[live]
        place = np.full(len(packed.rows), -1, np.int64)
        place[rows] = np.arange(len(rows))
        of_nodes = place[packed.parent_rows]
        nodes = np.flatnonzero(of_nodes >= 0)
        distributions, probs[nodes] = target.distributions(packed.rows[rows])(of_nodes[nodes], drafted.named[nodes])
        extend(paths, drafted, probs, levels=1)
        ended = paths.has_ended[live]
        if ended.any():
            tokens[live[ended]] = draw_tokens(paths, live[ended], distributions, np.flatnonzero(ended), target, draws)


def _end_rows(paths: Paths, packed: Packed) -> Int64Array:
    """Return i64[steps]: the packed rows at the paths' ends."""
    return packed.first_rows + paths.ends + 1


def draw_tokens(
    paths: Paths, which: Int64Array, distributions: Distributions, places: Int64Array, target: TargetRows, draws: Draws
) -> Int32Array:
    """Draw the corrections or bonuses of steps whose paths have ended, at the places i64[n] of some distributions."""
    rows = distributions.rows[places]
    return target.draw(distributions, places, paths.edits(which), draws.residual(rows["seed"], rows["position"]))
