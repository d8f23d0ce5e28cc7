"""Which architectures the torch engine runs.

The test suite compares the architectures in TESTED with transformers. Any other decoder that uses transformers'
AttentionInterface is compared with transformers' own attention once, at loading. It is refused if the logits differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specq.engines.native.loaded import Forward
from specq.engines.native.rows import PackedRows, RowPacker
from specq.protocol import ConfigError

TESTED = ("llama", "opt", "qwen2", "qwen3")
PROBE_TOLERANCE = 0.02  # of the largest logit; half precision stays well below it, a wrong mask is well above it


def probe(network: Any, forward: Forward) -> None:
    """Compare an untested architecture with transformers' own attention. Raises ConfigError if the logits differ.

    The text comes in parts and beside another text. A model with its own attention code does not know the kept keys. It
    sees only the rows of a step.
    """
    token_ids = [(7 * i) % network.config.vocab_size for i in range(8)]
    try:
        for start, end in ((0, 5), (5, 8)):
            ours = forward(_probe_rows(token_ids, start, end)).logits[0]
        network.set_attn_implementation("eager")
        with torch.inference_mode():
            theirs = network(torch.tensor([token_ids], device=network.device)).logits[0, -1].float()
        network.set_attn_implementation("specq")
        same = bool((ours - theirs).abs().max() <= PROBE_TOLERANCE * theirs.abs().max())
    except Exception as error:  # an unknown architecture may fail in any way
        raise unsupported(network, str(error)) from error
    if not same:
        raise unsupported(network, "its logits differ from transformers' own")


def _probe_rows(token_ids: Sequence[int], start: int, end: int) -> PackedRows:
    """Return a step with part of a text, and with another text of that length."""
    own, others = np.split(np.arange(2 * len(token_ids), dtype=np.int32), 2)
    packer = RowPacker()
    packer.add_session(own)
    packer.add_chain(token_ids[start:end], own[start:end].tolist(), start, judged=True)
    packer.add_session(others)
    packer.add_chain(token_ids[start:end], others[: end - start].tolist(), 0, judged=False)
    return packer.pack()


def unsupported(network: Any, reason: str) -> ConfigError:
    """Return the error for a model that cannot be run, with the reason."""
    return ConfigError(
        f"the torch engine cannot run {network.config.model_type} ({reason}); supported: {', '.join(TESTED)} and "
        "decoders that need only plain causal attention through transformers' AttentionInterface"
    )
