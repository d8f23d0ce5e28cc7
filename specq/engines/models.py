"""Models on any device, for drafters: how to load them, to draft chains and to rank tokens.

A model on a CPU runs in the compiled kernels alone, if they can run it. Otherwise torch is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from specq.engines.checkpoint import local_checkpoint
from specq.engines.native import ALONE, HostForward, LoadedModel, NativeChainDrafter, Threads
from specq.engines.native.loaded import Forward
from specq.engines.native.loading import default_of, load, reason_against_native
from specq.engines.native.top import Top, top_tokens
from specq.protocol import ConfigError, Int32Array, SamplingParams
from specq.runtime import how_to_install
from specq.verification import Logits, on_host
from specq.verification.sampling import near_scores


def is_host(device: str) -> bool:
    """Return whether a device is the CPU, also `auto` where torch would find no other, or is not installed.

    torch is not imported to find that out.
    """
    return device == "cpu" or (device == "auto" and not (find_spec("torch") is not None and _has_accelerator()))


def runs_natively(model: str, device: str, dtype: str) -> bool:
    """Return whether the kernels alone run a model, on this device. torch is not imported to find that out.

    The device must be the CPU, as `is_host` says. Raises ConfigError if only torch can run the model, and torch is not
    installed.
    """
    if not is_host(device):
        return False
    has_torch = find_spec("torch") is not None
    checkpoint = local_checkpoint(model)  # None: a name of the hub, where models of torch are
    reason = reason_against_native(checkpoint, dtype) if checkpoint else "it is not a GGUF file"
    if reason and not has_torch:
        raise ConfigError(f"{model} needs torch: {reason}. {how_to_install('torch')}")
    return not reason


def default_arithmetic(checkpoint: Path) -> str:
    """Return the arithmetic of a checkpoint on a CPU, if none is asked for. "": the kernels cannot run it."""
    return "" if reason_against_native(checkpoint) else default_of(checkpoint)


def _has_accelerator() -> bool:
    """Return whether torch may find a device beside the CPU."""
    return sys.platform == "darwin" or any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def load_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_slots: int = 0,
    name: str = "",
    threads: Threads = ALONE,
) -> LoadedModel:
    """Load a checkpoint for any device: for the kernels alone if that is possible, else with torch."""
    if runs_natively(model, device, dtype):
        return load(model, dtype=dtype, kv_slots=kv_slots, name=name, threads=threads)
    from specq.engines.torch.loading import load as load_with_torch

    return load_with_torch(model, device=device, dtype=dtype, kv_slots=kv_slots, name=name, threads=threads)


def chain_drafter(forward: Forward, token_ids: Int32Array | None = None) -> Any:
    """Return a drafter of chains that does not need the host between levels. None if there is none.

    On a GPU it is a `specq.engines.torch.cuda.chain.CudaChainDrafter`. Over the native kernels it is a
    `NativeChainDrafter`. token_ids: as in `LoadedModel`. The GPU drafter uses a column's number as its token.
    """
    if isinstance(forward, HostForward):
        return NativeChainDrafter(forward.native, token_ids)
    if token_ids is not None or forward.kv.device is None or forward.kv.device.type != "cuda":
        return None
    from specq.engines.torch.loading import cuda_chain_drafter

    return cuda_chain_drafter(forward)


def rank_tokens(
    logits: Logits,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    count: int,
    token_ids: Int32Array | None = None,
) -> Top:
    """Return `top_tokens` of the near scores of logits [rows, vocab] (`specq.verification.sampling`), on the host.

    These are the tokens that the target is likely to sample at these positions. token_ids: the token of each column, if
    that is not the column number.
    """
    logits = on_host(logits)
    if not isinstance(logits, np.ndarray):
        from specq.engines.torch.top import rank_on_device

        return rank_on_device(logits, params, positions, count, token_ids)
    columns, log_probs = top_tokens(near_scores(logits, params, positions, token_ids), count)
    return (columns if token_ids is None else token_ids.take(columns, mode="clip")), log_probs
