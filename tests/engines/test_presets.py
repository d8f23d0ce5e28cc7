"""The pairs of configs/: made-up checkpoints of the same configuration, scaled down, in the torch engine.

What distinguishes a model is as its own config.json has it: norms before or after, projections of the embedding, tied
weights, biases, norms of heads, the ratio of heads, the rope. Sizes are not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from specq.config import load as load_config
from specq.engines.torch import load
from specq.testing.checkpoints import VOCAB, chain_logits, load_reference, random_tokens, reference_logits, save_random

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = ("qwen2.5", "qwen3", "opt", "llama3_8b", "llama3_70b")
COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None, "num_hidden_layers": 2}
DECODER = {**COMMON, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 600}
QWEN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}
NO_WINDOW = {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 2}
OPT = {**COMMON, "hidden_size": 64, "ffn_dim": 128, "max_position_embeddings": 600, "num_attention_heads": 4}


def heads(num: int, of_keys: int, *, tied: bool, **more: object) -> dict[str, object]:
    return {"num_attention_heads": num, "num_key_value_heads": of_keys, "tie_word_embeddings": tied, **more}


def qwen2(**own: object) -> dict[str, object]:
    return {"model_type": "qwen2", **DECODER, **QWEN_ROPE, **NO_WINDOW, **own}


def qwen3(**own: object) -> dict[str, object]:
    return {"model_type": "qwen3", **DECODER, **QWEN_ROPE, **own}


def llama3(factor: float, **own: object) -> dict[str, object]:
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 75, "factor": factor}
    return {"model_type": "llama", **DECODER, "rope_parameters": rope, **own}


SCALED = {
    "Qwen/Qwen2.5-3B-Instruct": qwen2(**heads(8, 1, tied=True)),
    "Qwen/Qwen2.5-0.5B-Instruct": qwen2(hidden_size=112, **heads(7, 1, tied=True)),
    "Qwen/Qwen3-32B": qwen3(**heads(8, 1, tied=False, head_dim=16)),
    "Qwen/Qwen3-1.7B": qwen3(**heads(4, 2, tied=True, head_dim=32)),
    "facebook/opt-6.7b": {"model_type": "opt", **OPT, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "facebook/opt-350m": {"model_type": "opt", **OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "meta-llama/Llama-3.1-8B-Instruct": llama3(8.0, **heads(4, 1, tied=False)),
    "meta-llama/Llama-3.1-70B-Instruct": llama3(8.0, **heads(8, 1, tied=False, head_dim=16)),
    "meta-llama/Llama-3.2-1B-Instruct": llama3(32.0, **heads(4, 1, tied=True, head_dim=16)),
}


def models_of(preset: str) -> set[str]:
    config = load_config(CONFIGS / f"{preset}.toml")
    return {name for name in (config.target.model, config.target.draft_model, config.draft.model) if name}


def test_each_model_of_a_preset_is_tried():
    assert {name for preset in PRESETS for name in models_of(preset)} == set(SCALED)
    assert all(len(models_of(preset)) == 2 for preset in PRESETS)


@pytest.mark.parametrize("name", SCALED)
def test_the_engine_says_what_transformers_says(name, tmp_path):
    """At positions on both sides of what the rope was trained for, too."""
    directory = save_random(tmp_path, SCALED[name])
    token_ids = random_tokens(np.random.default_rng(1), 150).tolist()
    forward = load(str(directory), device="cpu", kv_slots=256).forward
    reference = load_reference(directory)
    for length in (1, 20, 150):
        found = chain_logits(forward, token_ids[:length], length)
        torch.testing.assert_close(found, reference_logits(reference, token_ids[:length]), atol=2e-4, rtol=2e-4)
