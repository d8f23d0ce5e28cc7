"""The judge: packed target logits of one forward pass in, one judgement per session out.

Rows are packed step after step. A step's row 0 follows its committed context, and row i + 1 follows its node i. Node i
is judged by row `parents[i] + 1`. Steps are grouped by strategy, so strategies can mix in one batch. Only token ids and
a few numbers per node travel to the host, never logits.

`judge_each` is for callers that serve many sessions. A request or logits that cannot be judged must not spoil other
sessions' judgements. Without errors it is the same as `judge`, at no extra cost. If that raises, the logits are judged
again in halves, down to the session at fault. This session gets a judgement with a `Fault`. A row has no token if its
logits are not numbers, or all are banned. That is a fault only if the accepted path leads to it. Plain decoding never
sees a row below a rejected node, and a draft must not fail a session.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import structlog

from specq.protocol import NO_TOKENS, EngineError, EngineLostError, Fault, Judgement, Logprobs, SessionStep
from specq.runtime import traced
from specq.verification import strategy
from specq.verification.devices import check_alive, device_of, target_rows
from specq.verification.drafting import HASHED
from specq.verification.host_logits import Logits, on_host, without_bad_rows
from specq.verification.interface import Draws
from specq.verification.judgements import Judgements
from specq.verification.logprobs import logprobs
from specq.verification.masking import mask
from specq.verification.packing import JudgedStep, Placed, place
from specq.verification.processors import shaped
from specq.verification.step_batch import WITH_LOGPROBS, StepBatch


def judge(steps: Sequence[SessionStep], logits: Logits, draws: Draws = HASHED) -> Judgements:
    """Judge all steps with `judged` set, in order. Logits [sum of num_judged_rows, vocab]: an array, or a tensor.

    Raises ConfigError for an unknown strategy, and EngineError if logits are not numbers.
    """
    placed = place(steps)
    if not placed:
        return Judgements.of([])
    assert logits.shape[0] == placed.num_rows
    logits = on_host(logits)
    mask(placed, logits)
    if not np.count_nonzero(placed.batch.traits):
        return judge_shaped(placed, logits, draws)
    with shaped(placed, logits) as rows:
        judgements = judge_shaped(placed, rows, draws)
    return with_logprobs(placed, judgements, logits)


def judge_shaped(placed: Placed, rows: Logits, draws: Draws = HASHED) -> Judgements:
    """Judge steps by shaped logits (`shaped`), without log-probabilities. These come from the plain logits."""
    target, names = target_rows(rows), [params.strategy for params in placed.batch.params]
    if len(set(names)) == 1:
        found = Judgements.of(strategy(names[0]).judge(placed, target, draws))
        if len(found) != len(placed):
            raise EngineError(f"strategy {names[0]} judged {len(found)} steps of {len(placed)}")
        return found
    judgements: dict[int, Judgement] = {}
    for name in dict.fromkeys(names):
        places = np.flatnonzero([own == name for own in names])
        own = strategy(name).judge(placed.take(places), target, draws)
        judgements.update(zip(places.tolist(), own, strict=True))
    return Judgements.of([judgements[i] for i in range(len(placed))])


def with_logprobs(placed: Placed, judgements: Judgements, logits: Logits) -> Judgements:
    """Return the judgements with the requested log-probabilities. The logits are the plain ones."""
    asking = (placed.batch.traits & WITH_LOGPROBS).nonzero()[0].tolist()
    found = {i: _logprobs(placed[i], judgements[i], logits) for i in asking}
    return judgements.with_logprobs(found) if found else judgements


def _logprobs(judged: JudgedStep, judgement: Judgement, logits: Logits) -> Logprobs:
    of_tokens = [judged.first_row + node + 1 for node in (-1, *judgement.path)]
    return logprobs(logits[of_tokens], judgement.token_ids, judged.step.params.logprobs)


log = structlog.get_logger(__name__)


def judge_each(steps: Sequence[SessionStep], logits: Logits, draws: Draws = HASHED) -> Judgements:
    """Judge as `judge` does, with the same arguments and order. A step that cannot be judged has a `fault`.

    Raises EngineLostError if the device has an error, which does not come from a session.
    """
    judged, logits = StepBatch.of(steps).judged(), on_host(logits)
    try:
        return judge(judged, logits, draws)
    except EngineLostError:
        raise
    except Exception as error:  # noqa: BLE001 - any error: the session at fault is found and reported
        check_alive(device_of(logits))
        if len(judged) == 1:
            return Judgements.of([_judge_alone(judged, logits, draws, error)])
    middle = len(judged) // 2
    first, second = judged[:middle], judged[middle:]
    num_rows = middle + int(first.num_nodes.sum())
    parts = judge_each(first, logits[:num_rows], draws), judge_each(second, logits[num_rows:], draws)
    return Judgements.of([judgement for part in parts for judgement in part])


def _judge_alone(judged: StepBatch, logits: Logits, draws: Draws, error: Exception) -> Judgement:
    """Judge the one step for which `judge` raised this error, without its invalid rows. Or return what is wrong."""
    step = judged[0]
    try:
        placed = place(judged)
        mask(placed, logits)
        with shaped(placed, logits) as rows:
            highest, is_bad, valid = without_bad_rows(rows)
            found = judge_shaped(placed, valid, draws)
        (judgement,) = with_logprobs(placed, found, logits)
    except Exception as again:  # noqa: BLE001 - see above
        check_alive(device_of(logits))
        return _faulty(step, _fault_of(again), again)
    reached = np.array([0, *(node + 1 for node in judgement.path)])
    bad = reached[is_bad[reached]]
    if not len(bad):
        return judgement
    row = int(bad[0])
    fault = _fault_of_mask(placed, row) or _fault_of_row(placed, logits, row, float(highest[row]))
    return _faulty(step, fault, error)


def _fault_of(error: Exception) -> Fault:
    if isinstance(error, EngineError):
        return Fault(str(error))
    return Fault(f"the session cannot be judged: {type(error).__name__}: {error}")


def _fault_of_mask(steps: Placed, row: int) -> Fault | None:
    """Return why the grammar of one step allows no token in a row. None: it allows some, or there is none."""
    masks, (session_id,) = steps.batch.masks, steps.batch.session_ids
    if masks is None:
        return None
    words = masks.of(steps.batch).words
    if not len(words) or words[row].any():
        return None
    reason = masks.reason(session_id) or "the grammar allows no token there, and no end"
    return Fault(f"{reason}; position {steps[0].row_positions()[row]}")


def _fault_of_row(steps: Placed, logits: Logits, row: int, highest: float) -> Fault:
    """Return what is wrong with a row of one step, given its masked logits and the highest of its shaped ones."""
    position, masks = steps[0].row_positions()[row], steps.batch.masks
    if not math.isfinite(float(logits[row].max())):
        return Fault(f"the target's logits are not finite numbers at position {position}", retry=True)
    if highest == -math.inf:
        causes = "allowed_token_ids, bad_token_ids, min_tokens and logit_bias"
        if masks is not None and len(masks.of(steps.batch).places):
            return Fault(f"the grammar allows only tokens at position {position} that {causes} ban")
        return Fault(f"every token is banned at position {position}: {causes} leave none")
    causes = "repetition_penalty, presence_penalty, frequency_penalty and logit_bias"
    return Fault(f"the logits overflow at position {position}: {causes} are too extreme together")


def _faulty(step: SessionStep, fault: Fault, error: Exception) -> Judgement:
    log.error("session_judging_failed", session=step.session_id, **traced(error))
    return Judgement(step.session_id, (), NO_TOKENS, fault=fault)
