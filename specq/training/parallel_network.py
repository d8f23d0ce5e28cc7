"""The network that `specq train parallel` trains: an existing draft model with masks, run over texts and masks at once.

Its parameters have the names of `specq.checkpoints.draft_form`, the form in which
`specq.training.draft_network.save_draft` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import LlamaForCausalLM

from specq.checkpoints import draft_form
from specq.engines import read_info
from specq.engines.torch import load_network
from specq.protocol import ConfigError, Int32Array
from specq.text import load_tokenizer_files, num_tokens, tokenizer_hash
from specq.training.architecture import fuse_norms
from specq.training.draft_network import FactorisedEmbedding


class ParallelDraft(NamedTuple):
    """A network, its shape, and the tokens of its head, token_ids i32[columns]."""

    network: LlamaForCausalLM
    shape: draft_form.DraftModelShape
    token_ids: Int32Array


class Masks(NamedTuple):
    """Masks behind texts, i64[texts, n] both.

    anchors   the position of the last token that a mask's pass has read. -1: no mask.
    places    how many positions behind the anchor the mask stands, from 1. It sees earlier masks of the same anchor.
    """

    anchors: torch.Tensor
    places: torch.Tensor


def open_draft(
    draft: Path, target: Path, num_places: int, device: torch.device, frequent: Callable[[], Int32Array], most: int
) -> ParallelDraft:
    """Load a draft model for training, in float32, with masks that begin as the mean of all embeddings.

    Existing masks stay as they are.

    frequent, most   the tokens of its head, if it is of Hugging Face layout and has more than `most` tokens.

    Raises ConfigError for a model that is not a Llama, or not for this target.
    """
    _check_tokenizer(draft, target)
    network: Any = load_network(draft, device, "float32")
    _check_llama(network, draft)
    tokenizer = load_tokenizer_files(target)["tokenizer.json"]
    known, size = getattr(network.lm_head, "token_ids", None), num_tokens(tokenizer)
    head = network.lm_head.weight.detach()
    if known is None:
        known = np.arange(size, dtype=np.int32) if size <= most else frequent()
        head = head[torch.from_numpy(known).to(device)]
    num_masks = getattr(network, "num_masks", 0)
    rows = network.get_input_embeddings().weight.detach()
    words, masks = rows[: len(rows) - num_masks], rows[len(rows) - num_masks :]
    own = draft_form.draft_shape(draft)
    weight, lift = _factors(words, own.embedding_rank if own else words.shape[1])
    fresh = words[:size].mean(0).expand(num_places - 1, -1)
    masks = torch.cat([masks, fresh])[: num_places - 1].clone()
    network.model.embed_tokens = FactorisedEmbedding(weight, lift, masks)
    network.lm_head = nn.Linear(head.shape[1], len(known), bias=False, device=device)
    network.lm_head.weight = nn.Parameter(head.clone())
    fuse_norms(network)
    network.requires_grad_(requires_grad=True)
    return ParallelDraft(network, _shape(network, len(known), (size, tokenizer_hash(tokenizer))), known)


def share(draft: ParallelDraft, start: Path, out: Path) -> ParallelDraft:
    """Let a draft, to be written to `out`, keep the embedding and the head of the starting model.

    The starting model is then needed beside it. Raises ConfigError for a model that is not of specq's own form.
    """
    shape = draft_form.draft_shape(start)
    if shape is None:
        raise ConfigError(
            f"{start} is not of the form that `specq train draft` writes; only such a model can share its embedding "
            f"and head"
        )
    place, _ = draft_form.owner(start, shape)
    embedding = draft.network.model.embed_tokens
    for kept in (embedding.weight, embedding.lift, draft.network.lm_head.weight):
        kept.requires_grad_(requires_grad=False)
    way = os.path.relpath(place.resolve(), out.resolve())
    return draft._replace(shape=replace(draft.shape, shared=Path(way).as_posix()))


def _check_tokenizer(draft: Path, target: Path) -> None:
    own, targets = read_info(draft).tokenizer_hash, read_info(target).tokenizer_hash
    if own != targets:
        raise ConfigError(
            f"{draft} is for another tokenizer ({own[:12] or 'none'}) than {target} ({targets[:12]}); a parallel "
            f"draft model starts from a draft model of its target's vocabulary"
        )


def _check_llama(network: Any, draft: Path) -> None:
    config = network.config
    is_plain = (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "default"
    if (
        config.model_type != "llama"
        or not is_plain
        or any(name.endswith(".bias") for name, _ in network.named_parameters())
    ):
        raise ConfigError(
            f"{draft} is {config.model_type}; a parallel draft model starts from a Llama with plain rotary positions "
            f"and no biases, such as `specq train draft` makes"
        )


def _factors(words: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return embeddings [vocab, hidden] of this rank as factors [vocab, rank] and [hidden, rank]."""
    if rank >= words.shape[1]:
        return words.clone(), torch.eye(words.shape[1], device=words.device)
    directions = torch.linalg.svd(words, full_matrices=False).Vh[:rank]
    return words @ directions.T, directions.T.contiguous()


def _shape(network: Any, head_size: int, tokenizer: tuple[int, str]) -> draft_form.DraftModelShape:
    config, embedding = network.config, network.model.embed_tokens
    return draft_form.DraftModelShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=network.model.layers[0].self_attn.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope_parameters["rope_theta"],
        vocab_size=embedding.weight.shape[0],
        num_tokens=tokenizer[0],
        embedding_rank=embedding.weight.shape[1],
        head_size=head_size,
        tokenizer_hash=tokenizer[1],
        num_places=len(embedding.masks) + 1,
    )


def foresee(network: Any, token_ids: torch.Tensor, masks: Masks, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run texts [texts, length] and masks behind them, whose token ids begin at `vocab_size`.

    Returns the hidden states of both, [texts, length, hidden] and [texts, n, hidden].
    """
    length = token_ids.shape[1]
    steps = torch.arange(length, device=token_ids.device)
    positions = torch.cat([steps.expand(len(token_ids), -1), (masks.anchors + masks.places).clamp(min=0)], 1)
    ids = torch.cat([token_ids, vocab_size + (masks.places - 1).clamp(min=0)], 1)
    decoder = network.model
    hidden = decoder.embed_tokens(ids)
    rotary = decoder.rotary_emb(hidden, positions)
    visible = _visible(length, masks)[:, None]
    for layer in decoder.layers:
        hidden = layer(hidden, attention_mask=visible, position_ids=positions, position_embeddings=rotary)
    normed: torch.Tensor = decoder.norm(hidden)
    return normed[:, :length], normed[:, length:]


def _visible(length: int, masks: Masks) -> torch.Tensor:
    """Return bool[texts, length + n, length + n]: which positions each row sees."""
    anchors, places = masks
    steps = torch.arange(length, device=anchors.device)
    of_masks = (anchors[:, :, None] == anchors[:, None]) & (places[:, None] <= places[:, :, None])
    of_texts = steps <= anchors[:, :, None]
    causal = (steps <= steps[:, None]).expand(len(anchors), -1, -1)
    nothing = causal.new_zeros(len(anchors), length, anchors.shape[1])
    return torch.cat([torch.cat([causal, nothing], 2), torch.cat([of_texts, of_masks], 2)], 1)
