"""The checks of draft heads, in arrays and in tensors of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from specq.checkpoints.draft_form import TOKEN_IDS
from specq.drafting.head_config import Forms, HeadShape
from specq.drafting.speculators_form import FROM_TARGET, TO_TARGET
from specq.protocol import ConfigError, Int32Array, ModelInfo

Values = TypeVar("Values")

GGUF_INPUTS = ("token_embd.weight",)
GGUF_OUTPUTS = ("output.weight", *GGUF_INPUTS)  # the first that exists


def read_checked(
    directory: Path,
    names: Sequence[str],
    read: Callable[[Path], tuple[Forms, dict[str, Values]]],
    is_finite: Callable[[Values], bool],
    reason_against: Callable[[Forms], str],
    kind: str,
) -> dict[str, Values]:
    """Read the first file that exists, of these names.

    read, is_finite  how to read a file, and whether all values of a tensor are finite.
    reason_against   returns what is wrong with the number formats and shapes, or "".
    kind             what is read, for messages.

    Raises ConfigError if no file exists, the file is damaged, values are not finite, or `reason_against` objects.
    """
    path = next((directory / name for name in names if (directory / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{directory} has neither {' nor '.join(names)}, which hold {kind}")
    forms, tensors = read(path)
    if reason := reason_against(forms):
        raise ConfigError(f"{path} does not fit its config.json: {reason}")
    broken = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if broken:
        raise ConfigError(f"{path} has values that are not finite, in {broken[0]}")
    return tensors


def check_tokenizer(directory: Path, heads: str, num_tokens: int, tokenizer_hash: str, info: ModelInfo) -> None:
    """Raise ConfigError if heads were trained for another tokenizer than the target's.

    heads                       how a message calls them: "this head was" or "these heads were".
    num_tokens, tokenizer_hash  as the heads name them. An empty hash is not checked.
    """
    if tokenizer_hash and (num_tokens, tokenizer_hash) != (info.num_tokens, info.tokenizer_hash):
        raise ConfigError(
            f"{directory}: {heads} trained for another tokenizer ({num_tokens} tokens, {tokenizer_hash[:12]}..) than "
            f"that of {info.name} ({info.num_tokens}, {info.tokenizer_hash[:12]}..)"
        )


def check_target(directory: Path, shape: HeadShape, hidden_size: int, info: ModelInfo) -> None:
    """Raise ConfigError for a head of another hidden size, vocabulary or tokenizer; `hidden_size`: the target's."""
    if shape.target_hidden_size != hidden_size:
        raise ConfigError(
            f"{directory}: this head takes hidden states of size {shape.target_hidden_size}; those of {info.name} have "
            f"{hidden_size}"
        )
    check_tokenizer(directory, "this head was", shape.num_tokens, shape.tokenizer_hash, info)
    if not info.num_tokens <= shape.vocab_size <= info.vocab_size:
        raise ConfigError(
            f"{directory}: this head is for a vocabulary of {shape.vocab_size} tokens; {info.name} has "
            f"{info.num_tokens}, in a matrix of {info.vocab_size} rows"
        )


def check_token_ids(directory: Path, token_ids: Int32Array, info: ModelInfo) -> None:
    """Raise ConfigError unless the tokens of a head's columns ascend within the target's vocabulary."""
    if not len(token_ids) or token_ids[0] < 0 or token_ids[-1] >= info.num_tokens or (np.diff(token_ids) <= 0).any():
        raise ConfigError(f"{directory}: {TOKEN_IDS} must ascend within the vocabulary, 0 to {info.num_tokens - 1}")


def drafted_tokens(directory: Path, arrays: Mapping[str, Any], vocab_size: int, info: ModelInfo) -> Int32Array | None:
    """Return the tokens that may be drafted, one a row of `lm_head`, without the target's padding at the end.

    None: the file has no tables (`specq.drafting.speculators_form`). Raises ConfigError for tables that are not valid.
    """
    offsets, known = arrays.get(TO_TARGET), arrays.get(FROM_TARGET)
    if offsets is None:
        return None
    ids = np.arange(len(offsets)) + offsets.astype(np.int64)
    if ids[0] < 0 or ids[-1] >= vocab_size or np.any(ids[1:] <= ids[:-1]):
        raise ConfigError(
            f"{directory}: {TO_TARGET} must contain ascending token ids within the vocabulary, 0 to {vocab_size - 1}"
        )
    if known is not None and not np.array_equal(np.flatnonzero(known), ids):
        raise ConfigError(f"{directory}: {TO_TARGET} and {FROM_TARGET} contain different tokens")
    found: Int32Array = ids[ids < info.num_tokens].astype(np.int32)
    if not len(found):
        raise ConfigError(f"{directory}: this head has no token below {info.num_tokens}")
    return found
