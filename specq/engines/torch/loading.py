"""A checkpoint directory, GGUF file or hub name -> its description (`ModelInfo`) and its forward.

For the supported models see `specq.engines.torch.supported` and `specq.engines.torch.rotary`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from specq.checkpoints import draft_form, is_gguf, mtp_tensors, read_config, read_json
from specq.engines.arithmetic import EXACT, ROUNDED
from specq.engines.checkpoint import describe, resolve_checkpoint
from specq.engines.native import ALONE, LoadedModel, Threads, kernels
from specq.engines.native.gguf import BFLOAT16, values_format
from specq.engines.native.loaded import Forward
from specq.engines.native.loading import default_slots, reason_against_native
from specq.engines.native.loading import load as load_native
from specq.engines.native.weights import trim_memory
from specq.engines.torch import rotary
from specq.engines.torch.cuda import weights as fused_weights
from specq.engines.torch.draft_network import load_draft
from specq.engines.torch.forward import KvStore
from specq.engines.torch.generic import GenericForward
from specq.engines.torch.gguf_network import load_gguf
from specq.engines.torch.native import host_forward, supports
from specq.engines.torch.supported import TESTED, probe, unsupported
from specq.protocol import ConfigError

DEVICE_MEMORY_SHARE = 0.85  # of the memory that is free after loading the weights
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SAME_AS = {"mimo": "qwen2"}  # architectures that transformers does not have, which differ by their MTP layers only
FUSED_CAPABILITY = (8, 0)  # bfloat16 on tensor cores


def load(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_slots: int = 0,
    name: str = "",
    eager: bool = False,
    batch_invariant: bool = False,
    threads: Threads = ALONE,
) -> LoadedModel:
    """Load a checkpoint.

    - model: a directory, a GGUF file, or a hub name. A directory is in Hugging Face layout or in the form of a draft
      model (`specq.checkpoints.draft_form`).
    - device: "cpu", "cuda", "cuda:1", "mps", or "auto": the best available device.
    - dtype: "float32", "bfloat16", "float16", or "auto": float32 on a CPU, else the checkpoint's own. For a GGUF file
      "auto" keeps the values exactly or in bfloat16 (`specq.engines.torch.gguf_network`).
    - kv_slots: 0: as many as memory allows.
    - eager: do not use the compiled kernels and CUDA graphs.
    - batch_invariant: on a GPU, a row's bits do not depend on other rows. On a CPU this is always so.
    - threads: the threads that compute in the native kernels.

    Raises ConfigError if the model cannot be found or used.
    """
    checkpoint, place = resolve_checkpoint(model), pick_device(device)
    if place.type == "cpu" and not eager and not reason_against_native(checkpoint, dtype):
        is_rounded = is_gguf(checkpoint) and values_format(checkpoint, dtype, on_host=True) == BFLOAT16
        arguments = str(checkpoint), dtype, kv_slots, name, threads
        return load_native(*arguments, engine="torch", arithmetic=ROUNDED if is_rounded else EXACT)
    network = load_network(checkpoint, place, dtype)
    if batch_invariant and place.type != "cpu" and not _can_be_invariant(network):
        raise ConfigError(
            "batch_invariant needs a model that our kernels compute, on an NVIDIA GPU with triton, in bfloat16 or "
            f"float16; this is {model} in {str(network.dtype).removeprefix('torch.')} on {place}"
        )
    overrides = None
    if is_gguf(checkpoint):
        overrides = {"gguf_values": values_format(checkpoint, dtype, on_host=place.type == "cpu")}
    loaded = assemble(
        network, checkpoint, kv_slots=kv_slots, name=name, eager=eager, threads=threads, overrides=overrides,
        is_invariant=batch_invariant,
    )  # fmt: skip
    del network
    trim_memory()
    return loaded


def load_network(checkpoint: Path, device: torch.device, dtype: str = "auto") -> Any:
    """Load only the transformers model. Arguments as for `load`. Raises ConfigError if it is unusable."""
    kept = _pick_dtype(dtype, device)
    if shape := draft_form.draft_shape(checkpoint):
        return load_draft(checkpoint, shape, device, torch.bfloat16 if isinstance(kept, str) else kept)
    if not is_gguf(checkpoint):
        return _load_network(checkpoint, device, kept)
    values = DTYPES[values_format(checkpoint, dtype, on_host=device.type == "cpu")]
    return load_gguf(checkpoint, device, values if isinstance(kept, str) else kept, values)


def assemble(
    network: Any,
    checkpoint: Path,
    *,
    kv_slots: int = 0,
    name: str = "",
    eager: bool = False,
    threads: Threads = ALONE,
    overrides: Mapping[str, Any] | None = None,
    is_invariant: bool = False,
) -> LoadedModel:
    """Make KV and a forward for a transformers model in memory. `checkpoint` has its tokenizer and files.

    `overrides`: other settings that the model's text depends on, see `specq.engines.checkpoint`.
    """
    if reason := rotary.reason_against(network, _kv_shape(network)[2] if network.config.model_type in TESTED else 0):
        raise unsupported(network, reason)
    slots = kv_slots or _default_slots(network)
    forward = _make_forward(network, slots, eager, threads, is_invariant=is_invariant)
    if network.config.model_type not in TESTED:
        probe(network, forward)
    return loaded_model(network, checkpoint, forward, name, overrides)


def loaded_model(
    network: Any, checkpoint: Path, forward: Forward, name: str, overrides: Mapping[str, Any] | None = None
) -> LoadedModel:
    """Describe a transformers model and return it with its forward. Arguments as for `assemble`."""
    num_masks: int = getattr(network, "num_masks", draft_form.num_places(checkpoint) - 1)
    info = describe(
        checkpoint,
        engine="torch",
        arithmetic=f"{forward.arithmetic} {network.device.type}",
        name=name,
        dtype=str(network.dtype).removeprefix("torch."),
        vocab_size=network.get_input_embeddings().weight.shape[0] - num_masks,
        max_length=network.config.max_position_embeddings,
        kv_slots=forward.kv.num_slots,
        overrides=overrides,
    )
    return LoadedModel(info, forward, getattr(network.get_output_embeddings(), "token_ids", None), num_masks)


def _make_forward(network: Any, num_slots: int, eager: bool, threads: Threads, *, is_invariant: bool) -> Forward:
    """Return the fastest forward that can run this model on its device, with KV of this number of slots."""
    if not eager and _runs_fused(network):
        from specq.engines.torch.cuda.forward import FusedForward

        return FusedForward(network, _make_kv(network, num_slots), is_invariant=is_invariant)
    library = kernels()
    if eager or library is None or not supports(network):
        return GenericForward(network, _make_kv(network, num_slots))
    return host_forward(network, num_slots, library, threads)


def _can_be_invariant(network: Any) -> bool:
    return _runs_fused(network) and network.dtype in (torch.bfloat16, torch.float16)


def _runs_fused(network: Any) -> bool:
    """Return whether the model is on a GPU with our kernels, and of a supported kind."""
    return runs_triton(network.device) and fused_weights.supports(network)


def runs_triton(device: torch.device) -> bool:
    """Return whether our Triton kernels run on a device."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if not is_nvidia or find_spec("triton") is None or kernels() is None:
        return False
    return torch.cuda.get_device_capability(device) >= FUSED_CAPABILITY


