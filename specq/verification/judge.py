"""The judge: packed target logits of one forward pass in, one judgement a session out.

Rows are packed step after step: a step's row 0 follows its committed context, row i + 1 follows its node i; node i is
judged by row `parents[i] + 1`. Steps are grouped by strategy, so that strategies mix in one batch. Only token ids and a
few numbers a node travel to the host, never logits. `specq.verification.faults` is for callers that serve many
sessions: there, what cannot be judged spoils no other session's judgement.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specq.protocol import EngineError, Judgement, Logprobs, SessionStep
from specq.verification import strategy
from specq.verification.devices import target_rows
from specq.verification.draws import HASHED
from specq.verification.interface import Draws
from specq.verification.judgements import Judgements
from specq.verification.logprobs import logprobs
from specq.verification.packing import JudgedStep, Placed, place
from specq.verification.processors import shaped
from specq.verification.step_batch import WITH_LOGPROBS


def judge(steps: Sequence[SessionStep], logits: torch.Tensor, draws: Draws = HASHED) -> Judgements:
    """Judge all steps with `judged` set, in order; logits [sum of num_judged_rows, vocab] on any device.

    Raises ConfigError for an unknown strategy, EngineError where logits are not numbers.
    """
    placed = place(steps)
    if not placed:
        return Judgements.of([])
    assert logits.shape[0] == placed.num_rows
    if logits.is_mps:  # has no float64, which the noise and the distributions need
        logits = logits.cpu()
    if not np.count_nonzero(placed.batch.traits):
        return judge_shaped(placed, logits, draws)
    with shaped(placed, logits) as rows:
        judgements = judge_shaped(placed, rows, draws)
    return with_logprobs(placed, judgements, logits)


def judge_shaped(placed: Placed, rows: torch.Tensor, draws: Draws = HASHED) -> Judgements:
    """Judge steps by logits that `shaped` has given; log-probabilities, which are of the plain ones, are left out."""
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


def with_logprobs(placed: Placed, judgements: Judgements, logits: torch.Tensor) -> Judgements:
    """Return the judgements with log-probabilities where they were asked for; the logits are the plain ones."""
    asking = (placed.batch.traits & WITH_LOGPROBS).nonzero()[0].tolist()
    found = {i: _logprobs(placed[i], judgements[i], logits) for i in asking}
    return judgements.with_logprobs(found) if found else judgements


def _logprobs(judged: JudgedStep, judgement: Judgement, logits: torch.Tensor) -> Logprobs:
    of_tokens = [judged.first_row + node + 1 for node in (-1, *judgement.path)]
    rows = logits[torch.tensor(of_tokens, device=logits.device, dtype=torch.long)]
    return logprobs(rows, judgement.token_ids, judged.step.params.logprobs)
