"""Log-probabilities of prompt rows: the torch engine's against transformers', in chunks and beside other sessions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specq.engines.torch.engine import TorchEngine
from specq.protocol.errors import EngineError
from specq.protocol.params import SamplingParams
from specq.protocol.types import NO_TREE, ScoredRows, ScratchRows, SessionStep, Tree
from specq.testing.checkpoints import load_reference, make_checkpoint
from specq.testing.toy import ToyEngine
from tests.devices import NEEDS_CUDA

GREEDY = SamplingParams()
NUM_TOP = 3


KINDS = [
    ("qwen2", False, "cpu"),
    ("llama", True, "cpu"),
    ("opt", False, "cpu"),
    pytest.param(("qwen2", False, "cuda"), marks=NEEDS_CUDA),
    pytest.param(("llama", True, "cuda"), marks=NEEDS_CUDA),
]


@pytest.fixture(params=KINDS, scope="module")
def place(request, tmp_path_factory) -> tuple[Path, bool, str]:
    kind, eager, device = request.param
    return make_checkpoint(kind, tmp_path_factory.mktemp(f"scored-{kind}")), eager, device


def scored(token_ids: np.ndarray, start: int, end: int, num_top: int = NUM_TOP) -> ScoredRows:
    return ScoredRows(token_ids[start + 1 : end + 1], num_top)


def test_rows_have_the_references_log_probabilities(place) -> None:
    path, eager, device = place
    engine = TorchEngine(str(path), device=device, dtype="float32", kv_slots=256, eager=eager)
    rng = np.random.default_rng(3)
    prompt, other = (rng.integers(engine.info.vocab_size, size=n, dtype=np.int32) for n in (21, 9))
    nodes = Tree(other[:3], np.array([-1, 0, -1], np.int32), np.zeros(3, np.float32))
    scratch = ScratchRows(other[:2], np.array([-1, 3], np.int32), np.array([9, 10], np.int32))
    plain = SessionStep(2, 0, other, GREEDY, nodes, scratch=scratch)
    assert [engine.open(1, prompt), engine.open(2, other), engine.open(3, prompt, "alone")] == [0, 0, 0]
    found = []
    for start, end in ((0, 5), (5, 6), (6, 21)):
        step = SessionStep(1, start, prompt[start:end], GREEDY, NO_TREE, end == 21, scored=scored(prompt, start, end))
        steps = [plain, step] if not start else [step]
        output = engine.step(steps)
        found.append(output.scored[len(steps) - 1])
        if not start:
            (beside,), rows = output.judgements, output.scratch_logits
    (ended,) = output.judgements
    with torch.inference_mode():
        logits = load_reference(path)(torch.tensor(prompt[None])).logits[0, :-1].float()
    own = logits.log_softmax(-1)
    top = own.topk(NUM_TOP)
    expected = own.gather(1, torch.tensor(prompt[1:, None]).long())[:, 0]
    np.testing.assert_allclose(np.concatenate([one.tokens for one in found]), expected, atol=1e-4)
    np.testing.assert_allclose(np.concatenate([one.top for one in found]), top.values, atol=1e-4)
    assert np.array_equal(np.concatenate([one.top_ids for one in found]), top.indices)
    # Nothing else changes: the same steps without scored rows.
    again = engine.step([SessionStep(3, 0, prompt, GREEDY)])
    assert again.scored == {}
    assert again.judgements[0].token_ids.tolist() == ended.token_ids.tolist()
    engine.close(2)
    start = engine.open(2, other)
    alone = engine.step([replace(plain, start=start, token_ids=other[start:])])
    assert alone.judgements[0].token_ids.tolist() == beside.token_ids.tolist()
    torch.testing.assert_close(alone.scratch_logits.of(0), rows.of(0), atol=1e-4, rtol=1e-4)
    engine.shutdown()


def test_an_engine_without_scores_refuses_them() -> None:
    engine = ToyEngine()
    engine.scores_rows = False
    engine.open(1, np.arange(3, dtype=np.int32))
    step = SessionStep(1, 0, np.arange(3, dtype=np.int32), GREEDY, scored=scored(np.arange(3, dtype=np.int32), 0, 3))
    with pytest.raises(EngineError, match="prompt_logprobs is not supported by the toy engine"):
        engine.step([step])
