"""Load a block drafter in the form of `specq.drafting.block.form` as arrays, without torch.

Rule: a drafter that does not fit its target is refused here, before it drafts.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specq.checkpoints import read_json
from specq.checkpoints.draft_form import TOKEN_IDS
from specq.drafting.block import form as block_form
from specq.drafting.head_arrays import input_array, output_array, read_arrays
from specq.drafting.head_checks import check_target, check_token_ids, drafted_tokens
from specq.drafting.head_config import check_layers
from specq.drafting.speculators_form import OUTPUT
from specq.protocol import ConfigError, Float32Array, Int32Array, ModelInfo


class BlockArrays(NamedTuple):
    """A block drafter that fits its target.

    weights    by the names of `block_form.matrix_shapes`, f32.
    mask       f32[hidden]: the embedding of a mask.
    embedding  f32[vocab, hidden]: the target's.
    output     f32[columns, hidden]: rows of the target's output matrix.
    token_ids  i32[columns]: the token of each column, ascending. None: column i is token i.
    """

    shape: block_form.BlockShape
    weights: dict[str, Float32Array]
    mask: Float32Array
    embedding: Float32Array
    output: Float32Array
    token_ids: Int32Array | None

    @property
    def limit_vocab(self) -> int:
        """Drafted tokens are below this."""
        return len(self.output) if self.token_ids is None else int(self.token_ids[-1]) + 1

    @property
    def said(self) -> str:
        """A short description."""
        layers = ", ".join(map(str, self.shape.layers))
        return f"a block drafter of {self.shape.num_places} tokens on layers {layers}"


def load_arrays(heads: str, target: str, info: ModelInfo) -> BlockArrays:
    """Load a block drafter for the target in `target`, a directory or GGUF file; `info` describes the target.

    Raises ConfigError if it is not a block drafter, or is for another hidden size, vocabulary or depth.
    """
    directory = Path(heads)
    if not directory.is_dir():
        raise ConfigError(f"the directory {heads} of {block_form.KIND} does not exist; it must be on this machine")
    shape, said = block_form.block_shape(directory), read_json(Path(target), "config.json")
    check_target(directory, shape, int(said["hidden_size"]), info)
    check_layers(shape.layers, int(said["num_hidden_layers"]), block_form.KIND)
    stored = read_arrays(directory, block_form.WEIGHTS, partial(block_form.reason_against, shape), block_form.KIND)
    token_ids = drafted_tokens(directory, stored, shape.vocab_size, info)
    if token_ids is None and (token_ids := stored.get(TOKEN_IDS)) is not None:
        check_token_ids(directory, token_ids, info)
    embedding = input_array(Path(target))
    output = embedding if shape.has_output else output_array(Path(target))
    _check_matrices(directory, shape, embedding, output, info)
    if token_ids is None:
        output = output[: info.num_tokens]
    else:
        output = stored[OUTPUT][: len(token_ids)].astype(np.float32) if shape.has_output else output[token_ids]
    mask = stored.get(block_form.MASK) if shape.mask_token_id is None else embedding[shape.mask_token_id]
    weights = {name: stored[name].astype(np.float32) for name in block_form.matrix_shapes(shape)}
    return BlockArrays(shape, weights, np.asarray(mask, np.float32), embedding, output, token_ids)


def _check_matrices(
    directory: Path, shape: block_form.BlockShape, embedding: Float32Array, output: Float32Array, info: ModelInfo
) -> None:
    """Raise ConfigError unless the target's matrices can be those of the drafter."""
    for name, matrix in (("embedding", embedding), ("output matrix", output)):
        if matrix.shape[1] != shape.hidden_size or len(matrix) < info.num_tokens:
            raise ConfigError(
                f"{directory}: this block drafter has rows of size {shape.hidden_size}; the {name} of {info.name} has "
                f"the shape {matrix.shape}"
            )
    if shape.mask_token_id is not None and shape.mask_token_id >= len(embedding):
        raise ConfigError(
            f"{directory}: mask_token_id is {shape.mask_token_id}; the embedding of {info.name} has only "
            f"{len(embedding)} rows"
        )
