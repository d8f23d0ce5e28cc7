"""Check the files of heads that an engine loads itself, before it does.

vLLM starts with heads that lack tensors, have values that are not finite, or name tokens that do not exist. Then they
draft only what is never accepted, or an index beyond a table ends the process on a GPU.

Less is asked of a file than where specq loads it: the engine may read more tensors, several files, and other formats.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specq.checkpoints import StoredTensor, read_json, safetensors_header
from specq.drafting.block import form as block_form
from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.head_arrays import read_stored
from specq.drafting.head_config import Shapes
from specq.drafting.speculators_form import OUTPUT, TO_TARGET
from specq.protocol import ConfigError, Float32Array

Stored = dict[str, StoredTensor]


def check_stored(heads: Path, shape: block_form.BlockShape | eagle_form.EagleShape, kind: str) -> None:
    """Raise ConfigError if tensors of heads are missing, have another shape, or name tokens that do not exist.

    `kind`: what messages call them. Only headers and tables are read. Pickles and quantised heads are not checked.
    """
    if read_json(heads, "config.json").get("quantization_config") or not (stored := _stored(heads, kind)):
        return
    needed = _needed(shape)
    if missing := [name for name in needed if name not in stored]:
        raise ConfigError(
            f"{heads}: its safetensors lack {missing[0]} ({len(missing)} tensors are missing), which its config.json "
            f"asks for; copy all files of {kind} again"
        )
    for name, size in needed.items():
        if stored[name].shape != size:
            raise ConfigError(
                f"{stored[name].path} does not fit its config.json: {name} has the shape {stored[name].shape}, and "
                f"should have {size}"
            )
    if TO_TARGET in stored:
        _check_table(heads, read_stored({TO_TARGET: stored[TO_TARGET]}, kind)[TO_TARGET], shape.vocab_size)
    mask = shape.mask_token_id
    if mask is not None and mask >= shape.vocab_size:
        raise ConfigError(
            f"{heads}: mask_token_id is {mask}, but must be a token id of its vocabulary, 0 to {shape.vocab_size - 1}"
        )


def _check_table(heads: Path, offsets: Float32Array, vocab_size: int) -> None:
    ids = np.arange(len(offsets)) + offsets
    if np.any((ids < 0) | (ids >= vocab_size)):
        raise ConfigError(
            f"{heads}: {TO_TARGET} names tokens from {ids.min():.0f} to {ids.max():.0f}, but its tokens must be from 0 "
            f"to {vocab_size - 1}"
        )


def check_values(heads: Path, kind: str) -> None:
    """Raise ConfigError if a tensor of heads has values that are not finite. All tensors are read, one at a time."""
    if not read_json(heads, "config.json").get("quantization_config"):
        for name, one in _stored(heads, kind).items():
            if one.dtype in ("F32", "F16", "BF16"):
                read_stored({name: one}, kind)


def _stored(heads: Path, kind: str) -> Stored:
    """Return the tensors of all safetensors, by the names of `specq train`; {} for pickles."""
    found: Stored = {}
    files = sorted(heads.glob("*.safetensors"))
    if not files and not [*heads.glob("*.bin"), *heads.glob("*.pt")]:
        raise ConfigError(f"{heads} has a config.json of {kind}, but no *.safetensors: copy all of its files")
    for path in files:
        header = safetensors_header(path)
        if not header:
            raise ConfigError(f"{path} cannot be read as safetensors; it may be truncated: copy it again")
        found |= {eagle_form.own_name(name.removeprefix("model.")): one for name, one in header.items()}
    return found


def _needed(shape: block_form.BlockShape | eagle_form.EagleShape) -> Shapes:
    """Return the tensors without which heads compute nothing. Without tables the output matrix may be the target's."""
    if isinstance(shape, block_form.BlockShape):
        of_output: Shapes = {OUTPUT: (shape.draft_vocab_size, shape.hidden_size), TO_TARGET: (shape.draft_vocab_size,)}
        return _named(block_form.matrix_shapes(shape)) | (of_output if shape.has_output else {})
    found = _named(eagle_form.matrix_shapes(shape))
    if shape.has_tables:
        return found | {TO_TARGET: (shape.draft_vocab_size,)}
    return {name: size for name, size in found.items() if name != OUTPUT}


def _named(shapes: Shapes) -> Shapes:
    return {eagle_form.own_name(name): size for name, size in shapes.items()}
