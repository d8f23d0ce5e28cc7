"""Medusa heads rank what each of them says by plain arithmetic; recorded, with a stand-in that replays what it was
first given, or from CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from specq.drafting.medusa.arrays import HeadArrays
from specq.drafting.medusa.drafter import Medusa
from specq.drafting.medusa.host import HostMedusa
from specq.drafting.medusa.interface import HeadSource, HiddenRow
from specq.drafting.medusa.network import MedusaHeads
from specq.protocol import SamplingParams
from specq.verification.sampling import perturbed_scores
from tests.devices import NEEDS_CUDA
from tests.replaying import StandIn

HIDDEN, VOCAB, LIMIT, NUM_HEADS = 16, 60, 55, 3
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.8, seed=3)
CUT = replace(SAMPLED, top_k=4)


def heads_of(token_ids: list[int] | None, device: str) -> MedusaHeads:
    random = torch.Generator().manual_seed(1)
    num_columns = VOCAB if token_ids is None else len(token_ids)
    weights, biases, output = (
        torch.randn(*shape, generator=random).to(device)
        for shape in ((NUM_HEADS, HIDDEN, HIDDEN), (NUM_HEADS, 1, HIDDEN), (num_columns, HIDDEN))
    )
    return MedusaHeads([(weights, biases)], output, None if token_ids is None else np.array(token_ids, np.int32))


@pytest.mark.parametrize("way", ["of arrays", "as needed", "recorded", pytest.param("on a GPU", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("token_ids", [None, [2, 3, 5, 8, 13, 21, 34, 54]], ids=["all tokens", "some tokens"])
def test_tokens_are_those_of_plain_arithmetic(way: str, token_ids: list[int] | None) -> None:
    """Of batches of several sizes, sampled and not, in turns: nothing of the batch before is left."""
    heads = heads_of(token_ids, "cuda" if way == "on a GPU" else "cpu")
    medusa: HeadSource
    if way == "of arrays":
        blocks = [(weights.numpy(), biases.numpy()) for weights, biases in heads.blocks]
        medusa = HostMedusa(HeadArrays(blocks, heads.output.numpy(), heads.token_ids), LIMIT)
    else:
        medusa = Medusa(heads, LIMIT, StandIn() if way == "recorded" else None)
        medusa.warm_up(2)
    rng = np.random.default_rng(2)
    for count, params in (
        (5, [GREEDY, SAMPLED, replace(SAMPLED, seed=9)]),
        (3, [SAMPLED]),
        (6, [SAMPLED, GREEDY, GREEDY, replace(SAMPLED, strategy="probabilistic")]),
        (5, [SAMPLED, CUT, GREEDY]),
        (4, [GREEDY] * 3),
    ):
        values = torch.from_numpy(rng.normal(0, 1, (7, HIDDEN)).astype(np.float32))
        rows, lengths = rng.integers(0, 7, len(params)).tolist(), rng.integers(1, 90, len(params)).tolist()
        states = [HiddenRow(values.to(heads.output.device), row) for row in rows]
        ranked = medusa.start(states, params, lengths, count).collect()
        assert ranked.token_ids.shape == (len(params), NUM_HEADS, count)
        for i, (own, row, length) in enumerate(zip(params, rows, lengths, strict=True)):
            for head in range(NUM_HEADS):
                tokens, scores = plainly(heads, values[row], head, own, length + head, count)
                there = np.isfinite(scores)
                assert ranked.token_ids[i, head][there].tolist() == tokens[there].tolist()
                np.testing.assert_allclose(ranked.scores[i, head], scores, atol=1e-3)


def plainly(
    heads: MedusaHeads, state: torch.Tensor, head: int, params: SamplingParams, position: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the best tokens of one head behind one state, and their log-probabilities."""
    ((weights, biases),) = heads.blocks
    hidden = state + silu(weights[head].cpu() @ state + biases[head, 0].cpu())
    logits = (heads.output.cpu() @ hidden)[None, : LIMIT if heads.token_ids is None else None]
    if params.strategy == "probabilistic":
        params = GREEDY
    found = perturbed_scores(logits, [params], [position], heads.token_ids)[0].log_softmax(0)
    best, columns = found.sort(descending=True, stable=True)
    names = np.arange(VOCAB) if heads.token_ids is None else heads.token_ids
    return names[columns[:count].numpy()], best[:count].numpy()