def cuda_chain_drafter(forward: Forward) -> Any:
    """Return a drafter of chains on a GPU that does not need the host between levels. None if there is none."""
    if find_spec("triton") is None:
        return None
    from specq.engines.torch.cuda.chain import CudaChainDrafter
    from specq.engines.torch.cuda.forward import FusedForward

    return CudaChainDrafter(forward) if isinstance(forward, FusedForward) else None


def pick_device(device: str) -> torch.device:
    """Return the device of this name; auto: a GPU if available. Raises ConfigError for an unavailable one."""
    here = _devices()
    if device == "auto":
        return torch.device(here[0])
    try:
        place = torch.device(device)
    except RuntimeError:
        place = None
    if (
        place is None
        or place.type not in here
        or (place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count())
    ):
        raise ConfigError(f"device is {device!r}; available to torch: {', '.join(here)}, or give auto")
    return place


def _devices() -> list[str]:
    """Return the kinds of devices that torch can use on this machine, best first."""
    is_there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    return [kind for kind, there in is_there.items() if there]


def _pick_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """Return the `dtype` argument of from_pretrained."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"unknown dtype {dtype!r}; known: auto, {', '.join(DTYPES)}")
    return torch.float32 if device.type == "cpu" else "auto"


def _load_network(directory: Path, device: torch.device, dtype: torch.dtype | str) -> Any:
    read_config(directory)
    config = None
    try:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        config = _config(directory)
        with _without_report(directory):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory, config=config, dtype=dtype, output_loading_info=True
            )
        network, found = loaded
    except Exception as error:  # truncated files and a config.json without a model raise different errors
        reason = rotary.unknown_kind(config) or error
        raise ConfigError(f"{directory} has no causal language model that transformers can load: {reason}") from error
    if missing := sorted(found["missing_keys"]):  # transformers would initialise them with random numbers
        raise ConfigError(f"{directory} does not have all of its tensors: {missing[0]} is missing ({len(missing)} are)")
    if not getattr(config, "max_position_embeddings", None):
        raise unsupported(network, "it has no fixed positions")
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise unsupported(network, "it uses sliding-window attention")
    return network.to(device).train(mode=False)


def _config(directory: Path) -> Any:
    """Return a directory's configuration, as that of the architecture that it has in fact."""
    said = read_json(directory, "config.json")
    if base := SAME_AS.get(str(said.get("model_type"))):
        return AutoConfig.for_model(base, **{key: one for key, one in said.items() if key != "model_type"})
    return AutoConfig.from_pretrained(directory)


@contextmanager
def _without_report(directory: Path) -> Iterator[None]:
    """Do not let transformers report the tensors of MTP layers, which it does not read."""
    before = transformers_logging.get_verbosity()
    if mtp_tensors(directory):
        transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _kv_shape(network: Any) -> tuple[int, int, int]:
    """Return (num_layers, num_kv_heads, head_dim)."""
    config = network.config
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or num_heads, head_dim


def _default_slots(network: Any) -> int:
    """Choose the number of KV slots from the free memory."""
    num_layers, num_kv_heads, head_dim = _kv_shape(network)
    if network.device.type == "cuda":
        slot_bytes: int = 2 * num_layers * num_kv_heads * head_dim * network.dtype.itemsize
        return int(torch.cuda.mem_get_info(network.device)[0] * DEVICE_MEMORY_SHARE) // slot_bytes
    return default_slots(num_layers, num_kv_heads, head_dim, network.dtype.itemsize)


def _make_kv(network: Any, num_slots: int) -> KvStore:
    num_layers, num_kv_heads, head_dim = _kv_shape(network)
    shape = (num_layers, num_kv_heads, num_slots, head_dim)
    keys, values = (torch.empty(shape, dtype=network.dtype, device=network.device) for _ in range(2))
    return KvStore(keys, values)
