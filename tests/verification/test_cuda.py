"""On a GPU: the same noise, bit for bit, the same tokens and distributions, and the same judgements as on a CPU."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import SessionStep
from specq.testing.random_steps import packed_logits, params_of, sampled_trees, steps
from specq.verification import STRATEGIES, noise, torch_noise
from specq.verification.begun import begin
from specq.verification.cuda_rows import CudaRows, is_available
from specq.verification.host_kernels import make_rows
from specq.verification.judge import judge
from specq.verification.noise import Domain, row_keys
from specq.verification.packing import place
from specq.verification.processors import shaped
from specq.verification.target_rows import Edits
from specq.verification.torch_rows import TorchRows
from specq.verifier.sessions.history import Past
from tests.devices import NEEDS_CUDA
from tests.each import each
from tests.verification.workload import chains

pytestmark = NEEDS_CUDA

SAMPLERS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 400, "top_p": 0.99},
    {"temperature": 1.0, "min_p": 0.02},
]


def test_noise_has_the_same_bits():
    keys = row_keys(range(40), range(100, 140), Domain.GUMBEL)
    token_ids = np.arange(151_936, dtype=np.int32)
    by_numpy = noise.gumbel(keys, token_ids)
    on_gpu = torch_noise.gumbel_torch(torch.from_numpy(keys).cuda(), torch.from_numpy(token_ids).cuda()).cpu().numpy()
    assert (by_numpy.view(np.int32) != on_gpu.view(np.int32)).sum() <= 1  # a last bit of a logarithm, once in 2**28


@each(("strategy", "sampler", "vocab"), product(STRATEGIES, SAMPLERS, [4096, 151_936]))
def test_judgements_are_those_of_the_cpu(strategy, sampler, vocab):
    torch.manual_seed(1)
    logits = torch.randn(5 * 9, vocab) * 3
    drafted = chains(5, 8, logits, SamplingParams(strategy=strategy, **sampler), np.random.default_rng(2))
    drafted.append(SessionStep(9, 0, np.zeros(3, np.int32), SamplingParams(), judged=False))
    outcomes = [[(j.path, j.token_ids.tolist()) for j in judge(drafted, at)] for at in (logits, logits.cuda())]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == [(j.path, j.token_ids.tolist()) for j in begin(drafted, logits.cuda()).finish()]
    assert strategy != "deterministic" or any(path for path, _ in outcomes[0])


@settings(max_examples=100, deadline=None)
@given(st.lists(steps(params=params_of(list(STRATEGIES)), tree=sampled_trees()), max_size=6), st.integers(0, 2**32))
def test_trees_are_judged_as_on_the_cpu(batch, entropy):
    """Of all strategies beside each other, with draft distributions and without."""
    logits = packed_logits(batch, entropy)
    outcomes = [[(j.path, j.token_ids.tolist()) for j in judge(batch, at)] for at in (logits, logits.cuda())]
    assert outcomes[0] == outcomes[1]


@each("dtype", [torch.float32, torch.bfloat16])
def test_penalties_shape_logits_as_on_the_cpu_and_leave_them_as_they_were(dtype):
    """Operation by operation in float32: to the bit."""
    torch.manual_seed(3)
    rng = np.random.default_rng(4)
    logits = (torch.randn(3 * 9, 50_000) * 3).to(dtype)
    params = SamplingParams(
        repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.7, bad_token_ids=((3,), (5, 6)),
        logit_bias=((9, 1.5),), min_tokens=200, max_tokens=300,
    )  # fmt: skip
    drafted = [
        replace(step, history=Past(params, 40, (0,)).history(rng.integers(0, 500, 100).tolist()))
        for step in chains(3, 8, logits, params, rng)
    ]
    on_gpu = logits.cuda()
    with shaped(place(drafted), logits) as expected, shaped(place(drafted), on_gpu) as found:
        assert torch.equal(expected, found.cpu())
    assert torch.equal(on_gpu.cpu(), logits)


@pytest.mark.parametrize("way", [TorchRows, CudaRows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 8.0])
def test_mixed_rows_get_the_tokens_and_distributions_of_the_cpu(way, dtype, spread):
    """0.1: so flat that top-p keeps most of the vocabulary, and what is likely does not fit where it is gathered."""
    if way is CudaRows and not is_available():
        pytest.skip("no Triton")
    torch.manual_seed(2)
    logits = (torch.randn(len(SAMPLERS) * 4, 50_000) * spread).to(dtype)
    params = [SamplingParams(seed=3 * i, **SAMPLERS[i % len(SAMPLERS)]) for i in range(len(logits))]
    rows = make_rows(params, range(100, 100 + len(params)))
    on_cpu, on_gpu = TorchRows(logits), way(logits.cuda())
    assert np.array_equal(on_cpu.own_tokens(rows)(), on_gpu.own_tokens(rows)())
    warm = rows[rows["temperature"] > 0]
    tokens = np.array([[row.argmax().item(), 7, -1] for row in logits[warm["logit_row"]]])
    of_cpu, of_gpu = (rows.distributions(warm)(np.arange(len(warm)), tokens) for rows in (on_cpu, on_gpu))
    assert np.array_equal(of_cpu[0].found[:, :2], of_gpu[0].found[:, :2])
    assert of_gpu[1] == pytest.approx(of_cpu[1], rel=1e-5)
    assert of_gpu[0].entropies() == pytest.approx(of_cpu[0].entropies(), rel=1e-5)


@each(("vocab", "num_rows"), product([1000, 50_001, 151_936], [1, 70]))
def test_draws_from_edited_distributions_are_those_of_the_cpu(vocab, num_rows):
    """One row, and many; tokens of which nothing is left, and others of which more is; the extremes of uniform
    numbers."""
    rng = np.random.default_rng(vocab + num_rows)
    logits = torch.from_numpy(rng.normal(0, 3, (num_rows, vocab)).astype("f4"))
    logits[:, 5::11] = -torch.inf
    params = [SamplingParams(seed=i, **SAMPLERS[1 + i % (len(SAMPLERS) - 1)]) for i in range(num_rows)]
    rows, which = make_rows(params, range(num_rows)), np.arange(num_rows)[::-1].copy()
    on_gpu = CudaRows(logits.cuda())
    tokens = rng.integers(-1, vocab, (num_rows, 33))
    (found, probs), (_, expected) = (way.distributions(rows)(which, tokens) for way in (on_gpu, TorchRows(logits)))
    assert probs == pytest.approx(expected, rel=1e-5)
    likeliest = logits.topk(40, dim=1).indices.numpy()[which]
    edits = Edits(np.arange(num_rows).repeat(40), likeliest.ravel(), rng.choice([0.0, 0.01, 0.2], num_rows * 40))
    for uniform in (2.0**-33, 0.21374, 0.48613, 0.90717, 1 - 2.0**-33):
        uniforms = np.full(num_rows, uniform)
        drawn = on_gpu.draw(found, which, edits, uniforms).tolist()
        assert drawn == TorchRows(logits).draw(found, which, edits, uniforms).tolist()
    others = np.arange(vocab - 1)  # only the last token is left
    edits = Edits(np.zeros_like(others), others, np.zeros(len(others)))
    found.found[which[0], 1] = -np.inf
    logits[which[0], -1] = 0.0
    assert CudaRows(logits.cuda()).draw(found, which[:1], edits, np.array([0.3])).tolist() == [vocab - 1]


@each("vocab", [1000, 151_936])
def test_own_tokens_beside_distributions_are_those_of_the_cpu(vocab):
    torch.manual_seed(5)
    logits = torch.randn(30, vocab) * 3
    params = [SamplingParams(seed=i, **SAMPLERS[1 + i % (len(SAMPLERS) - 1)]) for i in range(len(logits))]
    rows, which = make_rows(params, range(len(logits))), np.array([29, 3, 3, 17])
    target = CudaRows(logits.cuda())
    look_up = target.distributions(rows)
    own = target.own_tokens_among(rows)
    _, probs = look_up(which, which[:, None])
    _, expected = TorchRows(logits).distributions(rows)(which, which[:, None])
    assert probs == pytest.approx(expected, rel=1e-5)
    assert own(which).tolist() == TorchRows(logits).own_tokens(rows)()[which].tolist()


@each(("sampler", "bad"), product(SAMPLERS, [torch.nan, torch.inf]))
def test_logits_that_are_no_numbers_raise(sampler, bad):
    logits = torch.zeros(2, 20_000, device="cuda")
    logits[1, 12_345] = bad
    step = SessionStep(1, 5, np.array([3], np.int32), SamplingParams(**sampler))
    with pytest.raises(EngineError, match="not finite numbers"):
        judge([step, replace(step, session_id=2)], logits)
