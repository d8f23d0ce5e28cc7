"""The Triton kernels without a GPU: `TRITON_INTERPRET=1 pytest tests/verification/test_triton.py` where Triton is installed."""

import os

import numpy as np
import pytest
import torch

from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.verification import cuda_rows
from specq.verification.cuda_rows import CudaRows
from specq.verification.row_params import make_rows
from specq.verification.torch_rows import TorchRows

pytestmark = [
    pytest.mark.skipif(
        not cuda_rows.is_available() or os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter"
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # it computes with the masked elements, too
]

SAMPLERS = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 3, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.05},
    {"temperature": 1.0, "min_p": 0.1},
]


@pytest.mark.parametrize("vocab", [5, 70, 300])
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("room", [8, 64])
def test_rows_get_the_tokens_and_distributions_of_torch(vocab, spread, room, monkeypatch):
    """With little room for what is likely, whole rows are looked at instead."""
    for name, value in {"BLOCK": 16, "WIDE_BLOCK": 32, "ROOM": room, "PROGRAMS": 16}.items():
        monkeypatch.setattr(cuda_rows, name, value)
    logits = torch.from_numpy(np.random.default_rng(vocab).normal(0, spread, (len(SAMPLERS), vocab)).astype("f4"))
    logits = logits.round() if spread == 2.0 else logits
    rows = make_rows([SamplingParams(seed=i, **sampler) for i, sampler in enumerate(SAMPLERS)], range(len(SAMPLERS)))
    by_torch, by_triton = TorchRows(logits), CudaRows(logits)
    assert by_torch.own_tokens(rows)().tolist() == by_triton.own_tokens(rows)().tolist()
    warm, tokens = rows[1:], np.array([[0, vocab - 1, -1]] * (len(rows) - 1))
    (expected, probs), (distributions, found) = (
        way.distributions(warm)(np.arange(len(warm)), tokens) for way in (by_torch, by_triton)
    )
    assert np.array_equal(expected.found[:, :2], distributions.found[:, :2])
    assert found == pytest.approx(probs, rel=1e-6)
    assert distributions.entropies() == pytest.approx(expected.entropies(), rel=1e-5)


def test_what_has_no_largest_logit_is_refused():
    for bad in (torch.nan, torch.inf, -torch.inf):
        logits = torch.full((2, 40), bad if bad == -torch.inf else 0.0)
        logits[1, 7] = bad
        rows = make_rows([SamplingParams(temperature=t, top_p=0.9) for t in (0.0, 1.0)], [0, 0])
        for which in (rows[:1], rows[1:]):
            which["logit_row"] = 1
            with pytest.raises(EngineError, match="not finite"):
                CudaRows(logits).own_tokens(which)()
