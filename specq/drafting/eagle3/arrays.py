"""Load an EAGLE-3 head in the form of `specq.drafting.eagle3.form` as arrays, without torch.

This also determines which of the target's layers it reads. Rule: a head that does not fit its target is refused here,
before it drafts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specq.checkpoints import read_json
from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.eagle3 import mtp_form
from specq.drafting.head_arrays import Arrays, input_array, output_array, read_arrays, read_stored
from specq.drafting.head_checks import check_target, drafted_tokens
from specq.protocol import ConfigError, Float32Array, Int32Array, ModelInfo


class EagleArrays(NamedTuple):
    """A head that fits its target.

    shape      its sizes; `draft_vocab_size` is the number of columns of its logits.
    weights    by the names of `eagle_form.matrix_shapes`, f32.
    embedding  f32[vocab, hidden].
    layers     the target's layers whose hidden states it reads. See `Tap`.
    token_ids  i32[columns]: the token of each column of its logits, ascending. None: column i is token i.
    """

    shape: eagle_form.EagleShape
    weights: dict[str, Float32Array]
    embedding: Float32Array
    layers: tuple[int, ...]
    token_ids: Int32Array | None

    @property
    def limit_vocab(self) -> int:
        """Drafted tokens are below this."""
        return self.shape.draft_vocab_size if self.token_ids is None else int(self.token_ids.max()) + 1

    @property
    def said(self) -> str:
        """A short description."""
        if self.shape.is_mtp:
            return f"{self.shape.kind} of the target itself"
        many = f" of {self.shape.num_places} tokens" if self.shape.mask_token_id is not None else ""
        return f"{self.shape.kind}{many} on layers {', '.join(map(str, self.layers))}"


def load_arrays(heads: str, target: str, info: ModelInfo) -> EagleArrays:
    """Load a head for the target in `target`, a directory or GGUF file; `info` describes the target.

    Raises ConfigError if it is not an EAGLE-3 head, or is for another hidden size, vocabulary or depth.
    """
    directory = Path(heads)
    if not directory.is_dir():
        raise ConfigError(f"the directory {heads} of {eagle_form.KIND} does not exist; it must be on this machine")
    if mtp_form.is_mtp(directory):
        return _of_target(directory, Path(target), info)
    shape = eagle_form.eagle_shape(directory)
    said = read_json(Path(target), "config.json")
    check_target(directory, shape, int(said["hidden_size"]), info)
    layers = eagle_form.tapped_layers(shape, int(said["num_hidden_layers"]))
    stored = read_arrays(directory, eagle_form.WEIGHTS, partial(eagle_form.reason_against, shape), shape.kind)
    arrays = {eagle_form.own_name(name): values for name, values in stored.items()}
    token_ids = drafted_tokens(directory, arrays, shape.vocab_size, info)
    embedding = _embedding(shape, arrays, Path(target), info)
    columns = info.num_tokens if token_ids is None else len(token_ids)
    shape = replace(shape, draft_vocab_size=columns, layers=layers)
    weights = {name: arrays[name].astype(np.float32) for name in eagle_form.matrix_shapes(shape)}
    weights[eagle_form.OUTPUT] = weights[eagle_form.OUTPUT][: shape.draft_vocab_size]
    return EagleArrays(shape, weights, embedding, layers, token_ids)


def _of_target(directory: Path, target: Path, info: ModelInfo) -> EagleArrays:
    """Load the MTP layer of a target."""
    if directory.resolve() != target.resolve():
        raise ConfigError(
            f"{directory} has an MTP layer of its own; it drafts for this target only, not for {info.name}"
        )
    found = mtp_form.mtp_layer(directory)
    shape = replace(found.shape, draft_vocab_size=info.num_tokens)
    arrays = read_stored(found.tensors, eagle_form.MTP_KIND)
    if found.has_states_first:
        arrays["fc.weight"] = np.roll(arrays["fc.weight"], shape.hidden_size, 1)
    embedding = _embedding(shape, arrays, target, info)
    output = arrays.get(eagle_form.OUTPUT)
    arrays[eagle_form.OUTPUT] = (output_array(target) if output is None else output)[: info.num_tokens]
    weights = {name: arrays[name].astype(np.float32) for name in eagle_form.matrix_shapes(shape)}
    return EagleArrays(shape, weights, embedding, shape.layers, None)


def _embedding(shape: eagle_form.EagleShape, arrays: Arrays, target: Path, info: ModelInfo) -> Float32Array:
    found = arrays.get(eagle_form.EMBEDDING)
    embedding: Float32Array = (input_array(target) if found is None else found).astype(np.float32)
    if embedding.shape[1] != shape.hidden_size or len(embedding) < info.num_tokens:
        raise ConfigError(
            f"{target} has an embedding of shape {embedding.shape}; this head, which has none of its own, "
            f"needs columns of size {shape.hidden_size}"
        )
    if shape.mask_token_id is not None and shape.mask_token_id >= len(embedding):
        raise ConfigError(
            f"mask_token_id of this P-EAGLE head is {shape.mask_token_id}; its embedding has only {len(embedding)} rows"
        )
    return embedding
