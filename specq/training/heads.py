"""What the methods that train heads for a target share: the values of the target that heads name, and their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.training.architecture import ROPE_THETA


def tokenizer_of(target: Path) -> dict[str, Any]:
    """Return what heads say of their target's tokenizer."""
    tokenizer = load_tokenizer_files(target)["tokenizer.json"]
    return {"num_tokens": num_tokens(tokenizer), "tokenizer_hash": tokenizer_hash(tokenizer)}


def shape_of(target: Any, path: Path) -> dict[str, Any]:
    """Return the values of `HeadShape` for heads whose layers have the target's shape; `path`: where it is."""
    config = target.config
    hidden = config.hidden_size
    return {
        "hidden_size": hidden,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // config.num_attention_heads,
        "vocab_size": target.get_input_embeddings().weight.shape[0],
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": ROPE_THETA,
        "target_hidden_size": hidden,
        "max_position_embeddings": config.max_position_embeddings,
        **tokenizer_of(path),
    }


def write_heads(out: Path, name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write the tensors of heads to the file `name`, which appears only when it is complete, and their config.json."""
    out.mkdir(parents=True, exist_ok=True)
    unfinished = out / f"{name}.part"
    save_file(dict(tensors), unfinished)
    unfinished.replace(out / name)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
