"""Read a model's files. They are a directory in Hugging Face layout, or a GGUF file, whole or in parts.

- files: a model's small texts by name (config.json, tokenizer.json and so on). For a GGUF file, made from its
  metadata.
- draft_form: the configuration and tensors of a draft model in our own form, autoregressive or parallel.
- gguf_file: the header of a GGUF file.
- gguf_config: its metadata as config.json, and the tokens that end a text.
- gguf_tokenizer: its metadata as tokenizer.json: the tokens, and what each kind of tokenizer does with them.
- mtp_layers: layers in a directory that predict several tokens.
- gguf_tensors: its tensors, dequantised, under transformers' names.

Input: a path. Output: texts, numbers. No module here needs torch or writes to disk.
"""

from __future__ import annotations

from specq.checkpoints.files import forget_gguf, read_config, read_json, read_text, weight_bytes
from specq.checkpoints.gguf_config import gguf_ends
from specq.checkpoints.gguf_file import GgufFile, gguf_in, gguf_name, gguf_parts, is_gguf, read_gguf
from specq.checkpoints.gguf_tensors import check_tensors
from specq.checkpoints.gguf_tokenizer import num_gguf_tokens, same_tokenizer
from specq.checkpoints.mtp_layers import DEEPSEEK, MIMO, QWEN, StoredTensor, mtp_number, mtp_tensors, safetensors_header

__all__ = [
    "DEEPSEEK",
    "MIMO",
    "QWEN",
    "GgufFile",
    "StoredTensor",
    "check_tensors",
    "forget_gguf",
    "gguf_ends",
    "gguf_in",
    "gguf_name",
    "gguf_parts",
    "is_gguf",
    "mtp_number",
    "mtp_tensors",
    "num_gguf_tokens",
    "read_config",
    "read_gguf",
    "read_json",
    "read_text",
    "safetensors_header",
    "same_tokenizer",
    "weight_bytes",
]
