"""The network of an EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one decoder layer over [embedding; state].

P-EAGLE heads may have more layers behind it. For an MTP layer `fc` joins embedding and state, instead of target layers.

Row i of a context reads token i + 1 and the state behind token i, stands at position i, and predicts token i + 2. That
state comes from the target's hidden states (`project`), or, beyond the target's tokens, from the head's own row before.
The caller provides the attention between rows. In training it covers a whole text at once, in drafting a context and a
path of a tree. `fuse` joins matrices with the same input into one. Drafting does this, because a few rows are bound by
memory reads.

Parameters have the names of `specq.drafting.eagle3.form`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.head_layers import (
    Attend,
    Attention,
    FeedForward,
    HeadLayer,
    Positions,
    Rotations,
    fuse_maps,
    hidden_norm,
)
from specq.engines.torch import RowNoise


class TreeContexts(NamedTuple):
    """Contexts of b trees, for a device that grows them without the host.

    kept    [2, places, kv_heads, room, dim]: keys and values of texts, by place.
    roots   i32[3, b]: places, lengths, and the position of the token behind each.
    most    maximum rows of each context.
    states  [b, hidden]: the output of their last rows.
    noise   of each context, with keys i32[b, levels, 2].
    """

    kept: torch.Tensor
    roots: torch.Tensor
    most: int
    states: torch.Tensor
    noise: RowNoise


class _Layer(nn.Module):
    def __init__(self, shape: eagle_form.EagleShape) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (hidden_norm(shape) for _ in range(3))
        num_inputs = 1 if shape.is_mtp else 2
        self.self_attn, self.mlp = Attention(shape, num_inputs, has_biases=shape.has_biases), FeedForward(shape)
        self.attention_norm = hidden_norm(shape) if shape.is_mtp else nn.Identity()
        self._norm_before_residual = shape.norm_before_residual

    def forward(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        rotations: Rotations,
        attend: Attend,
        join: nn.Module | None = None,
    ) -> torch.Tensor:
        """Return the output of rows. `join`: maps embedding and state to the input of a plain layer."""
        normed = self.hidden_norm(states)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        if join is None:
            x = normed if self._norm_before_residual else states
        else:
            x = join(both)
            both = self.attention_norm(x)
        x = x + self.self_attn(both, rotations, attend)
        found: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return found


class EagleNetwork(nn.Module):
    """A head; `embedding` [vocab, hidden] is not trained."""

    def __init__(self, shape: eagle_form.EagleShape, embedding: torch.Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(2 * shape.hidden_size if shape.is_mtp else shape.width, shape.hidden_size, bias=False)
        self.midlayer, self.norm = _Layer(shape), hidden_norm(shape)
        self.layers = nn.ModuleDict({str(number): HeadLayer(shape) for number in range(1, shape.num_layers)})
        if shape.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, shape.width))
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self.rotations = Positions(shape)

    @property
    def num_tokens(self) -> int:
        """How many tokens it can read."""
        return len(self.get_buffer("embedding"))

    def project(self, taps: torch.Tensor) -> torch.Tensor:
        """Return states [..., hidden] from the target's hidden states [..., layers * target's hidden]."""
        taps = taps.to(self.fc.weight.dtype)
        found: torch.Tensor = taps if self.shape.is_mtp else self.fc(taps)
        return found

    def fuse(self) -> None:
        """Join matrices with the same input, on their current device. Do not move them afterwards."""
        fuse_maps(self)

    def forward(
        self,
        states: torch.Tensor,
        token_ids: torch.Tensor,
        rotations: Rotations,
        attend: Callable[..., torch.Tensor],
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the next states [b, rows, hidden].

        states      [b, rows, hidden].
        token_ids   i64[b, rows]: the tokens after the states.
        rotations   of the rows' positions.
        attend      see `Attend`; for layers after the first one also with `layer`, their number.
        positions   i64[b, rows]: their positions. None: all are above 0.
        """
        embedding: torch.Tensor = self.get_buffer("embedding")
        embedded = functional.embedding(token_ids, embedding).to(states.dtype)
        if self.shape.masks_first and positions is not None:
            embedded = embedded.masked_fill((positions == 0)[..., None], 0)
        found: torch.Tensor = self.midlayer(states, embedded, rotations, attend, self.fc if self.shape.is_mtp else None)
        for number, layer in enumerate(self.layers.values(), 1):
            found = layer(found, rotations, partial(attend, layer=number))
        return self.norm(found) if self.shape.is_mtp else found

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., draft tokens] of the token after next, given the output of `forward`."""
        found: torch.Tensor = self.lm_head(states if self.shape.is_mtp else self.norm(states))
        return found
