"""Judging for those who serve many sessions: what one of them asks for, or what its logits are, spoils no other's
judgement.

As long as nothing is wrong this is `judge`, with nothing looked at twice. Where that raises, the logits are judged
again in halves, down to the session at fault, which gets a judgement with a `Fault`. A row without a token (its logits
are not numbers, or all are banned) is a fault only where the accepted path leads to it: below a rejected node it is
what plain decoding never sees, and a draft must not fail a session.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import structlog
import torch

from specq.protocol import NO_TOKENS, EngineError, EngineLostError, Fault, Judgement, SessionStep
from specq.runtime import traced
from specq.verification.devices import check_alive
from specq.verification.draws import HASHED
from specq.verification.interface import Draws
from specq.verification.judge import judge, judge_shaped, with_logprobs
from specq.verification.judgements import Judgements
from specq.verification.packing import JudgedStep, place
from specq.verification.processors import shaped
from specq.verification.step_batch import StepBatch

log = structlog.get_logger(__name__)


def judge_each(steps: Sequence[SessionStep], logits: torch.Tensor, draws: Draws = HASHED) -> Judgements:
    """Judge as `judge` does, to which arguments and order belong; a step that cannot be judged has a `fault`.

    Raises EngineLostError where the device is in error, which is nobody's fault.
    """
    judged = StepBatch.of(steps).judged()
    try:
        return judge(judged, logits, draws)
    except EngineLostError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is: the session at fault is found, and said to be
        check_alive(logits.device)
        if len(judged) == 1:
            return Judgements.of([_judge_alone(judged[0], logits, draws, error)])
    middle = len(judged) // 2
    first, second = judged[:middle], judged[middle:]
    num_rows = middle + int(first.num_nodes.sum())
    parts = judge_each(first, logits[:num_rows], draws), judge_each(second, logits[num_rows:], draws)
    return Judgements.of([judgement for part in parts for judgement in part])


def _judge_alone(step: SessionStep, logits: torch.Tensor, draws: Draws, error: Exception) -> Judgement:
    """Judge a step for which `judge` raised this error, with its rows without a token left out; or say what is
    wrong."""
    logits = logits.cpu() if logits.is_mps else logits  # as in `judge`
    try:
        placed = place([step])
        with shaped(placed, logits) as rows:
            highest = rows.amax(-1)  # a NaN is the largest of all
            is_bad = ~highest.isfinite()
            found = judge_shaped(placed, rows.masked_fill(is_bad[:, None], 0), draws)
        (judgement,) = with_logprobs(placed, found, logits)
    except Exception as again:  # noqa: BLE001 - see above
        check_alive(logits.device)
        return _faulty(step, _fault_of(again), again)
    reached = np.array([0, *(node + 1 for node in judgement.path)])
    bad = reached[is_bad.cpu().numpy()[reached]]
    if not len(bad):
        return judgement
    row = int(bad[0])
    return _faulty(step, _fault_of_row(placed[0], logits, row, float(highest[row])), error)


def _fault_of(error: Exception) -> Fault:
    if isinstance(error, EngineError):
        return Fault(str(error))
    return Fault(f"the session cannot be judged: {type(error).__name__}: {error}")


def _fault_of_row(judged: JudgedStep, logits: torch.Tensor, row: int, highest: float) -> Fault:
    """Return what is wrong with a row of a step, given its plain logits and the highest of its shaped ones."""
    position = judged.row_positions()[row]
    if not bool(logits[row].amax().isfinite()):
        return Fault(f"the target's logits are not finite numbers at position {position}", retry=True)
    if highest == -torch.inf:
        causes = "bad_token_ids, min_tokens and logit_bias"
        return Fault(f"every token is banned at position {position}: {causes} leave none")
    causes = "repetition_penalty, presence_penalty, frequency_penalty and logit_bias"
    return Fault(f"the logits overflow at position {position}: {causes} are too extreme together")


def _faulty(step: SessionStep, fault: Fault, error: Exception) -> Judgement:
    log.error("session_not_judged", session=step.session_id, **traced(error))
    return Judgement(step.session_id, (), NO_TOKENS, fault=fault)
