"""Tiny random checkpoints of each supported architecture, and the results of transformers for comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from specq.engines.native import PackedRows, RowPacker
from specq.protocol import Int32Array, Tree

logging.disable_progress_bar()  # type: ignore[no-untyped-call]
VOCAB = 99  # not a multiple of any block size

DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 600,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_OPT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "word_embed_proj_dim": 24,
    "ffn_dim": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 600,
    "bos_token_id": None,
    "eos_token_id": [1, 3],
    "pad_token_id": None,
}
# They cover grouped-query attention, tied and untied embeddings, biases, head norms, wide heads, stored halves.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **DECODER, "tie_word_embeddings": True},
    "llama-bias": {"model_type": "llama", **DECODER, "attention_bias": True, "num_key_value_heads": 1},
    "llama-bf16": {"model_type": "llama", **DECODER, "dtype": "bfloat16", "head_dim": 64, "num_key_value_heads": 4},
    "llama-odd": {"model_type": "llama", **DECODER, "hidden_size": 36},  # does not fit the kernels
    "qwen2": {"model_type": "qwen2", **DECODER, "hidden_size": 64, "tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", **DECODER, "num_attention_heads": 14, "tie_word_embeddings": True},
    "opt": {"model_type": "opt", **_OPT},
}
# Mixtures of experts, which the torch engine does not load. vLLM's attention on a CPU needs heads of 64.
_EXPERTS = {"num_experts_per_tok": 2, "hidden_size": 256, "head_dim": 64, "tie_word_embeddings": False}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **DECODER, **_EXPERTS, "num_local_experts": 4},
    "qwen2-moe": {
        "model_type": "qwen2_moe", **DECODER, **_EXPERTS,
        "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip


def make_checkpoint(kind: str, directory: Path, seed: int = 0) -> Path:
    """Save a random model of a kind in CONFIGS or EXPERTS, and return its directory.

    The weights are large enough to matter.
    """
    return save_random(directory, (CONFIGS | EXPERTS)[kind], seed)


def save_random(directory: Path, settings: dict[str, Any], seed: int = 0) -> Path:
    """Save a random model of a configuration, its `model_type` included, and return its directory."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**settings)
    dtype = getattr(torch, settings.get("dtype", "float32"))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    model.save_pretrained(directory)
    return directory


def make_renumbered(source: Path, directory: Path) -> Path:
    """Write a model of Hugging Face layout with its ordinary tokens in another order.

    It is the same model with another vocabulary.
    """
    content = json.loads((source / "tokenizer.json").read_text("utf-8"))
    vocab: dict[str, int] = content["model"]["vocab"]
    added = {token["id"] for token in content["added_tokens"]}
    ordinary = [i for i in range(max(vocab.values()) + 1) if i not in added]
    moved = np.random.default_rng(0).permutation(ordinary).tolist()
    new = dict(zip(ordinary, moved, strict=True))
    content["model"]["vocab"] = {token: new.get(i, i) for token, i in vocab.items()}
    model = load_reference(source)
    rows = torch.arange(model.config.vocab_size)
    rows[moved] = torch.tensor(ordinary)
    matrices = {m.weight.data_ptr(): m for m in (model.get_input_embeddings(), model.get_output_embeddings())}
    with torch.no_grad():
        for matrix in matrices.values():
            matrix.weight.copy_(matrix.weight[rows].clone())
    model.save_pretrained(directory)
    shutil.copy(source / "tokenizer_config.json", directory)
    (directory / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    return directory


def load_reference(directory: Path) -> Any:
    """Load a checkpoint as transformers itself would run it, in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


@torch.inference_mode()
def reference_logits(reference: Any, token_ids: list[int]) -> torch.Tensor:
    """Return the logits of transformers after these tokens, [vocab]."""
    logits: torch.Tensor = reference(torch.tensor([token_ids])).logits[0, -1]
    return logits


def chain_logits(forward: Callable[[PackedRows], Any], token_ids: list[int], num_slots: int = 64) -> torch.Tensor:
    """Return the logits of a forward after these tokens, computed in one pass, [columns]."""
    packer = RowPacker()
    packer.add_session(np.arange(num_slots, dtype=np.int32))
    packer.add_chain(token_ids, range(len(token_ids)), 0, judged=True)
    return torch.as_tensor(forward(packer.pack()).logits[0])


def reference_text(reference: Any, context: list[int], num_tokens: int) -> list[int]:
    """Return transformers' own greedy continuation, past any end-of-sequence token."""
    text = list(context)
    for _ in range(num_tokens):
        text.append(int(reference_logits(reference, text).argmax()))
    return text[len(context) :]


def random_tokens(rng: np.random.Generator, count: int) -> Int32Array:
    return rng.integers(0, VOCAB, count).astype(np.int32)


def random_tree(rng: np.random.Generator, num_nodes: int) -> Tree:
    """Return a tree of any shape: each node's parent is a random earlier node or the context."""
    parents = np.array([rng.integers(-1, i) for i in range(num_nodes)], np.int32)
    return Tree(random_tokens(rng, num_nodes), parents, np.zeros(num_nodes, np.float32))


def path_tokens(tree: Tree, node: int) -> list[int]:
    """Return the tokens from the context's child down to a node. Empty for node -1."""
    tokens: list[int] = []
    while node >= 0:
        tokens.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return tokens[::-1]
