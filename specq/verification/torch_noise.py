"""The noise of `specq.verification.noise` with torch, on any device: the same bits."""

from __future__ import annotations

import torch

from specq.verification.noise import mix

__all__ = ["gumbel_of_hash_torch", "gumbel_torch", "hash_tokens_torch"]


def hash_tokens_torch(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the bits of `hash_tokens` from int32 tensors."""
    hashes: torch.Tensor = mix(token_ids, keys[..., 0:1], keys[..., 1:2])
    return hashes


def gumbel_torch(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the values of `gumbel` from int32 tensors, on their device."""
    return gumbel_of_hash_torch(hash_tokens_torch(keys, token_ids))


def gumbel_of_hash_torch(hashes: torch.Tensor) -> torch.Tensor:
    """Return `gumbel_of_hash` of int32 hashes, on their device."""
    noise = hashes.double()
    noise.add_(2147483648.5).mul_(-(2.0**-32))
    return noise.log1p_().neg_().log_().neg_().float()
