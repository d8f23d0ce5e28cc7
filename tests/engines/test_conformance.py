"""Every engine of the table, in each of its ways, does what an engine must do."""

from __future__ import annotations

import numpy as np
import pytest

from specq.engines import ENGINES, Engine
from specq.protocol import SamplingParams
from specq.testing import EngineConformance, ReferenceConformance, load_reference, make_checkpoint
from specq.testing.checkpoints import reference_logits
from specq.testing.conformance.engines import generate
from specq.testing.reference import plain
from tests.devices import NEEDS_CUDA, NEEDS_VLLM, vllm_arguments

VARIANTS = {
    "torch on cuda": ("torch", {"device": "cuda", "dtype": "float32"}),  # in bf16 near-ties may fall either way there
}
MARKS = {"vllm": NEEDS_VLLM, "torch on cuda": NEEDS_CUDA}


NAMES = sorted({*ENGINES, *VARIANTS} - {"auto"})  # that is one of the others


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES])
def engine(request, tmp_path):
    """Each of the table on the CPU, what runs on CUDA there too; vllm on what it was built for."""
    name, options = VARIANTS.get(request.param, (request.param, {"device": "cpu"}))
    if name == "vllm":
        kind = request.getfixturevalue("vllm_device")
        options = options | {"device": kind} | vllm_arguments(kind)
    if name == "native":
        from specq.testing.checkpoints_gguf import Q, write_gguf  # needs gguf, which vLLM's environment lacks

        model = write_gguf(make_checkpoint("llama", tmp_path), tmp_path / "model.gguf", linear=Q.F32)
        options = options | {"dtype": "float32"}
    else:
        model = make_checkpoint("llama-bf16", tmp_path)
    made = ENGINES.resolve(name).make(str(model), kv_slots=512, **options)
    yield made
    made.shutdown()


@pytest.fixture
def target(engine, tmp_path):
    """Transformers' own logits of the same checkpoint."""
    reference = load_reference(tmp_path)
    return lambda token_ids: reference_logits(reference, token_ids).numpy()


class TestConformance(EngineConformance, ReferenceConformance):
    """With the fixtures above."""

    def test_an_owner_finds_its_own(self, engine: Engine) -> None:
        """KV is shared among the sessions of one owner only."""
        prompt = np.arange(56, dtype=np.int32)
        for session_id, owner in ((1, "ann"), (2, "ann"), (3, "ben")):
            generate(engine, session_id, prompt.tolist(), 1, SamplingParams(), plain, owner)
        found = [engine.open(4 + i, prompt, owner) for i, owner in enumerate(("ann", "ben", "cat"))]
        assert [count >= 32 for count in found] == [True, True, False]
