"""The weights of a Llama-like decoder as arrays: what `NativeForward` packs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specq.engines.native.packing import LINE, PANEL, Weight
from specq.protocol import Float32Array


@dataclass(frozen=True, slots=True)
class Linear:
    """Linear layers that are computed as one.

    weights      [n, k] each, all float32 or all in blocks of one type
    biases       f32[n] each; empty: they have none
    interleaves  whether their rows come in turns of 8, else one layer after the other
    """

    weights: Sequence[Weight]
    biases: Sequence[Float32Array] = ()
    interleaves: bool = False

    @property
    def most_bytes(self) -> int:
        """What they take at most when they are packed: as floats, each padded to whole panels."""
        return sum(4 * (num_rows + PANEL) * k + LINE for num_rows, k in (weight.shape for weight in self.weights))


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer; norms f32[hidden], those of queries and keys f32[head_dim], None where there are none.

    qkv      projections of queries, keys and values; out: of what attention gives
    gate_up  the first two of the MLP, interleaved; down: the last
    """

    attn_norm: Float32Array
    mlp_norm: Float32Array
    q_norm: Float32Array | None
    k_norm: Float32Array | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """A whole model.

    eps, scale   of the norms; of scores before softmax
    embedding    f32[vocab, hidden]; head: the projection to logits
    cos, sin     f32[positions, head_dim / 2]
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    eps: float
    scale: float
    embedding: Float32Array
    final_norm: Float32Array
    cos: Float32Array
    sin: Float32Array
    layers: Sequence[DecoderLayer]
    head: Linear

    def linears(self) -> Iterator[Linear]:
        """Yield all linear layers, in the order in which a step reads them."""
        for layer in self.layers:
            yield from (layer.qkv, layer.out, layer.gate_up, layer.down)
        yield self.head
