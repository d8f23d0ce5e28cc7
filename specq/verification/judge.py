"""The judge: packed target logits of one forward pass in, one judgement a session out.

Rows are packed step after step: a step's row 0 follows its committed context, row i + 1 follows its node i; node i is
judged by row `parents[i] + 1`. Steps are grouped by strategy, so that strategies mix in one batch. Only token ids and
a few numbers a node travel to the host, never logits. `specq.verification.faults` is for callers that serve many sessions:
there, what cannot be judged spoils no other session's judgement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from specq.protocol import Judgement, SessionStep
from specq.verification import strategy
from specq.verification.devices import target_rows
from specq.verification.draws import HASHED
from specq.verification.interface import Draws
from specq.verification.logprobs import logprobs
from specq.verification.packing import JudgedStep, place
from specq.verification.processors import shaped


def judge(steps: Sequence[SessionStep], logits: torch.Tensor, draws: Draws = HASHED) -> list[Judgement]:
    """Judge all steps with `judged` set, in order; logits [sum of num_judged_rows, vocab] on any device.

    Raises ConfigError for an unknown strategy, EngineError where logits are not numbers.
    """
    placed = place(steps)
    if not placed:
        return []
    assert logits.shape[0] == placed[-1].first_row + placed[-1].step.num_judged_rows
    if logits.is_mps:  # has no float64, which the noise and the distributions need
        logits = logits.cpu()
    with shaped(placed, logits) as rows:
        judgements = judge_shaped(placed, rows, draws)
    return with_logprobs(placed, judgements, logits)


def judge_shaped(placed: Sequence[JudgedStep], rows: torch.Tensor, draws: Draws = HASHED) -> list[Judgement]:
    """Judge steps by logits that `shaped` has given; log-probabilities, which are of the plain ones, are left out."""
    target = target_rows(rows)
    groups: dict[str, list[int]] = {}
    for index, judged in enumerate(placed):
        groups.setdefault(judged.step.params.strategy, []).append(index)
    judgements: dict[int, Judgement] = {}
    for name, indices in groups.items():
        own = strategy(name).judge([placed[i] for i in indices], target, draws)
        judgements.update(zip(indices, own, strict=True))
    return [judgements[i] for i in range(len(placed))]


def with_logprobs(
    placed: Sequence[JudgedStep], judgements: Sequence[Judgement], logits: torch.Tensor
) -> list[Judgement]:
    """Return the judgements with log-probabilities where they were asked for; the logits are the plain ones."""
    return [
        judgement if judged.step.params.logprobs < 0 else _with_logprobs(judged, judgement, logits)
        for judged, judgement in zip(placed, judgements, strict=True)
    ]


def _with_logprobs(judged: JudgedStep, judgement: Judgement, logits: torch.Tensor) -> Judgement:
    of_tokens = [judged.first_row + node + 1 for node in (-1, *judgement.path)]
    rows = logits[torch.tensor(of_tokens, device=logits.device, dtype=torch.long)]
    return replace(judgement, logprobs=logprobs(rows, judgement.token_ids, judged.step.params.logprobs))
