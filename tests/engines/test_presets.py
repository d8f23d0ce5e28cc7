"""The pairs of configs/: made-up checkpoints of the same configuration, scaled down, in the torch engine.

What distinguishes a model is as its own config.json has it: norms before or after, projections of the embedding, tied
weights, biases, norms of heads, the ratio of heads, the rope. Sizes are not.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specq.config import load as load_config
from specq.engines.torch import RowPacker, load
from specq.testing.checkpoints import VOCAB, load_reference, random_tokens, reference_logits

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = ("qwen2.5", "qwen3", "opt", "llama3_8b", "llama3_70b")
COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": None, "num_hidden_layers": 2}
DECODER = {**COMMON, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 600}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 75,
}
QWEN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6}
OPT = {**COMMON, "hidden_size": 64, "ffn_dim": 128, "max_position_embeddings": 600, "num_attention_heads": 4}
SCALED = {
    "Qwen/Qwen2.5-3B-Instruct": {
        "model_type": "qwen2",
        **DECODER,
        **QWEN_ROPE,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 128,
        "max_window_layers": 2,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": {
        "model_type": "qwen2",
        **DECODER,
        **QWEN_ROPE,
        "hidden_size": 112,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": 128,
        "max_window_layers": 2,
    },
    "Qwen/Qwen3-32B": {
        "model_type": "qwen3",
        **DECODER,
        **QWEN_ROPE,
        "head_dim": 16,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-1.7B": {
        "model_type": "qwen3",
        **DECODER,
        **QWEN_ROPE,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "facebook/opt-6.7b": {"model_type": "opt", **OPT, "word_embed_proj_dim": 64, "do_layer_norm_before": True},
    "facebook/opt-350m": {"model_type": "opt", **OPT, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "meta-llama/Llama-3.1-8B-Instruct": {
        "model_type": "llama",
        **DECODER,
        "rope_parameters": {**LLAMA3, "factor": 8.0},
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-70B-Instruct": {
        "model_type": "llama",
        **DECODER,
        "rope_parameters": {**LLAMA3, "factor": 8.0},
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B-Instruct": {
        "model_type": "llama",
        **DECODER,
        "rope_parameters": {**LLAMA3, "factor": 32.0},
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}


def models_of(preset: str) -> set[str]:
    config = load_config(CONFIGS / f"{preset}.toml")
    return {name for name in (config.target.model, config.target.draft_model, config.draft.model) if name}


def make(directory: Path, settings: dict) -> Path:
    torch.manual_seed(0)
    settings = dict(settings)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def test_each_model_of_a_preset_is_tried():
    assert {name for preset in PRESETS for name in models_of(preset)} == set(SCALED)
    assert all(len(models_of(preset)) == 2 for preset in PRESETS)


@pytest.mark.parametrize("name", SCALED)
def test_the_engine_says_what_transformers_says(name, tmp_path):
    """At positions on both sides of what the rope was trained for, too."""
    directory = make(tmp_path, SCALED[name])
    token_ids = random_tokens(np.random.default_rng(1), 150).tolist()
    forward = load(str(directory), device="cpu", kv_slots=256).forward
    reference = load_reference(directory)
    for length in (1, 20, 150):
        packer = RowPacker()
        packer.add_session(np.arange(length, dtype=np.int32))
        packer.add_chain(token_ids[:length], range(length), 0, judged=True)
        expected = reference_logits(reference, token_ids[:length])
        torch.testing.assert_close(forward(packer.pack()).logits[0], expected, atol=2e-4, rtol=2e-4)
