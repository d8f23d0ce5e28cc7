"""The form of the draft models that `specq train draft` and `specq train parallel` make: config.json and tensors.

Such a model is a directory with config.json (model_type "specq-draft") and draft.safetensors. It is a small Llama that
is cheap for a large vocabulary:

- Its input embedding is a product of two matrices. A row of `model.embed_tokens.weight` [vocab_size, embedding_rank] is
  multiplied by the transpose of `model.embed_tokens.lift` [hidden_size, embedding_rank].
- Its output head `lm_head.weight` only has rows for the tokens in `lm_head.token_ids` (int32, ascending).
- Each matrix is int8 with a float32 scale per row, in NAME.scale. A value is the product with the scale in half
  precision. Norms are float32.
- It has no tokenizer of its own. `tokenizer_hash` and `num_tokens` in config.json identify it, see `specq.text`.

A parallel draft model (PARD, An et al. 2025, arXiv 2504.18583) has `num_places` in config.json, 2 or more. It drafts
this number of tokens in one pass. The inputs are the last token of a text and masks after it. Its file has one more
tensor, `model.embed_tokens.masks` float32 [num_places - 1, hidden_size]. It has the embedding of the mask at each
place. Their token ids begin at `vocab_size`.

A draft model may have `shared` in config.json. It is the path from its directory to another model of this form. It then
uses that model's input embedding and output head. Its own file lacks them, and `lm_head.token_ids`.

A Llama in Hugging Face layout whose config.json has `num_places` is also a parallel draft model. The last num_places -
1 of its vocab_size rows are the masks.

The other names are those of transformers' Llama.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.checkpoints.files import read_json
from specq.protocol import ConfigError, Float32Array

MODEL_TYPE = "specq-draft"
WEIGHTS = "draft.safetensors"
EMBEDDING, LIFT = "model.embed_tokens.weight", "model.embed_tokens.lift"
MASKS = "model.embed_tokens.masks"
HEAD, TOKEN_IDS = "lm_head.weight", "lm_head.token_ids"
SCALE = ".scale"
SHARED = (EMBEDDING, LIFT, HEAD)  # may come from another model
HASH_LENGTH = 64
MOST_INT8 = 127
MOST_PLACES = 16
_NORMS = ("input", "post_attention")


@dataclass(frozen=True, slots=True)
class DraftModelShape:
    """The content of config.json, except its model_type."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int  # rows of the input embedding
    num_tokens: int  # of the tokenizer
    embedding_rank: int
    head_size: int  # rows of the output head
    tokenizer_hash: str
    num_places: int = 1  # tokens that a pass drafts; 1 may be omitted in config.json
    shared: str = ""  # path to the model with the embedding and the head; "" may be omitted in config.json

    def config(self) -> dict[str, Any]:
        """Return the content of config.json."""
        said = {"model_type": MODEL_TYPE, **asdict(self)}
        return said if self.shared else {key: value for key, value in said.items() if key != "shared"}

    def llama_config(self) -> dict[str, Any]:
        """Return the arguments of transformers' configuration of a Llama with this body."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }


def draft_shape(model: Path) -> DraftModelShape | None:
    """Return a checkpoint's config.json, None if it has another form. Raises ConfigError if it is unusable."""
    if not model.is_dir() or (said := read_json(model, "config.json")).get("model_type") != MODEL_TYPE:
        return None
    said = {"num_places": 1, "shared": "", **said}
    found = {field.name: _value(model, field.name, str(field.type), said) for field in fields(DraftModelShape)}
    shape = DraftModelShape(**found)
    _check(model, shape)
    return shape


def num_places(model: Path) -> int:
    """Return how many tokens a draft model drafts in a pass: 1 unless it is parallel.

    Raises ConfigError for an impossible number.
    """
    if shape := draft_shape(model):
        return shape.num_places
    said = read_json(model, "config.json") if model.is_dir() else {}
    found = said.get("num_places", 1)
    if type(found) is not int or not 1 <= found <= min(MOST_PLACES, said.get("vocab_size", MOST_PLACES)):
        raise ConfigError(
            f"{model / 'config.json'}: num_places is {found!r}, but must be a whole number from 1 to {MOST_PLACES}"
        )
    return found


def _value(model: Path, key: str, kind: str, said: dict[str, Any]) -> Any:
    value = said.get(key)
    if key == "shared":
        fits, wanted = isinstance(value, str), "the path to another"
    elif kind == "str":
        fits = isinstance(value, str) and len(value) == HASH_LENGTH
        wanted = f"{HASH_LENGTH} hex digits"
    else:
        fits = isinstance(value, (int, float) if kind == "float" else int) and not isinstance(value, bool) and value > 0
        wanted = "a number above 0" if kind == "float" else "an integer above 0"
    if not fits:
        raise ConfigError(f"{model / 'config.json'}: {key} is {value!r}; a {MODEL_TYPE} model needs {wanted}")
    return value


