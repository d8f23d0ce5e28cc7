"""MTP layers (multi-token prediction) inside a target's checkpoint: they draft as an EAGLE-3 head does.

A layer reads the embedding of a token and the target's last hidden state before it, each normed. One matrix maps both
to the input of a decoder layer. Its normed output is the next state, and the target's output matrix maps it to logits.
Of several layers only the first is used, again and again.

`specq.checkpoints.mtp_layers` has the three layouts. DeepSeek-V3's and Qwen3-Next's read the state after the target's
final norm, MiMo's the one before. DeepSeek-V3's may have an embedding and an output matrix of its own. In it and in
MiMo's the embedding of the text's second token counts as zeros, as in vLLM.

Only decoder layers of a Llama, Qwen2 or Qwen3 are computed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from specq.checkpoints import DEEPSEEK, MIMO, QWEN, StoredTensor, mtp_number, mtp_tensors, read_json
from specq.drafting.eagle3.form import EMBEDDING, LAYER, MTP_KIND, OUTPUT, EagleShape, matrix_shapes
from specq.drafting.head_config import HeadConfig, fault
from specq.protocol import FINAL, ConfigError


class _Layout(NamedTuple):
    """Names of a layout: norms of the embedding and of the state, the matrix of both, the last norm, the layer's part.

    has_states_first  whether the matrix reads the state before the embedding.
    reads_final       whether the state is that after the target's final norm.
    masks_first       whether the embedding of the text's second token counts as zeros.
    """

    embedding_norm: str
    state_norm: str
    both: str
    last_norm: str
    layer: str = ""
    has_states_first: bool = False
    reads_final: bool = True
    masks_first: bool = True


_LAYOUTS = {
    QWEN: _Layout("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0.", masks_first=False),
    MIMO: _Layout(
        *("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        has_states_first=True,
        reads_final=False,
    ),
    DEEPSEEK: _Layout("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}
_MODELS = ("llama", "qwen2", "qwen3", "mimo")  # others may norm or rotate otherwise
_FORMATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OTHERS = {  # what other decoder layers have
    "self_attn.kv_a_proj_with_mqa.": "multi-head latent attention",
    "linear_attn.": "linear attention",
    "mlp.experts.": "a mixture of experts",
    "mlp.gate.": "a mixture of experts",
}


class MtpLayer(NamedTuple):
    """The first MTP layer of a checkpoint.

    tensors     by our own names.
    num_layers  how many MTP layers there are.
    has_states_first  whether the columns of `fc` for the state come first.
    """

    shape: EagleShape
    tensors: dict[str, StoredTensor]
    num_layers: int
    has_states_first: bool


def is_mtp(checkpoint: Path) -> bool:
    """Return whether a target's checkpoint has MTP layers, of any kind."""
    return bool(mtp_tensors(checkpoint))


def mtp_layer(checkpoint: Path) -> MtpLayer:
    """Return the first MTP layer of a checkpoint. Raises ConfigError if it has none, or one that we do not compute."""
    said, stored = read_json(checkpoint, "config.json"), mtp_tensors(checkpoint)
    if not stored:
        raise ConfigError(f"{checkpoint} has no MTP layer: no tensors {', '.join(f'{one}*' for one in _LAYOUTS)}")
    num_layers = int(said["num_hidden_layers"])
    numbers = {name: mtp_number(name, num_layers) or 0 for name in stored}
    found = {name: tensor for name, tensor in stored.items() if not numbers[name]}
    kind = next(one for one in _LAYOUTS if next(iter(stored)).startswith(one))
    prefix = kind if kind == QWEN else f"{kind}{num_layers if kind == DEEPSEEK else 0}."
    _check_kind(checkpoint, found)
    shape = _shape(checkpoint, _LAYOUTS[kind], found, f"{prefix}{_LAYOUTS[kind].layer}", num_layers)
    names = {own: _name(own, _LAYOUTS[kind], prefix) for own in (*matrix_shapes(shape), EMBEDDING)}
    if reason := _fault(shape, found, names, has_matrices=kind == DEEPSEEK):
        raise ConfigError(f"{checkpoint}: its MTP layer cannot be used: {reason}")
    tensors = {own: found[name] for own, name in names.items() if name in found}
    return MtpLayer(shape, tensors, 1 + max(numbers.values()), _LAYOUTS[kind].has_states_first)


