"""Larger layers and vocabularies that compute the same as small ones, for `inflate` and `inflate_heads`.

Rule: the residual stream is that of the small model, padded only with zeros. So the first channels of any layer's
hidden states are those of the small model, without a scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from specq.models.shapes import Shape

FILL = 0.02  # standard deviation of the weights that do not affect the output
Tensors = Mapping[str, torch.Tensor]
Named = Iterator[tuple[str, torch.Tensor]]


class Placer:
    """Makes the large tensors one after another from small weights, on a device.

    - weights: the small tensors, by the names of the large ones.
    - inputs: input width of an attention layer in hidden sizes. It is 2 in an EAGLE-3 head, whose rows are [embedding;
      state].
    """

    def __init__(
        self, weights: Tensors, small: Shape, large: Shape, device: str, dtype: torch.dtype, inputs: int = 1
    ) -> None:
        self.weights, self.small, self.large, self.dtype = weights, small, large, dtype
        self.device = torch.device(device)
        self._inputs = inputs
        self._random = torch.Generator(self.device).manual_seed(0)
        self._norm_scale = (small.hidden / large.hidden) ** 0.5

    def channels(self, times: int = 1) -> list[int]:
        """Return the indices of the small hidden states in `times` large ones side by side."""
        return [part * self.large.hidden + i for part in range(times) for i in range(self.small.hidden)]

    def layer(self, prefix: str, *, real: bool = True) -> Named:
        """Yield (name within the layer, tensor). An extra layer (not `real`) does not change the residual stream."""
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            yield name, self.norm(prefix + name, real=real)
        yield from self._inputs_of_attention(prefix, real=real)
        large, hidden, inner = self.large, range(self.small.hidden), range(self.small.intermediate)
        name = "self_attn.o_proj.weight"
        zeros = self.zeros(large.hidden, large.heads * large.head_dim)
        yield name, self.place(zeros, prefix + name, hidden, self._head_rows("o"), real=real)
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            matrix = self.filled(large.intermediate, large.hidden)
            yield name, self.place(matrix, prefix + name, inner, hidden, real=real)
        name = "mlp.down_proj.weight"
        zeros = self.zeros(large.hidden, large.intermediate)
        yield name, self.place(zeros, prefix + name, hidden, inner, real=real)

    def _inputs_of_attention(self, prefix: str, *, real: bool) -> Named:
        """Yield the projections to queries, keys and values."""
        large, small = self.large, self.small
        for part, num_heads in (("q", large.heads), ("k", large.kv_heads), ("v", large.kv_heads)):
            name = f"self_attn.{part}_proj."
            matrix = self.filled(num_heads * large.head_dim, self._inputs * large.hidden)
            head_norm = f"{prefix}self_attn.{part}_norm.weight"
            if part == "k":  # the unused rotary pairs of a used head must not count
                matrix[: small.kv_heads * large.head_dim] = 0
            elif head_norm in self.weights:  # nor in the mean of a head's norm
                matrix[:] = 0
            scale = (large.head_dim / small.head_dim) ** 0.5 if part == "q" else 1.0
            rows, columns = self._head_rows(part), self.channels(self._inputs)
            yield name + "weight", self.place(matrix, prefix + name + "weight", rows, columns, scale, real=real)
            if large.qkv_bias:
                yield name + "bias", self.zeros(num_heads * large.head_dim)
            if head_norm in self.weights:
                yield f"self_attn.{part}_norm.weight", self._head_norm(head_norm, is_query=part == "q")

    def _head_norm(self, name: str, *, is_query: bool) -> torch.Tensor:
        """Return the weight of a head's norm. It undoes the scale of queries, so only that of keys has the mean's."""
        weight = torch.ones(self.large.head_dim, dtype=self.dtype, device=self.device)
        scale = 1.0 if is_query else (self.small.head_dim / self.large.head_dim) ** 0.5
        weight[self._rotary_dims()] = self.small_weight(name, scale)
        return weight

    def _rotary_dims(self) -> list[int]:
        """Return the places of a small head's dimensions in a large one, for queries and keys."""
        half, step = self.small.head_dim // 2, self.large.head_dim // self.small.head_dim
        return [i * step for i in range(half)] + [self.large.head_dim // 2 + i * step for i in range(half)]

    def _head_rows(self, part: str) -> list[int]:
        """Return the places of the small model's rows of q, k or v (for o: columns) in the large one."""
        small, large = self.small, self.large
        is_query, is_rotary = part in "qo", part in "qk"
        group = small.heads // small.kv_heads if is_query else 1
        large_group = large.heads // large.kv_heads if is_query else 1
        dims = self._rotary_dims() if is_rotary else range(small.head_dim)
        heads = (kv * large_group + i for kv in range(small.kv_heads) for i in range(group))
        return [head * large.head_dim + dim for head in heads for dim in dims]

    def place(
        self,
        matrix: torch.Tensor,
        name: str,
        rows: Sequence[int],
        columns: Sequence[int],
        scale: float = 1.0,
        *,
        real: bool = True,
    ) -> torch.Tensor:
        """Write a small matrix into some rows and columns of a large one. An extra layer stays unchanged."""
        if real:
            index = torch.tensor(list(rows), device=self.device), torch.tensor(list(columns), device=self.device)
            matrix[index[0][:, None], index[1]] = self.small_weight(name, scale)
        return matrix

    def norm(self, name: str, *, real: bool = True) -> torch.Tensor:
        """Return a norm's weight, scaled for the mean over more channels."""
        weight = torch.ones(self.large.hidden, dtype=self.dtype, device=self.device)
        if real:
            weight[: self.small.hidden] = self.small_weight(name, self._norm_scale)
        return weight

    def onto_hidden(self, name: str, rows: int, times: int = 1) -> torch.Tensor:
        """Return a matrix [rows, times * hidden] that reads only the small hidden states.

        The first rows are its own; the rest is zero in these columns.
        """
        matrix = self.filled(rows, times * self.large.hidden)
        columns = torch.tensor(self.channels(times), device=self.device)
        matrix[:, columns] = 0
        return self.place(matrix, name, range(len(self.weights[name])), columns.tolist())

    def padded(self, name: str) -> torch.Tensor:
        """Return a vector over hidden channels, zero beyond the small ones."""
        vector = self.zeros(self.large.hidden)
        vector[: len(self.weights[name])] = self.small_weight(name)
        return vector

    def small_weight(self, name: str, scale: float = 1.0) -> torch.Tensor:
        """Return a small tensor on the device, scaled and then rounded."""
        return (self.weights[name].to(self.device).float() * scale).to(self.dtype)

    def zeros(self, *sizes: int) -> torch.Tensor:
        """Return zeros."""
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)

    def filled(self, *sizes: int) -> torch.Tensor:
        """Return random values, for weights that do not affect the output. A device computes faster with zeros."""
        matrix = torch.empty(sizes, dtype=self.dtype, device=self.device)
        return matrix.normal_(0, FILL, generator=self._random)
