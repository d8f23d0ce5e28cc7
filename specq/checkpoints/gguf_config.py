"""The metadata of a GGUF file as `config.json` and `generation_config.json` in Hugging Face layout.

To add an architecture that llama.cpp builds like Llama, add a line to ARCHITECTURES. Its tensors must have the names of
`specq.checkpoints.gguf_tensors`, and its keys must be in _KEYS.

Rule: an unknown key of the architecture may change the text. So the file is refused. A key with the value 0 does not,
unless it is in _ZERO_COUNTS. The error names the file, the key, its value, and what is supported.

The tokens that end a text are llama.cpp's end-of-generation tokens:

- by metadata: eos, eot and eom; the padding and the separators of fill-in-the-middle (FIM).
- by name: tokens with the names of known end tokens, since most files name one end.

The names are those of llama.cpp (`special_eog_ids` in src/llama-vocab.cpp). Two differences are intended:

- A token must be of the kind control or user-defined. `</s>` may be an ordinary word. But llama.cpp treats it as an end
  in any case.
- A token in the metadata stays an end. In two families of models llama.cpp drops `<|end|>` and `</s>` even then.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from specq.checkpoints.gguf_file import GgufFile
from specq.protocol import ConfigError

METADATA = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")  # tokenizer.ggml.KEY_token_id
_NAMES = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *(
        "<|endoftext|>",
        "</s>",
        "<|eom_id|>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|end_of_text|>",
        "<end_of_utterance>",
    ),
    *("<eos>", "<turn|>", "<|tool_response>"),
)
_FIM_NAMES = {  # searched if the metadata name none
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# A name is not an end if all names of one of these sets are ends too: it then separates parts of an answer.
_SEPARATES: dict[str, tuple[set[str], ...]] = {
    "<|end|>": ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"}, {"<|call|>", "<|flush|>"}),
    "</s>": ({"<|tool_response>"},),
}
_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type


def gguf_ends(file: GgufFile) -> dict[int, str]:
    """Return {id: source} of the tokens that end a text, those of the metadata first."""
    ends = dict[int, str]()
    for role in METADATA:
        token_id = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(_tokens(file)):
            ends.setdefault(token_id, f"tokenizer.ggml.{role}_token_id")
    for token_id, name in _named(file):
        ends.setdefault(token_id, f"a control token called {name}")
    return ends


def _tokens(file: GgufFile) -> list[str]:
    found = file.metadata.get("tokenizer.ggml.tokens")
    return found if isinstance(found, list) else []


def _named(file: GgufFile) -> list[tuple[int, str]]:
    """Return the ids and names of the tokens that are ends by their names."""
    kinds = file.metadata.get("tokenizer.ggml.token_type")
    pairs = zip(range(len(_tokens(file))), _tokens(file), kinds if isinstance(kinds, list) else [], strict=False)
    marks = [(i, name) for i, name, kind in pairs if kind in (_CONTROL, _USER_DEFINED)]
    names = {name for _, name in marks}
    unsaid = [role for role in _FIM_NAMES if f"tokenizer.ggml.{role}_token_id" not in file.metadata]
    fim = {name for role in unsaid for name in _FIM_NAMES[role]}
    apart = {name for name, sets in _SEPARATES.items() if any(needed <= names for needed in sets)}
    return [(i, name) for i, name in marks if name in fim.union(_NAMES) - apart]


ARCHITECTURES = {  # general.architecture -> models that have it
    "llama": "Llama 1 to 3, Mistral 7B, TinyLlama, SmolLM2",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3 without experts",
}
ROPE_FACTORS = "rope_freqs.weight"  # divisor of each frequency: llama.cpp's form of the rope of Llama 3.1 and later
_END_KEYS = (
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
)  # in config.json, which is part of fingerprints, so this list must not change
_SIZES = {  # key of config.json -> key of the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
_MOST = 2**31 - 1
_LAYER = re.compile(r"blk\.(\d+)\.")
_ZERO_COUNTS = ("attention.causal", "rope.scaling.")  # beginnings of keys
_NEUTRAL = {"attention.causal": True}
_ELSEWHERE = "llama.cpp may run this file, and --engine vllm the model's directory in Hugging Face layout"
_SCALING = {"linear": ("factor",), "yarn": ("factor", "original_context_length")}
_KEYS = frozenset(
    {
        *_SIZES.values(),
        _EPSILON,
        *("attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size"),
        *("rope.dimension_count", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout"),
    }
)


def model_config(file: GgufFile) -> dict[str, Any]:
    """Return the `config.json` of a file's model. Raises ConfigError for a model that is not supported."""
    kind = file.architecture
    if (content := file.metadata.get("general.type", "model")) != "model":
        raise refusal(file, "general.type", content, "model")
    if kind not in ARCHITECTURES:
        supported = ", ".join(f"{name} ({models})" for name, models in ARCHITECTURES.items())
        raise refusal(file, "general.architecture", kind, supported)
    said = _Said(file)
    said.check_known()
    config = {key: said.size(own) for key, own in _SIZES.items()}
    num_heads = config["num_attention_heads"]
    num_kv_heads = said.size("attention.head_count_kv", num_heads)
    head_dim = said.size("attention.key_length", config["hidden_size"] // num_heads)
    if {said.get(key, head_dim) for key in ("attention.value_length", "rope.dimension_count")} != {head_dim}:
        raise said.unsupported("heads whose keys, values and rotated parts differ in size")
    _check_fits(file, config["num_hidden_layers"], num_heads, num_kv_heads, head_dim)
    return {
        "model_type": kind,
        **config,
        "rms_norm_eps": _shortest(said.needed(_EPSILON)),
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": _vocab_size(file),
        "hidden_act": "silu",
        "rope_parameters": _rope(said),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(file.metadata),
        "pad_token_id": None,
    }


def refusal(file: GgufFile, key: str, value: Any, supported: str) -> ConfigError:
    """Return the error for a key of a file whose value is not supported, with what runs such models."""
    return ConfigError(f"{file.path}: {key} is {value!r:.40}; supported in GGUF files: {supported}. {_ELSEWHERE}")


def generation_config(file: GgufFile) -> dict[str, Any]:
    """Return the `generation_config.json` of a file's model: all tokens that end a text."""
    return {"eos_token_id": list(gguf_ends(file))}


class _Said:
    """The keys of a file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self._file, start = file, file.architecture + "."
        self._values = {k.removeprefix(start): v for k, v in file.metadata.items() if k.startswith(start)}

    def check_known(self) -> None:
        unknown = sorted(key for key, value in self._values.items() if key not in _KEYS and _counts(key, value))
        if unknown:
            raise self.unsupported(", ".join(f"{key} = {str(self._values[key])[:40]}" for key in unknown))

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if isinstance(value, list):
            raise self.unsupported(f"{key} that differs from layer to layer")
        return value

    def needed(self, key: str, default: float | None = None) -> Any:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ConfigError(
                f"{self._file.path} lacks the key {self._file.architecture}.{key}, or its value is not above 0"
            )
        return value

    def size(self, key: str, default: int | None = None) -> int:
        value = self.needed(key, default)
        if not isinstance(value, int) or value > _MOST:
            raise ConfigError(
                f"{self._file.path}: {self._file.architecture}.{key} is {value}, but must be a whole number up to "
                f"{_MOST}"
            )
        return value

    def unsupported(self, what: str) -> ConfigError:
        return ConfigError(
            f"{self._file.path} is a {self._file.architecture} model with {what}, which is not supported in GGUF "
            f"files. {_ELSEWHERE}"
        )


def _counts(key: str, value: Any) -> bool:
    """Return whether the value of an unknown key may change the text."""
    return value != _NEUTRAL.get(key) and bool(value or key.startswith(_ZERO_COUNTS))


def _rope(said: _Said) -> dict[str, Any]:
    base = {"rope_theta": _shortest(said.needed("rope.freq_base", 10_000.0))}
    kind = said.get("rope.scaling.type", "linear" if said.get("rope.scaling.factor") else "none")
    if kind == "none":
        return {"rope_type": "default", **base}
    if kind not in _SCALING:
        raise said.unsupported(f"rope.scaling.type {kind!r} (supported: none, {', '.join(_SCALING)})")
    scaling = {key: said.needed(f"rope.scaling.{key}") for key in _SCALING[kind]}
    if "original_context_length" in scaling:
        scaling["original_max_position_embeddings"] = scaling.pop("original_context_length")
    return {"rope_type": kind, **base, **scaling}


def _check_fits(file: GgufFile, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Before memory is allocated, raise ConfigError unless the file has that many layers and heads."""
    layers = {int(match[1]) for name in file.tensors if (match := _LAYER.match(name))}
    rows = {"attn_q": num_heads * head_dim, "attn_k": num_kv_heads * head_dim, "attn_v": num_kv_heads * head_dim}
    said = {f"blk.0.{name}.weight": count for name, count in rows.items()}
    found = {name: file.tensors[name].shape[0] for name in said if name in file.tensors}
    if len(layers) != num_layers or any(said[name] != count for name, count in found.items()):
        raise ConfigError(
            f"{file.path} does not fit its own metadata: {num_layers} layers of {num_heads} heads, {num_kv_heads} of "
            f"keys, of {head_dim} values; its tensors are of {len(layers)} layers, "
            f"{', '.join(f'{k} of {v} rows' for k, v in found.items())}"
        )


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{file.path} has no tensor token_embd.weight")
    num_rows = file.tensors["token_embd.weight"].shape[0]
    if len(_tokens(file)) > num_rows:
        raise ConfigError(
            f"{file.path} does not fit its own metadata: {len(_tokens(file))} tokens (tokenizer.ggml.tokens), and "
            f"token_embd.weight of {num_rows} rows"
        )
    return num_rows


def _end_ids(metadata: Mapping[str, Any]) -> list[int]:
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    return list(dict.fromkeys(token_id for token_id in found if isinstance(token_id, int)))


def _shortest(value: float) -> float:
    """Return the shortest decimal of a float32: the number that the file's author used."""
    return float(str(np.float32(value)))
