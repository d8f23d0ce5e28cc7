"""The integer forward pass (specq/engines/native/kernels/integer.c) in plain NumPy, without BLAS: equal bit for bit.

It reads the model's file itself: blocks as the GGUF format describes them. Every sum is written in the order of the
kernels. Only the cosines are shared (`specq.engines.native.rope_tables`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specq.checkpoints import gguf_config, gguf_tensors, read_gguf
from specq.engines.native import rope_tables
from specq.protocol import Float32Array

Ints = npt.NDArray[np.int64]
F = np.float32
_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34, "Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
_MINIMA = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


class Blocks(NamedTuple):
    """A matrix in blocks of 32 weights, or superblocks of 8 of them.

    - weights: [rows, blocks, 32]; scales, minima: integers of the K types, [rows, blocks, parts] and [rows, blocks].
    - d, dmin: f32[rows, blocks or superblocks]; dmin may be None.
    """

    kind: str
    weights: Ints
    scales: Ints
    minima: Ints
    d: Float32Array
    dmin: Float32Array | None


def _halves(data: npt.NDArray[np.uint8]) -> Float32Array:
    return np.ascontiguousarray(data).view(np.float16).astype(F)[..., 0]


def _nibbles(data: Ints) -> Ints:
    return np.concatenate([data & 15, data >> 4], -1)


def read_blocks(kind: str, rows: npt.NDArray[np.uint8]) -> Blocks:
    """Return the integers of a matrix u8[rows, bytes of a row]."""
    raw = rows.reshape(len(rows), -1, _BYTES[kind])
    data = raw.astype(np.int64)
    if kind == "Q6_K":
        return _read_six(raw, data)
    d, dmin = _halves(raw[..., :2]), _halves(raw[..., 2:4]) if kind in _MINIMA else None
    none = np.zeros((len(rows), 0, 0), np.int64)
    if kind.endswith("_K"):
        return _read_super(kind, data, d, dmin)
    at = 2 if dmin is None else 4
    if kind == "Q8_0":
        return Blocks(kind, raw[..., at:].view(np.int8).astype(np.int64), none, none, d, dmin)
    weights = _nibbles(data[..., -16:])
    if kind in ("Q5_0", "Q5_1"):
        fifth = np.unpackbits(raw[..., at : at + 4], axis=-1, bitorder="little").astype(np.int64)
        weights = weights + 16 * fifth
    offset = {"Q4_0": 8, "Q5_0": 16}.get(kind, 0)
    return Blocks(kind, weights - offset, none, none, d, dmin)


def _read_super(kind: str, data: Ints, d: Float32Array, dmin: Float32Array | None) -> Blocks:
    s = data[..., 4:16]
    scales = np.concatenate([s[..., :4] & 63, s[..., 8:] & 15 | s[..., :4] >> 6 << 4], -1)
    minima = np.concatenate([s[..., 4:8] & 63, s[..., 8:] >> 4 | s[..., 4:8] >> 6 << 4], -1)
    weights = _nibbles(data[..., -128:].reshape(*data.shape[:2], 4, 32)).reshape(*data.shape[:2], 8, 32)
    if kind == "Q5_K":
        weights = weights + 16 * (data[..., None, 16:48] >> np.arange(8)[:, None] & 1)
    rows = len(data)
    return Blocks(kind, weights.reshape(rows, -1, 32), scales.reshape(rows, -1, 1), minima.reshape(rows, -1), d, dmin)


def _read_six(raw: npt.NDArray[np.uint8], data: Ints) -> Blocks:
    rows = len(data)
    low = data[..., :128].reshape(rows, -1, 2, 1, 64) >> np.array([0, 4])[:, None] & 15
    high = data[..., 128:192].reshape(rows, -1, 2, 1, 32) >> np.array([0, 2, 4, 6])[:, None] & 3
    weights = low.reshape(rows, -1, 2, 4, 32) + 16 * high - 32
    scales = raw[..., 192:208].view(np.int8).astype(np.int64).reshape(rows, -1, 2)
    return Blocks("Q6_K", weights.reshape(rows, -1, 32), scales, scales[..., :0], _halves(raw[..., 208:]), None)


class Quantised(NamedTuple):
    """Rows in blocks: values [rows, blocks, 32], shifts [rows, blocks], scale f32[rows, blocks] without the shift.

    For the K types a group of 256 has one scale. For the others each block has its own, and no shift.
    """

    values: Ints
    shifts: Ints
    scale: Float32Array


def quantise_blocks(x: Float32Array) -> Quantised:
    blocks = x.reshape(len(x), -1, 32)
    most = np.abs(blocks).max(-1)  # [rows, blocks]
    is_zero = most < F(1e-30)
    factor = np.where(is_zero, F(0), F(127) / np.where(is_zero, F(1), most))
    values = np.rint(blocks * factor[..., None]).astype(np.int64)
    return Quantised(values, np.zeros(most.shape, np.int64), np.where(is_zero, F(0), most / F(127)))


def quantise_groups(x: Float32Array) -> Quantised:
    blocks = x.reshape(len(x), -1, 32)
    each = np.abs(blocks).max(-1)  # [rows, blocks]
    starts = np.arange(0, each.shape[1], 8)
    most = np.maximum.reduceat(each, starts, 1).repeat(8, 1)[:, : each.shape[1]]
    shifts = 3 - sum((each * F(factor) <= most).astype(np.int64) for factor in (2, 4, 8))
    is_zero = most < F(1e-30)
    factor = np.where(is_zero, F(0), (1016 >> shifts).astype(F) / np.where(is_zero, F(1), most))
    values = np.rint(blocks * factor[..., None]).astype(np.int64)
    return Quantised(values, np.where(is_zero, 0, shifts), np.where(is_zero, F(0), most / F(1016)))


def multiply(x: Float32Array, m: Blocks) -> Float32Array:
    """Return f32[rows, outputs]."""
    a = quantise_groups(x) if m.kind.endswith("_K") else quantise_blocks(x)
    parts = m.scales.shape[-1] if m.scales.size else 1  # parts of a block with a scale of their own
    shape = -1, m.weights.shape[1], parts, 32 // parts
    dots = np.einsum("njpi,rjpi->rnjp", m.weights.reshape(shape), a.values.reshape(shape))
    total = np.zeros((len(x), len(m.weights)), F)
    sums = a.values.sum(-1)  # [rows, blocks]
    if m.kind.endswith("_K"):
        powers = 1 << a.shifts
        dots = (dots * m.scales).sum(-1) * powers[:, None]
        for g in range(m.d.shape[1]):
            group, scale = slice(8 * g, 8 * g + 8), a.scale[:, 8 * g, None]
            total = total + dots[..., group].sum(-1).astype(F) * (m.d[:, g] * scale)
            if m.dmin is not None:
                lower = (m.minima[:, group] * (sums * powers)[:, None, group]).sum(-1)
                total = total - lower.astype(F) * (m.dmin[:, g] * scale)
        return total
    for j in range(m.d.shape[1]):
        total = total + dots[..., j, 0].astype(F) * (m.d[:, j] * a.scale[:, j, None])
        if m.dmin is not None:
            total = total + m.dmin[:, j] * (sums[:, j].astype(F) * a.scale[:, j])[:, None]
    return total


def _sum8(x: Float32Array) -> Float32Array:
    """Return the sum of 8 lanes f32[..., 8] in the kernels' order."""
    h = x[..., :4] + x[..., 4:]
    found: Float32Array = (h[..., 0] + h[..., 2]) + (h[..., 1] + h[..., 3])
    return found


