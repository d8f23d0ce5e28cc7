"""Rotary positions: the supported kinds of scaling, and a model's cosines as tables.

Rule: a position has the same cosines in every text. They depend neither on the text's length nor on its neighbours.
Kept keys were rotated when they were computed. A kind whose frequencies depend on the text's length (longrope) would
rotate later keys differently. One long session would then change the keys of all sessions in its step.

So this module compares outputs of transformers' own modules, not names of kinds. Kinds that transformers adds later are
checked in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TABLE_TYPES = ("default", "linear", "llama3", "yarn")  # kinds that the compiled forwards read from tables
MAX_ROPE_POSITIONS = 1 << 20
_UNFIT = (
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)  # errors of a module that has another calling convention
_TOLERANCE = 1e-4  # of cosines; the same angle at another index of a vector differs by about 1e-7


def rotary_tables(decoder: Any, num_slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [positions, head_dim / 2] from the model's own rotary embedding.

    No session is longer than the tables.
    """
    length = min(decoder.config.max_position_embeddings, num_slots, MAX_ROPE_POSITIONS)
    device = decoder.rotary_emb.inv_freq.device
    cos, sin = decoder.rotary_emb(torch.zeros(1, device=device), torch.arange(length, device=device)[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half], sin[0, :, :half]


def has_tables(decoder: Any) -> bool:
    """Return whether a Llama-like decoder has rotary positions that `rotary_tables` can hold."""
    return getattr(decoder.rotary_emb, "rope_type", "default") in TABLE_TYPES


def kinds(config: Any) -> list[str]:
    """Return the kinds of rotary scaling that a configuration names, ascending.

    Some models have one kind per type of layer.
    """
    said = getattr(config, "rope_parameters", None) or {}
    parts = [said, *said.values()] if isinstance(said, Mapping) else []
    return sorted({str(part["rope_type"]) for part in parts if isinstance(part, Mapping) and part.get("rope_type")})


def unknown_kind(config: Any) -> str:
    """Return the message about a kind that transformers does not have. "" if it has all kinds."""
    known = ("default", *ROPE_INIT_FUNCTIONS)
    unknown = [kind for kind in kinds(config) if kind not in known]
    return f"its rotary scaling is of the kind {unknown[0]!r}; transformers has {', '.join(known)}" if unknown else ""


@torch.no_grad()
def reason_against(network: Any, rotated: int = 0) -> str:
    """Return what is wrong with a model's rotary positions; "" if they are fine.

    It covers texts of up to `max_position_embeddings` tokens.

    - rotated: number of values of a head that its layers rotate. 0: equal to the number of cosines.
    """
    positions = _positions(network.config)
    for module, options in _modules(network):
        try:
            alone, together, again = _cosines(module, positions, options)
        except _UNFIT as error:
            return f"its {_named(network)} cannot be computed: {error}"
        if not (_same(alone, together) and _same(again, together)):
            return (
                f"its {_named(network)} has other frequencies for longer texts: keys that are kept would not fit. "
                f"Each position must have the same cosines in all texts of up to max_position_embeddings "
                f"({network.config.max_position_embeddings}) tokens, as with {', '.join(TABLE_TYPES)}"
            )
        if rotated and together.shape[-1] != rotated:
            return f"its {_named(network)} gives {together.shape[-1]} cosines for the {rotated} values of a head"
    return ""


def _named(network: Any) -> str:
    return f"rotary scaling of the kind {' and '.join(map(repr, kinds(network.config))) or 'that its code has'}"


def _modules(network: Any) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield the modules that make cosines, with the arguments for each type of layer."""
    for module in network.modules():
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            types = getattr(module, "rope_type", None)
            for options in [{"layer_type": key} for key in types] if isinstance(types, Mapping) else [{}]:
                yield module, options


def _positions(config: Any) -> list[int]:
    """Return the last positions of the texts to check, ascending.

    They lie around each length that the configuration names, and around each power of 2.
    """
    longest = config.max_position_embeddings
    said = [config.to_dict().get(key) for key in ("rope_parameters", "original_max_position_embeddings")]
    lengths = {1, longest, *_numbers(said), *(1 << i for i in range(longest.bit_length()))}
    return sorted({length + near for length in lengths for near in (-2, -1, 0) if 0 <= length + near < longest})


def _numbers(said: Any) -> Iterator[int]:
    """Yield the numbers of a configuration that may be lengths."""
    if isinstance(said, Mapping | list):
        for value in said.values() if isinstance(said, Mapping) else said:
            yield from _numbers(value)
    elif isinstance(said, int | float) and 0 < said < 1 << 31:
        yield int(said)


def _cosines(module: Any, positions: list[int], options: dict[str, str]) -> tuple[torch.Tensor, ...]:
    """Return a module's outputs for positions [P, values], computed in three ways.

    First each position as a text's end, then all at once, then each again.
    """
    device = next(module.buffers()).device
    like = torch.zeros(1, 1, 1, device=device)

    def rotary(chosen: list[int]) -> torch.Tensor:
        found = module(like, torch.tensor([chosen], device=device), **options)
        parts = found if isinstance(found, tuple) else (torch.view_as_real(found).flatten(-2),)
        return torch.stack([part.float() for part in parts])

    alone = torch.cat([rotary([one]) for one in positions], -2)
    together = rotary(positions)
    return alone, together, torch.cat([rotary([one]) for one in positions], -2)


def _same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=_TOLERANCE)
