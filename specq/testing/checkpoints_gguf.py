"""Tiny GGUF files, written from a checkpoint as llama.cpp's converter does, and a checkpoint with the same values."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, trainers

from specq.protocol import Float32Array
from specq.testing.tokenizer import SAMPLE, TEMPLATE, tokenizer_json

Q = gguf.GGMLQuantizationType
NORMAL, CONTROL = 1, 3
MADE = {  # sizes that fit the blocks of 32 of every type
    "vocab_size": 352,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 600,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": [2],
    "pad_token_id": None,
}


def write_gguf(
    source: Path,
    path: Path,
    *,
    linear: Any = Q.Q8_0,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Float32Array] | None = None,
    tensors_each: int = 0,
) -> Path:
    """Write a Llama-like checkpoint with its matrices in the type `linear`, and return the path.

    - `metadata`: changes keys. None removes a key.
    - `extra`: additional tensors of the file.
    - `tensors_each`: write parts with this many tensors instead. Their names follow from `path` as in the gguf package.

    If `source` must have the same values, call `keep_values` first.
    """
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, config["model_type"], split_max_tensors=tensors_each)
    keys = {**_keys(config), **tokenizer_keys(config["vocab_size"]), **(metadata or {})}
    for key, value in keys.items():
        _add(writer, key, value)
    for name, values in {**_theirs(source, config), **(extra or {})}.items():
        kind = linear if values.ndim == 2 else Q.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keep_values(source: Path, linear: Any) -> None:
    """Round the matrices of a checkpoint to values that a type can hold."""
    file = source / "model.safetensors"
    kept = {
        name: dequantize(quantize(values, linear), linear) if values.ndim == 2 else values
        for name, values in load_file(file).items()
    }
    save_file(kept, file, metadata={"format": "pt"})


def _theirs(source: Path, config: dict[str, Any]) -> dict[str, Float32Array]:
    """Return a checkpoint's tensors with llama.cpp's names and order."""
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == config["model_type"])
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    found = {}
    for name, values in load_file(source / "model.safetensors").items():
        theirs = str(names.get_name(name, try_suffixes=(".weight", ".bias")))
        found[theirs] = _interleaved(values, theirs.split(".")[-2], config)
    return found


def _interleaved(values: Float32Array, own: str, config: dict[str, Any]) -> Float32Array:
    """Return the rows of Llama's query and key projections in the converter's order."""
    if config["model_type"] != "llama" or own not in ("attn_q", "attn_k"):
        return values
    heads = config["num_attention_heads" if own == "attn_q" else "num_key_value_heads"]
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
    }
    return {f"{config['model_type']}.{key}": value for key, value in own.items()}


def tokenizer_keys(vocab_size: int) -> dict[str, Any]:
    """Return the keys of the tokenizer of `specq.testing.tokenizer`, padded to the vocabulary as converters do.

    A smaller vocabulary has only its first tokens, so that no text can be encoded.
    """
    content = json.loads(tokenizer_json())
    tokens = dict(sorted((i, token) for token, i in content["model"]["vocab"].items() if i < vocab_size))
    special = {token["id"] for token in content["added_tokens"]}
    padding = range(len(tokens), vocab_size)
    merges = (merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"])
    said = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*tokens.values(), *(f"[PAD{i}]" for i in padding)],
        "token_type": [*(CONTROL if i in special else NORMAL for i in tokens), *(5 for _ in padding)],
        "merges": list(merges),
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()} | {"tokenizer.chat_template": TEMPLATE}


def sentencepiece_keys(vocab_size: int) -> dict[str, Any]:
    """Return the keys of a tokenizer of SentencePiece's kind, as of Llama 2, with `vocab_size` tokens.

    `[INST]` is a control token, `<user>` is user-defined. The last tokens only fill the vocabulary. Its keys replace
    those of `tokenizer_keys`.
    """
    first = {"<unk>": 2, "<s>": CONTROL, "</s>": CONTROL, **{f"<0x{byte:02X}>": 6 for byte in range(256)}}
    last = {"[INST]": CONTROL, "<user>": 4}
    pieces = _pieces(vocab_size - len(first) - len(last) - 1)
    last |= {f"[PAD{i}]": 5 for i in range(len(first) + len(pieces) + len(last), vocab_size)}
    said = {
        "model": "llama",
        "pre": "default",
        "tokens": [*first, *pieces, *last],
        "token_type": [*first.values(), *(NORMAL for _ in pieces), *last.values()],
        "scores": [*(0.0 for _ in first), *(-float(i) for i in range(len(pieces))), *(-1000.0 for _ in last)],
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in said.items()}


def _pieces(number: int) -> list[str]:
    """Return pieces in the order of their scores: the merges of a trained vocabulary, then single characters."""
    text = [line.replace(" ", "\u2581") for line in SAMPLE] * 4
    tokenizer = Tokenizer(models.BPE())
    letters = sorted(set("".join(text) + string.ascii_lowercase) - set("\n\U0001f642\u4e2d"))
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=1000, limit_alphabet=1000, initial_alphabet=letters, show_progress=False)
    )
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    merged = [piece for piece, _ in vocabulary if len(piece) > 1 and set(piece) <= {*letters}]
    return [*merged[: number - len(letters)], *letters]


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif value is not None:
        writer.add_uint32(key, value)
