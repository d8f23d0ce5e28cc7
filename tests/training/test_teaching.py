"""What is learned from a target is the loss that `distil` says, and its gradient; and rows that only fill up teach
nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specq.training.distil import RolloutBatch, token_losses
from specq.training.teaching import mean_loss, teach
from tests.each import each

COLUMNS, HIDDEN = 50, 16


def batch(counted):
    counted = np.array(counted, np.float32)
    return RolloutBatch(torch.zeros(counted.shape, dtype=torch.long), torch.from_numpy(counted), counted)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@each("hard_weight", [0.0, 0.5, 1.0])
def test_the_loss_and_its_gradient_are_those_of_each_place(hard_weight):
    own = batch([[0, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 0]])
    hidden, output = random(2, 6, HIDDEN), random(COLUMNS, HIDDEN, seed=1)
    taught = teach(hidden, output, own, hard_weight)
    states, matrix = random(2, 6, HIDDEN, seed=2).requires_grad_(), random(COLUMNS, HIDDEN, seed=3).requires_grad_()
    said = states.flatten(0, 1).index_select(0, taught.places)
    loss = mean_loss(said, matrix, taught.wanted, taught.floor, taught.counted)

    where = own.counted > 0
    expected = token_losses(states[where] @ matrix.T, hidden[where] @ output.T, hard_weight).mean()

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(2 * loss, (states, matrix)),
        torch.autograd.grad(2 * expected, (states, matrix)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_in_bfloat16_it_is_nearly_the_same():
    own = batch([[1] * 40])
    hidden, output = random(1, 40, HIDDEN), random(COLUMNS, HIDDEN, seed=1)
    states, matrix = random(40, HIDDEN, seed=2).requires_grad_(), random(COLUMNS, HIDDEN, seed=3).requires_grad_()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        taught = teach(hidden.to(dtype), output.to(dtype), own, 0.5)
        loss = mean_loss(states, matrix, taught.wanted[:40], taught.floor[:40], taught.counted[:40])
        results.append((loss, *torch.autograd.grad(loss, (states, matrix))))
    for exact, rounded in zip(*results, strict=True):
        torch.testing.assert_close(rounded, exact, atol=0.02 * exact.abs().max().item(), rtol=0)


def test_a_fully_masked_batch_changes_no_weights():
    own = batch([[0] * 8])
    taught = teach(random(1, 8, HIDDEN), random(COLUMNS, HIDDEN), own, 0.5)
    states = random(len(taught.places), HIDDEN).requires_grad_()
    loss = mean_loss(states, random(COLUMNS, HIDDEN), taught.wanted, taught.floor, taught.counted)
    (gradient,) = torch.autograd.grad(loss, states)
    assert loss.item() == 0
    assert not gradient.any()
