"""Load an EAGLE-3 head in the form of `specq.drafting.eagle3.form` as a network in memory.

This also determines which of the target's layers it reads. Rule: a head that does not fit its target is refused here,
before it drafts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from specq.checkpoints import read_json
from specq.drafting.eagle3 import form as eagle_form
from specq.drafting.eagle3.network import EagleNetwork
from specq.drafting.head_checks import check_tokenizer
from specq.drafting.head_files import Tensors, input_matrix, read_tensors
from specq.engines.torch.loading import pick_device, runs_triton
from specq.protocol import ConfigError, Int32Array, ModelInfo

if TYPE_CHECKING:
    from specq.drafting.eagle3.fused import FusedEagle

KIND = "an EAGLE-3 head"
HEAD_DIMS = (8, 16, 32, 64, 128)  # dimensions that our kernels support


@dataclass(frozen=True, eq=False)
class EagleHead:
    """A head that fits its target.

    layers     the target's layers whose hidden states it reads. See `Tap`.
    token_ids  i32[columns]: the token of each column of its logits, ascending. None: column i is token i.
    """

    network: EagleNetwork
    layers: tuple[int, ...]
    token_ids: Int32Array | None

    @property
    def names(self) -> torch.Tensor | None:
        """The token of each column, on the device."""
        return None if self.token_ids is None else torch.from_numpy(self.token_ids).to(self.network.fc.weight.device)


def is_eagle(heads: str) -> bool:
    """Return whether a directory of heads holds an EAGLE-3 head."""
    return eagle_form.is_eagle(Path(heads))


def load_eagle(heads: str, target: str, info: ModelInfo, device: str = "auto") -> EagleHead:
    """Load a head for the target in `target`, a directory or GGUF file; `info` describes the target.

    On a CPU the head computes in float32, else in bfloat16. Raises ConfigError if it is not an EAGLE-3 head, or is for
    another hidden size, vocabulary or depth.
    """
    directory = Path(heads)
    if not directory.is_dir():
        raise ConfigError(f"the directory {heads} of {KIND} does not exist; it must be on this machine")
    shape = eagle_form.eagle_shape(directory)
    said = read_json(Path(target), "config.json")
    _check_fit(directory, shape, said, info)
    layers = eagle_form.tapped_layers(shape, int(said["num_hidden_layers"]))
    reason = partial(eagle_form.reason_against, shape)
    tensors = read_tensors(directory, eagle_form.WEIGHTS, reason, KIND)
    token_ids = _token_ids(directory, shape, tensors, info)
    place = pick_device(device)
    dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    network = _network(shape, tensors, Path(target), token_ids, info).to(place, dtype)
    network.requires_grad_(requires_grad=False)
    network.fuse()
    return EagleHead(network.eval(), layers, token_ids)


def eagle_kernels(head: EagleHead) -> FusedEagle | None:
    """Return our own kernels for the rows of a head.

    None if its device does not run them, or the head has uncommon sizes.
    """
    network = head.network
    is_fused = network.midlayer.self_attn.fused.weight.numel() > 0
    if not (runs_triton(network.fc.weight.device) and is_fused and network.shape.head_dim in HEAD_DIMS):
        return None
    from specq.drafting.eagle3.fused import FusedEagle

    return FusedEagle(network, head.names)


def _check_fit(directory: Path, shape: eagle_form.EagleShape, said: dict[str, object], info: ModelInfo) -> None:
    """Raise ConfigError for a head of another hidden size, vocabulary or tokenizer."""
    if shape.target_hidden_size != said["hidden_size"]:
        raise ConfigError(
            f"{directory}: this head takes hidden states of size {shape.target_hidden_size}; those of {info.name} have "
            f"{said['hidden_size']}"
        )
    check_tokenizer(directory, "this head was", shape.num_tokens, shape.tokenizer_hash, info)
    if not info.num_tokens <= shape.vocab_size <= info.vocab_size:
        raise ConfigError(
            f"{directory}: this head is for a vocabulary of {shape.vocab_size} tokens; {info.name} has "
            f"{info.num_tokens}, in a matrix of {info.vocab_size} rows"
        )


def _token_ids(directory: Path, shape: eagle_form.EagleShape, tensors: Tensors, info: ModelInfo) -> Int32Array | None:
    """Return the tokens that may be drafted, one a row of `lm_head`, without the target's padding at the end."""
    offsets = tensors.get(eagle_form.TO_TARGET)
    if offsets is None:
        return None
    ids = np.arange(len(offsets)) + offsets.numpy().astype(np.int64)
    if ids[0] < 0 or ids[-1] >= shape.vocab_size or np.any(ids[1:] <= ids[:-1]):
        raise ConfigError(
            f"{directory}: {eagle_form.TO_TARGET} must contain ascending token ids within the vocabulary, 0 to "
            f"{shape.vocab_size - 1}"
        )
    known = tensors.get(eagle_form.FROM_TARGET)
    if known is not None and not np.array_equal(np.flatnonzero(known.numpy()), ids):
        raise ConfigError(f"{directory}: {eagle_form.TO_TARGET} and {eagle_form.FROM_TARGET} contain different tokens")
    found: Int32Array = ids[ids < info.num_tokens].astype(np.int32)
    if not len(found):
        raise ConfigError(f"{directory}: this head has no token below {info.num_tokens}")
    return found


def _network(
    shape: eagle_form.EagleShape, tensors: Tensors, target: Path, token_ids: Int32Array | None, info: ModelInfo
) -> EagleNetwork:
    embedding = tensors.get(eagle_form.EMBEDDING)
    if embedding is None:
        embedding = input_matrix(target)
    if embedding.shape[1] != shape.hidden_size or len(embedding) < info.num_tokens:
        raise ConfigError(
            f"{target} has an embedding of shape {tuple(embedding.shape)}; this head, which has none of its own, "
            f"needs columns of size {shape.hidden_size}"
        )
    num_columns = info.num_tokens if token_ids is None else len(token_ids)
    about = (eagle_form.EMBEDDING, eagle_form.TO_TARGET, eagle_form.FROM_TARGET)
    state = {name: tensor.float() for name, tensor in tensors.items() if name not in about}
    state["lm_head.weight"] = state["lm_head.weight"][:num_columns]
    network = EagleNetwork(replace(shape, draft_vocab_size=num_columns), embedding.float())
    network.load_state_dict(state)
    return network