def _check(model: Path, shape: DraftModelShape) -> None:
    """Raise ConfigError for sizes that contradict one another."""
    if not shape.head_size <= shape.num_tokens <= shape.vocab_size:
        raise ConfigError(
            f"{model / 'config.json'}: head_size {shape.head_size}, num_tokens {shape.num_tokens} and vocab_size "
            f"{shape.vocab_size} must not decrease in this order"
        )
    if shape.num_attention_heads % shape.num_key_value_heads:
        raise ConfigError(
            f"{model / 'config.json'}: num_attention_heads {shape.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {shape.num_key_value_heads}"
        )
    if shape.num_places > MOST_PLACES:
        raise ConfigError(f"{model / 'config.json'}: num_places is {shape.num_places}; at most {MOST_PLACES} are known")


def matrix_shapes(shape: DraftModelShape) -> dict[str, tuple[int, int]]:
    """Return the matrices by name, each [rows, columns]. Each also has scales."""
    hidden, inner = shape.hidden_size, shape.intermediate_size
    heads, kv_heads = (num * shape.head_dim for num in (shape.num_attention_heads, shape.num_key_value_heads))
    shapes = {
        EMBEDDING: (shape.vocab_size, shape.embedding_rank),
        LIFT: (hidden, shape.embedding_rank),
        HEAD: (shape.head_size, hidden),
    }
    for i in range(shape.num_hidden_layers):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (heads, hidden),
            f"model.layers.{i}.self_attn.k_proj.weight": (kv_heads, hidden),
            f"model.layers.{i}.self_attn.v_proj.weight": (kv_heads, hidden),
            f"model.layers.{i}.self_attn.o_proj.weight": (hidden, heads),
            f"model.layers.{i}.mlp.gate_proj.weight": (inner, hidden),
            f"model.layers.{i}.mlp.up_proj.weight": (inner, hidden),
            f"model.layers.{i}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def norm_names(shape: DraftModelShape) -> list[str]:
    """Return the names of the norms, float32 [hidden_size] each."""
    each = [f"model.layers.{i}.{name}_layernorm.weight" for i in range(shape.num_hidden_layers) for name in _NORMS]
    return [*each, "model.norm.weight"]


def tensor_forms(shape: DraftModelShape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the number format and the shape of each tensor in the file."""
    forms: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (rows, columns) in matrix_shapes(shape).items():
        forms |= {name: ("int8", (rows, columns)), name + SCALE: ("float32", (rows,))}
    forms[TOKEN_IDS] = "int32", (shape.head_size,)
    if shape.shared:
        forms = {name: form for name, form in forms.items() if not is_shared(name)}
    if shape.num_places > 1:
        forms[MASKS] = ("float32", (shape.num_places - 1, shape.hidden_size))
    return forms | dict.fromkeys(norm_names(shape), ("float32", (shape.hidden_size,)))


def is_shared(tensor: str) -> bool:
    """Return whether a tensor of this name may come from another model."""
    return tensor == TOKEN_IDS or tensor.removesuffix(SCALE) in SHARED


def owner(model: Path, shape: DraftModelShape) -> tuple[Path, DraftModelShape]:
    """Return the directory that has a model's embedding and head, and its config.json.

    Raises ConfigError if it cannot have them.
    """
    if not shape.shared:
        return model, shape
    place = model / shape.shared
    found = draft_shape(place)
    same = ("hidden_size", "vocab_size", "embedding_rank", "head_size", "num_tokens", "tokenizer_hash")
    if found is None or found.shared or any(getattr(found, name) != getattr(shape, name) for name in same):
        raise ConfigError(
            f"{model / 'config.json'}: this draft model has the embedding and the head of the one in {place} "
            f"(`shared`), where there is none of its sizes that has them itself"
        )
    return place, found


def to_int8(values: Float32Array) -> tuple[npt.NDArray[np.int8], Float32Array]:
    """Round a matrix to int8 [rows, columns] and scales [rows], so that each row's largest value is 127 or -127."""
    scale = np.maximum(np.abs(values).max(1), 1e-12).astype(np.float32) / np.float32(MOST_INT8)
    return np.rint(values / scale[:, None]).clip(-MOST_INT8, MOST_INT8).astype(np.int8), scale
