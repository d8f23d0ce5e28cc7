"""Load Medusa heads in the form of `specq.drafting.medusa.form` as arrays, without torch.

Rule: heads that do not fit their target are refused here, before they draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specq.checkpoints import draft_form, read_json
from specq.drafting.head_arrays import output_array, read_arrays
from specq.drafting.head_checks import check_token_ids, check_tokenizer
from specq.drafting.medusa import form as medusa_form
from specq.engines.native import rounded
from specq.protocol import ConfigError, Float32Array, Int32Array, ModelInfo

Arrays = Mapping[str, npt.NDArray[Any]]


class HeadArrays(NamedTuple):
    """K heads.

    blocks     (weights f32[K, hidden, hidden], biases f32[K, 1, hidden]) of each residual block.
    output     f32[columns, hidden] for all heads, or f32[K, columns, hidden].
    token_ids  i32[columns]: the token of each column, ascending. None: column i is token i.
    """

    blocks: list[tuple[Float32Array, Float32Array]]
    output: Float32Array
    token_ids: Int32Array | None

    @property
    def said(self) -> str:
        """A short description."""
        return f"{len(self.blocks[0][0])} Medusa heads"


def load_arrays(heads: str, target: str, info: ModelInfo) -> HeadArrays:
    """Load heads for the target in `target`, a directory or GGUF file; `info` describes the target.

    Raises ConfigError if the files are not Medusa heads, are for another hidden size or vocabulary, or were trained
    together with another target.
    """
    directory = Path(heads)
    if not directory.is_dir():
        raise ConfigError(f"the directory {heads} of Medusa heads does not exist; it must be on this machine")
    shape = medusa_form.heads_shape(directory)
    arrays = read_arrays(directory, medusa_form.WEIGHTS, partial(medusa_form.reason_against, shape), medusa_form.KIND)
    _check_fit(directory, shape, arrays, Path(target), info)
    values = {name: array_value(name, arrays) for name in arrays if not _is_about(name)}
    token_ids = arrays.get(draft_form.TOKEN_IDS)
    return HeadArrays(_blocks(shape, values), _output(shape, values, token_ids, Path(target)), token_ids)


def _is_about(name: str) -> bool:
    """Return whether an array describes how to read others."""
    return name == draft_form.TOKEN_IDS or name.endswith(draft_form.SCALE)


def _check_fit(directory: Path, shape: medusa_form.HeadsShape, arrays: Arrays, target: Path, info: ModelInfo) -> None:
    """Raise ConfigError for heads of another hidden size or vocabulary."""
    said = read_json(target, "config.json")
    wanted = said.get("word_embed_proj_dim") or said["hidden_size"]  # the former: input size of OPT's output matrix
    hidden = arrays[medusa_form.block_names(0, 0)[0]].shape[1]
    if hidden != wanted:
        raise ConfigError(
            f"{directory}: these heads take hidden states of size {hidden}; those of {info.name} have {wanted}"
        )
    check_tokenizer(directory, "these heads were", shape.num_tokens, shape.tokenizer_hash, info)
    known = ("", info.fingerprint, info.former_fingerprint)
    if info.fingerprint and shape.target_fingerprint not in known:
        raise ConfigError(
            f"{directory}: these heads were trained together with another target (fingerprint "
            f"{shape.target_fingerprint[:12]}..) than {info.name} ({info.fingerprint[:12]}..); serve that target"
        )
    ids, output = arrays.get(draft_form.TOKEN_IDS), arrays.get(medusa_form.output_name(shape, 0))
    if ids is not None:
        check_token_ids(directory, ids, info)
    elif output is not None and not info.num_tokens <= len(output) <= info.vocab_size:
        raise ConfigError(
            f"{directory}: these heads output {len(output)} tokens; {info.name} has {info.num_tokens}, in a matrix "
            f"of {info.vocab_size} rows"
        )


def array_value(name: str, arrays: Arrays) -> Float32Array:
    """Return an array's values; 8-bit values are rounded to bfloat16, to be the same everywhere."""
    values, scale = arrays[name].astype(np.float32), arrays.get(name + draft_form.SCALE)
    return values if scale is None else rounded(values * scale[:, None])


def _blocks(shape: medusa_form.HeadsShape, values: Mapping[str, Float32Array]) -> list[tuple[Any, Any]]:
    blocks = []
    for layer in range(shape.medusa_num_layers):
        names = [medusa_form.block_names(head, layer) for head in range(shape.medusa_num_heads)]
        weights, biases = (np.stack([values[name] for name in of_all]) for of_all in zip(*names, strict=True))
        blocks.append((weights, biases[:, None]))
    return blocks


def _output(
    shape: medusa_form.HeadsShape, values: Mapping[str, Float32Array], token_ids: Int32Array | None, target: Path
) -> Float32Array:
    """Return the heads' matrices [K, columns, hidden], or needed rows of the target's [columns, hidden]."""
    names = [medusa_form.output_name(shape, head) for head in range(shape.medusa_num_heads)]
    if names[0] in values:
        return np.stack([values[name] for name in names])
    rows = output_array(target)
    return rows if token_ids is None else rows[token_ids]