def is_usable(checkpoint: Path) -> bool:
    """Return whether a checkpoint has an MTP layer that we compute."""
    try:
        mtp_layer(checkpoint)
    except ConfigError:
        return False
    return True


def loading_bytes(checkpoint: Path) -> int:
    """Return about how much memory the first MTP layer needs at most while it is loaded: twice its size in float32."""
    shape = mtp_layer(checkpoint).shape
    sizes = [*matrix_shapes(shape).values(), (shape.vocab_size, shape.hidden_size)]
    return 8 * sum(prod(size) for size in sizes)


def _name(own: str, layout: _Layout, prefix: str) -> str:
    """Return the name of a tensor in a layout, given ours."""
    beside = {
        f"{LAYER}input_layernorm.weight": f"{layout.embedding_norm}.weight",
        f"{LAYER}hidden_norm.weight": f"{layout.state_norm}.weight",
        "fc.weight": f"{layout.both}.weight",
        "norm.weight": f"{layout.last_norm}.weight",
        f"{LAYER}attention_norm.weight": f"{layout.layer}input_layernorm.weight",
        EMBEDDING: EMBEDDING,
        OUTPUT: "shared_head.head.weight",
    }
    return prefix + beside.get(own, layout.layer + own.removeprefix(LAYER))


def _check_kind(checkpoint: Path, names: Iterable[str]) -> None:
    for part, called in _OTHERS.items():
        if name := next((name for name in names if f".{part}" in name), ""):
            raise ConfigError(
                f"{checkpoint}: its MTP layer has {called} ({name}); MTP layers are computed with the attention and "
                "the dense feed-forward network of a Llama, Qwen2 or Qwen3"
            )


def _shape(checkpoint: Path, layout: _Layout, found: Container[str], layer: str, num_layers: int) -> EagleShape:
    said = read_json(checkpoint, "config.json")
    config = HeadConfig(checkpoint, said, MTP_KIND)
    config.check("model_type", said.get("model_type"), *_MODELS)
    config.check("hidden_act", said.get("hidden_act", "silu"), "silu")
    config.check("partial_rotary_factor", said.get("partial_rotary_factor", 1), 1)
    common = config.common() | {"has_head_norms": f"{layer}self_attn.q_norm.weight" in found}
    return EagleShape(
        **common,
        draft_vocab_size=common["vocab_size"],
        layers=(FINAL if layout.reads_final else num_layers - 1,),
        is_mtp=True,
        masks_first=layout.masks_first,
        has_biases=f"{layer}self_attn.q_proj.bias" in found,
    )


def _fault(
    shape: EagleShape, found: Mapping[str, StoredTensor], names: Mapping[str, str], *, has_matrices: bool
) -> str:
    """Return what is wrong with the tensors of a layer, or "".

    names         theirs, by ours.
    has_matrices  whether it may have an embedding and an output matrix of its own.
    """
    shapes = matrix_shapes(shape) | {EMBEDDING: (shape.vocab_size, shape.hidden_size)}
    may_be = {names[own]: shapes.pop(own) for own in (EMBEDDING, OUTPUT)} if has_matrices else {}
    needed = {names[own]: size for own, size in shapes.items() if own not in (EMBEDDING, OUTPUT)}
    queries = names[f"{LAYER}self_attn.q_proj.weight"]
    num_queries = shape.num_attention_heads * shape.head_dim
    if queries in found and found[queries].shape == (2 * num_queries, shape.hidden_size):
        return f"its attention has gates ({queries} has {2 * num_queries} rows instead of {num_queries})"
    forms = {name: (_FORMATS.get(one.dtype, one.dtype), one.shape) for name, one in found.items()}
    return fault(needed, may_be, {}, forms, "MTP layers")