def _in_order(products: Float32Array) -> Float32Array:
    """Return the sums over the last but one axis, one after the other."""
    total = np.zeros_like(products[..., 0, :])
    for i in range(products.shape[-2]):
        total = products[..., i, :] + total
    return total


def rms_norm(x: Float32Array, weight: Float32Array, eps: float) -> Float32Array:
    squares = _sum8(_in_order((x * x).reshape(*x.shape[:-1], -1, 8)))
    scale = F(1) / np.sqrt(squares / F(x.shape[-1]) + F(eps))
    normed: Float32Array = x * scale[..., None] * weight
    return normed


def exp(x: Float32Array) -> Float32Array:
    magic = F(12582912)
    x = np.minimum(np.maximum(x, F(-87)), F(88.375))
    n = (x * F(1.44269504) + magic) - magic
    r = n * F(2.12194440e-4) + (n * F(-0.693359375) + x)
    y = np.full_like(x, F(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * r + F(c)
    y = (y * (r * r) + r) + F(1)
    found: Float32Array = (y.view(np.int32) + (n.astype(np.int32) << 23)).view(F)
    return found


def attend(queries: Float32Array, keys: Float32Array, values: Float32Array) -> Float32Array:
    """Causal attention: queries [heads, rows, head_dim], keys and values [kv heads, rows, head_dim]."""
    per, out = len(queries) // len(keys), np.empty_like(queries)
    for h in range(len(queries)):
        for row in range(queries.shape[1]):
            k, v = keys[h // per, : row + 1], values[h // per, : row + 1]
            scores = _sum8(_in_order((queries[h, row] * k).reshape(row + 1, -1, 8)))
            weights = exp(scores - scores.max())
            padded = np.pad(weights, (0, -len(weights) % 8)).reshape(-1, 8)
            out[h, row] = _in_order(weights[:, None] * v) * (F(1) / _sum8(_in_order(padded)))
    return out


class IntegerReference:
    """A GGUF file's model."""

    def __init__(self, path: Path) -> None:
        file = read_gguf(path)
        self.config: dict[str, Any] = gguf_config.model_config(file)
        self._vectors = dict(gguf_tensors.vectors(file, self.config))
        self._matrices: dict[str, Blocks | Float32Array] = {}
        for name, tensor, rows in gguf_tensors.matrices(file, self.config):
            if (kind := gguf_tensors.type_name(tensor)) in _BYTES:
                self._matrices[name] = read_blocks(kind, np.ascontiguousarray(rows))
        self._floats = dict(gguf_tensors.tensors(file, self.config))
        self._factors = gguf_tensors.rope_factors(file)

    def __call__(self, token_ids: list[int]) -> Float32Array:
        """Return the logits f32[tokens, vocab] of each position of one text."""
        x = self._floats["model.embed_tokens.weight"][token_ids]
        said, head_dim = self.config["rope_parameters"], self.config["head_dim"]
        cos, sin = rope_tables(said, head_dim, self._factors, len(token_ids))
        for i in range(self.config["num_hidden_layers"]):
            start = f"model.layers.{i}."
            x = self._attention(start, x, cos, sin) + x
            normed = self._norm(start + "post_attention_layernorm.weight", x)
            gate, up = (self._linear(f"{start}mlp.{name}_proj", normed) for name in ("gate", "up"))
            x = self._linear(start + "mlp.down_proj", gate / (F(1) + exp(-gate)) * up) + x
        tied = self.config["tie_word_embeddings"]
        return self._linear("model.embed_tokens" if tied else "lm_head", self._norm("model.norm.weight", x))

    def _attention(self, start: str, x: Float32Array, cos: Float32Array, sin: Float32Array) -> Float32Array:
        head_dim = self.config["head_dim"]
        normed = self._norm(start + "input_layernorm.weight", x)
        outputs = (self._linear(f"{start}self_attn.{name}_proj", normed) for name in "qkv")
        q, k, v = (out.reshape(len(x), -1, head_dim).swapaxes(0, 1) for out in outputs)
        if start + "self_attn.q_norm.weight" in self._vectors:
            q, k = (self._norm(f"{start}self_attn.{n}_norm.weight", y) for n, y in (("q", q), ("k", k)))
        attended = attend(self._rotate(q, cos, sin) * F(head_dim**-0.5), self._rotate(k, cos, sin), v)
        return self._linear(start + "self_attn.o_proj", attended.swapaxes(0, 1).reshape(len(x), -1))

    def _norm(self, name: str, x: Float32Array) -> Float32Array:
        return rms_norm(x, self._vectors[name], self.config["rms_norm_eps"])

    @staticmethod
    def _rotate(x: Float32Array, cos: Float32Array, sin: Float32Array) -> Float32Array:
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cos + -(b * sin), b * cos + a * sin], -1)

    def _linear(self, name: str, x: Float32Array) -> Float32Array:
        weight = self._matrices.get(name + ".weight")
        if isinstance(weight, Blocks):
            out = multiply(x, weight)
        else:
            out = _in_order(x[:, :, None] * self._floats[name + ".weight"].T)
        bias = self._vectors.get(name + ".bias")
        return out if bias is None else out + bias
