"""Which architectures the torch engine runs.

Those in TESTED are compared with transformers in the test suite. Any other decoder that goes through transformers'
AttentionInterface is compared with transformers' own attention once, when it is loaded, and refused if the logits
differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from specq.engines.native.rows import PackedRows, RowPacker
from specq.engines.torch.forward import Forward
from specq.protocol import ConfigError

TESTED = ("llama", "opt", "qwen2", "qwen3")
PROBE_TOLERANCE = 0.02  # of the largest logit; half precision stays well below, a wrong mask well above


def probe(network: Any, forward: Forward) -> None:
    """Compare an architecture that no test covers with transformers' own attention; ConfigError if they differ. The
    text comes in parts and beside another: attention of its own, which knows nothing of kept keys, sees only the rows
    of a step."""
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
    """Return a step of a part of a text, and of another text as long as that part."""
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
