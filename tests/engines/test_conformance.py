"""Every engine of the table, in each of its ways, does what an engine must do."""

from __future__ import annotations

import numpy as np
import pytest

from specq.engines import ENGINES, Engine
from specq.protocol import SamplingParams
from specq.testing import EngineConformance, make_checkpoint
from specq.testing.conformance.engines import generate, no_draft
from tests.devices import NEEDS_CUDA, NEEDS_VLLM, vllm_arguments

VARIANTS = {
    "vllm-prompts": ("vllm", {"way": "prompts"}),
    "torch on cuda": ("torch", {"device": "cuda", "dtype": "float32"}),  # in bf16 near-ties may fall either way there
}
MARKS = {"vllm": NEEDS_VLLM, "vllm-prompts": NEEDS_VLLM, "torch on cuda": NEEDS_CUDA}


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in sorted([*ENGINES, *VARIANTS])])
def engine(request, tmp_path):
    """Each of the table on the CPU, what runs on CUDA there too; vllm on what it was built for."""
    name, options = VARIANTS.get(request.param, (request.param, {"device": "cpu"}))
    if name == "vllm":
        kind = request.getfixturevalue("vllm_device")
        options = options | {"device": kind} | vllm_arguments(kind)
    made = ENGINES.resolve(name).make(str(make_checkpoint("llama-bf16", tmp_path)), kv_slots=512, **options)
    yield made
    made.shutdown()


class TestConformance(EngineConformance):
    """With the fixture above."""

    def test_an_owner_finds_its_own(self, engine: Engine, request: pytest.FixtureRequest) -> None:
        """All but what is driven by prompts: there the model's own library finds it, and says so to nobody."""
        prompt = np.arange(56, dtype=np.int32)
        for session_id, owner in ((1, "ann"), (2, "ann"), (3, "ben")):
            generate(engine, session_id, prompt.tolist(), 1, SamplingParams(), no_draft, owner)
        found = [engine.open(4 + i, prompt, owner) for i, owner in enumerate(("ann", "ben", "cat"))]
        is_told = request.node.callspec.params["engine"] != "vllm-prompts"
        assert [count >= 32 for count in found] == [is_told, is_told, False]
