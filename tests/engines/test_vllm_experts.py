"""Mixtures of experts by the vllm engine: random models of two families, whose texts are those of vLLM itself. `make
test-vllm`."""

from __future__ import annotations

import numpy as np
import pytest

from bench.rivals.vllm import Vllm
from specq.engines.vllm.engine import VllmEngine
from specq.engines.vllm.options import prepare_environment
from specq.testing.checkpoints import EXPERTS, make_checkpoint, random_tokens
from tests.devices import NEEDS_VLLM, vllm_arguments
from tests.engines.test_vllm import Text, guess, run

pytestmark = [*NEEDS_VLLM, pytest.mark.timeout(300)]
NUM_TOKENS = 16


def completed(model: str, prompts, options) -> list[list[int]]:
    """Return what vLLM itself says to each prompt alone."""
    prepare_environment("auto")  # vLLM reads it once: the engine, later in this process, needs the first model runner
    vllm = Vllm(model, "float32", **options)
    found = [vllm.complete(prompt.tolist(), NUM_TOKENS + 10)["token_ids"] for prompt in prompts]
    vllm.shutdown()
    return found


@pytest.mark.parametrize("kind", EXPERTS)
def test_texts_are_those_of_vllm_itself(kind, tmp_path, vllm_device):
    """Prompts in chunks of any size, right and wrong drafts, any batch."""
    rng, directory = np.random.default_rng(0), str(make_checkpoint(kind, tmp_path / kind))
    prompts = [random_tokens(rng, count) for count in (3, 20, 70)]
    given = vllm_arguments(vllm_device)
    options = given.get("options", {}) | {"max_model_len": 128}
    truth = completed(directory, prompts, {**options, "kv_cache_memory_bytes": 1 << 27})
    engine = VllmEngine(directory, kv_slots=1024, **given | {"options": options})
    texts = {i: Text(i, prompt.tolist()) for i, prompt in enumerate(prompts)}
    for i, text in texts.items():
        text.kv_len = engine.open(i, prompts[i])
    while growing := [text for text in texts.values() if len(text.said) < NUM_TOKENS]:
        joining = [text for text in growing if rng.random() < 0.7]
        steps = [t.step(guess(rng, truth[t.session_id][len(t.said) :]), int(rng.integers(1, 40))) for t in joining]
        if steps:
            run(engine, steps, texts)
    engine.shutdown()
    assert [text.said[:NUM_TOKENS] for text in texts.values()] == [said[:NUM_TOKENS] for said in truth]
    assert sum(text.num_accepted for text in texts.values()) > 10
