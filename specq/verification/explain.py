"""Explains judgements: the decision on each drafted node, for `specq worker --role target --verbose`.

This module repeats the judge's computation from the same logits. Verification does not need it, and it runs only on
request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import structlog

from specq.protocol import Judgement, SessionStep, Tree
from specq.runtime import traced
from specq.verification import strategy
from specq.verification.devices import target_rows
from specq.verification.host_logits import Logits, on_host
from specq.verification.packing import JudgedStep, node_tokens, pack, place
from specq.verification.processors import shaped

ACCEPTED, REJECTED, NOT_REACHED = "accepted", "rejected", "not reached"

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on one node.

    - `position`: the position of its token in the context.
    - `target_prob`: the token's probability in the distribution that the strategy judges by. That is after bias,
      penalties, temperature and cuts. At T = 0 it is 1 or 0. Under `threshold` at T = 0 it is from the softmax of the
      logits.
    - `draft_prob`: its probability in its draft distribution, given its earlier siblings. 1 for a point mass.
    - `verdict` `accepted`: it was emitted.
    - `verdict` `not reached`: its parent was not accepted, or an earlier sibling was. Or the strategy ignores drafts.
    - `verdict` `rejected`: any other node. Some strategies may reject a node above the bar because they took a longer
      path.
    """

    session: int
    position: int
    token: int
    target_prob: float
    draft_prob: float
    verdict: str


def log_decisions(steps: Sequence[SessionStep], logits: Logits, judgements: Sequence[Judgement]) -> None:
    """Log the decision on each node of the judged steps. Arguments as for `explain`.

    A step must not fail because it cannot be explained. That is logged instead.
    """
    try:
        decisions = list(explain(steps, logits, judgements))
    except Exception as error:  # noqa: BLE001 - the step went well, and must not be repeated
        log.warning("explanation_failed", num_sessions=len(steps), **traced(error))
        return
    for decision in decisions:
        log.info(
            "node_judged",
            session=decision.session,
            position=decision.position,
            token=decision.token,
            target_prob=round(decision.target_prob, 6),
            draft_prob=round(decision.draft_prob, 6),
            verdict=decision.verdict,
        )


def explain(steps: Sequence[SessionStep], logits: Logits, judgements: Sequence[Judgement]) -> Iterator[Decision]:
    """Yield the decision on each node of the judged steps, in order. Logits and judgements as for `judge`."""
    placed = place(steps)
    if not placed:
        return
    with shaped(placed, on_host(logits)) as rows:
        probs = _target_probs(placed, rows)
    first = 0
    for judged, judgement in zip(placed, judgements, strict=True):
        tree, positions = judged.step.tree, judged.row_positions()
        verdicts, draft_probs = _verdicts(judged.step, judgement), _draft_probs(tree)
        for node, token in enumerate(tree.token_ids.tolist()):
            yield Decision(
                session=judged.step.session_id,
                position=positions[tree.parents[node] + 1],
                token=token,
                target_prob=probs[first + node],
                draft_prob=draft_probs[node],
                verdict=verdicts[node],
            )
        first += tree.num_nodes


def _target_probs(placed: Sequence[JudgedStep], logits: Logits) -> list[float]:
    """Return the target's probability of each node's token."""
    warmed = [judged._replace(step=_warmed(judged.step)) for judged in placed]
    packed, target = pack(warmed), target_rows(logits)
    token_ids = node_tokens(warmed)
    rows = packed.rows[packed.parent_rows]
    probs = np.zeros(len(rows))
    is_warm = rows["temperature"] > 0
    if is_warm.any():
        warm = np.arange(np.count_nonzero(is_warm))
        _, found = target.distributions(rows[is_warm])(warm, token_ids[is_warm, None])
        probs[is_warm] = found[:, 0]
    if not is_warm.all():
        probs[~is_warm] = target.own_tokens(rows[~is_warm])() == token_ids[~is_warm]
    found_probs: list[float] = probs.tolist()
    return found_probs


def _warmed(step: SessionStep) -> SessionStep:
    """Give a step the temperature that its strategy judges by."""
    temperature = strategy(step.params.strategy).judging_temperature(step.params)
    return replace(step, params=replace(step.params, temperature=temperature))


def _verdicts(step: SessionStep, judgement: Judgement) -> list[str]:
    tree, accepted = step.tree, set(judgement.path)
    verdicts = [NOT_REACHED] * tree.num_nodes
    rule = strategy(step.params.strategy)
    if not rule.uses_drafts:
        return verdicts
    is_point = np.ones(tree.num_nodes, np.bool_) if tree.distributions is None else tree.distributions.rows < 0
    for parent in (-1, *judgement.path):
        siblings = np.flatnonzero(tree.parents == parent)
        for node in siblings[np.argsort(is_point[siblings], kind="stable")].tolist():  # in order of judgement
            verdicts[node] = ACCEPTED if node in accepted else REJECTED
            if node in accepted and rule.stops_at_accepted:
                break
    return verdicts


def _draft_probs(tree: Tree) -> list[float]:
    """Return each node's probability in the distribution that it was drawn from."""
    probs = [1.0] * tree.num_nodes
    if tree.distributions is None:
        return probs
    for parent in sorted(set(tree.parents.tolist())):
        drawn: list[int] = []
        for node in np.flatnonzero(tree.parents == parent).tolist():
            if (row := int(tree.distributions.rows[node])) < 0:
                continue
            weights = dict(
                zip(tree.distributions.ids[row].tolist(), tree.distributions.weights[row].tolist(), strict=True)
            )
            left = sum(weight for token, weight in weights.items() if token not in drawn)
            token = int(tree.token_ids[node])
            probs[node] = weights[token] / left
            drawn.append(token)
    return probs
