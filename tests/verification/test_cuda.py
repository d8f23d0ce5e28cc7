"""On a GPU: the same noise, bit for bit, and the same judgements."""

import numpy as np
import pytest
import torch

from specq.params import SamplingParams
from specq.types import SessionStep
from specq.verification import STRATEGIES, noise
from specq.verification.judge import judge
from tests.verification.cost import chains

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_noise_has_the_same_bits():
    keys = noise.row_keys(range(40), range(100, 140), noise.Domain.GUMBEL)
    token_ids = np.arange(151_936, dtype=np.int32)
    by_numpy = noise.gumbel(keys, token_ids)
    on_gpu = noise.gumbel_torch(torch.from_numpy(keys).cuda(), torch.from_numpy(token_ids).cuda()).cpu().numpy()
    assert (by_numpy.view(np.int32) != on_gpu.view(np.int32)).sum() <= 1  # a last bit of a logarithm, once in 2**28


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "sampler",
    [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.5, "top_k": 400, "top_p": 0.99},
     {"temperature": 1.0, "min_p": 0.02}],
)  # fmt: skip
@pytest.mark.parametrize("vocab", [4096, 151_936])
def test_judgements_are_those_of_the_cpu(strategy, sampler, vocab):
    torch.manual_seed(1)
    logits = torch.randn(5 * 9, vocab) * 3
    steps = chains(5, 8, logits, SamplingParams(strategy=strategy, **sampler), np.random.default_rng(2))
    steps.append(SessionStep(9, 0, np.zeros(3, np.int32), SamplingParams(), judged=False))
    outcomes = [[(j.path, j.token_ids.tolist()) for j in judge(steps, at)] for at in (logits, logits.cuda())]
    assert outcomes[0] == outcomes[1]
    assert strategy != "deterministic" or any(path for path, _ in outcomes[0])
