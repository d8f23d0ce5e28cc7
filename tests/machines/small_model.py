"""A small model of random values for the engine `native`, which needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from specq.testing.checkpoints_gguf import MADE, Q, write_gguf


def write_model(folder: Path) -> Path:
    """Write it, and return its GGUF file."""
    random, width, kv = np.random.default_rng(0), MADE["hidden_size"], MADE["head_dim"] * MADE["num_key_value_heads"]
    heads, inner = MADE["head_dim"] * MADE["num_attention_heads"], MADE["intermediate_size"]
    shapes = {
        "model.embed_tokens": (MADE["vocab_size"], width),
        "lm_head": (MADE["vocab_size"], width),
        "model.norm": (width,),
    }
    for i in range(MADE["num_hidden_layers"]):
        own = {"q_proj": (heads, width), "k_proj": (kv, width), "v_proj": (kv, width), "o_proj": (width, heads)}
        mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
        shapes |= {f"model.layers.{i}.self_attn.{name}": shape for name, shape in own.items()}
        shapes |= {f"model.layers.{i}.mlp.{name}": shape for name, shape in mlp.items()}
        shapes |= {f"model.layers.{i}.{name}_layernorm": (width,) for name in ("input", "post_attention")}
    tensors = {
        f"{name}.weight": random.normal(1.0 if len(shape) == 1 else 0.0, 0.1, shape) for name, shape in shapes.items()
    }
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **MADE}))
    return write_gguf(folder, folder / "target.gguf", linear=Q.Q8_0)
