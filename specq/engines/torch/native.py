"""The compiled CPU forward (`specq.engines.native`) for transformers models: weights as arrays, results as tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from specq.engines.native import ALONE, BlockWeight, DecoderLayer, Linear, NativeForward, NativeWeights, Threads
from specq.engines.native.rows import PackedRows, RowTap
from specq.engines.torch.forward import ForwardOutput, KvStore
from specq.engines.torch.rotary import has_tables, rotary_tables
from specq.protocol import Float32Array
from specq.runtime import available_cores

ARCHITECTURES = ("llama", "qwen2", "qwen3")
NO_BLOCKS: Mapping[str, BlockWeight] = MappingProxyType({})


class NativeTorchForward:
    """Fulfils `Forward` with `native`. `weights` are those of `decoder_weights`; `library` has their arithmetic."""

    ARITHMETIC: ClassVar[str] = "native"

    def __init__(self, weights: NativeWeights, kv: KvStore, library: ctypes.CDLL, threads: Threads = ALONE) -> None:
        self.kv = kv
        self.native = NativeForward(weights, kv.keys.numpy(), kv.values.numpy(), library, threads)
        self.num_tap_layers, self.jumps = self.native.num_tap_layers, self.native.jumps

    @property
    def is_helped(self) -> bool:
        return self.native.is_helped

    @is_helped.setter
    def is_helped(self, is_helped: bool) -> None:
        self.native.is_helped = is_helped

    def __call__(self, rows: PackedRows, tap: RowTap | None = None) -> ForwardOutput:
        """Run packed rows; see `NativeForward`."""
        logits, hidden, tapped = self.native(rows, tap)
        told = None if tapped is None else torch.from_numpy(tapped)
        return ForwardOutput(torch.from_numpy(logits), torch.from_numpy(hidden), told)


class IntegerTorchForward(NativeTorchForward):
    """The same in integer arithmetic, with weights of `specq.engines.native.integer_weights`."""

    ARITHMETIC: ClassVar[str] = "integer"


def threads_of(threads: int, helper_cores: tuple[int, ...] = ()) -> Threads:
    """Return the threads that compute: `threads` of this process, and the helpers.

    0: torch's default number of threads, at most one per core.
    """
    return Threads(threads or min(torch.get_num_threads(), len(available_cores())), helper_cores)


def supports(model: Any) -> bool:
    """Return whether the kernels can run this model: Llama's layers, CPU, float32, supported sizes."""
    config = model.config
    if config.model_type not in ARCHITECTURES or model.dtype != torch.float32 or model.device.type != "cpu":
        return False
    head_dim = model.model.layers[0].self_attn.head_dim
    whole_lines = config.hidden_size % 8 == 0 and config.intermediate_size % 8 == 0 and head_dim % 16 == 0
    return whole_lines and config.hidden_act == "silu" and has_tables(model.model)


def decoder_weights(model: Any, num_slots: int, blocks: Mapping[str, BlockWeight]) -> NativeWeights:
    """Return the weights of a transformers model that `supports` takes. Float32 weights are not copied.

    `blocks`: the weights of linear layers in the file's own blocks, by their names in the model. The model's own
    weights must equal the dequantised blocks.
    """
    config, decoder = model.config, model.model
    by_layer = {model.get_submodule(name): block for name, block in blocks.items()}
    cos, sin = (_array(table) for table in rotary_tables(decoder, num_slots))
    attention = decoder.layers[0].self_attn
    return NativeWeights(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=attention.head_dim,
        intermediate=config.intermediate_size,
        eps=config.rms_norm_eps,
        scale=attention.scaling,
        embedding=_array(decoder.embed_tokens.weight),
        final_norm=_array(decoder.norm.weight),
        cos=cos,
        sin=sin,
        layers=[_layer(layer, by_layer) for layer in decoder.layers],
        head=_linear([model.lm_head], by_layer),
    )


def _layer(layer: Any, blocks: Mapping[Any, BlockWeight]) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    q_norm, k_norm = (None if norm is None else _array(norm.weight) for norm in norms)
    return DecoderLayer(
        attn_norm=_array(layer.input_layernorm.weight),
        mlp_norm=_array(layer.post_attention_layernorm.weight),
        q_norm=q_norm,
        k_norm=k_norm,
        qkv=_linear([attention.q_proj, attention.k_proj, attention.v_proj], blocks),
        out=_linear([attention.o_proj], blocks),
        gate_up=_linear([mlp.gate_proj, mlp.up_proj], blocks, interleaves=True),
        down=_linear([mlp.down_proj], blocks),
    )


def _linear(layers: list[Any], blocks: Mapping[Any, BlockWeight], *, interleaves: bool = False) -> Linear:
    """Return linear layers as one; in blocks only if all have blocks of one type."""
    given = [blocks[layer] for layer in layers if layer in blocks]
    is_whole = len(given) == len(layers) and len({block.type for block in given}) == 1
    weights = given if is_whole else [_array(layer.weight) for layer in layers]
    return Linear(weights, [_array(layer.bias) for layer in layers if layer.bias is not None], interleaves)


def _array(tensor: torch.Tensor) -> Float32Array:
    found: Float32Array = tensor.detach().to(torch.float32).contiguous().numpy()
    return found
