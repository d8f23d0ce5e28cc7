"""Load a model for the compiled kernels alone, without torch: a GGUF file, or a draft model of specq's own form."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from specq.checkpoints import draft_form, gguf_config, gguf_tensors, is_gguf, read_gguf
from specq.engines.arithmetic import AUTO, EXACT, INTEGER, ROUNDED
from specq.engines.checkpoint import describe, resolve_checkpoint
from specq.engines.native.compiler import SOURCES, kernels
from specq.engines.native.decoder import NamedWeights, decoder, reason_against
from specq.engines.native.draft_weights import draft_blocks, draft_values, read_draft
from specq.engines.native.forward import ALONE, Threads
from specq.engines.native.gguf import BFLOAT16, FLOAT32, gguf_weights, integer_weights
from specq.engines.native.loaded import HostForward, IntegerForward, LoadedModel
from specq.engines.native.panels import BLOCK_FORMATS, FORMATS
from specq.engines.native.rotary import rope_tables
from specq.engines.native.weights import NativeWeights, trim_memory
from specq.protocol import ConfigError
from specq.runtime import available_cores, usual_threads

DEFAULT_SLOTS = 64 * 1024  # used if memory is not the limit
CPU_KV_BYTES = 1 << 30
DTYPES = ("auto", FLOAT32)


def threads_of(threads: int, helper_cores: tuple[int, ...] = ()) -> Threads:
    """Return the threads that compute: `threads` of this process, and the helpers.

    0: the usual number of threads, at most one per core.
    """
    return Threads(threads or min(usual_threads(), len(available_cores())), helper_cores)


def default_slots(num_layers: int, num_kv_heads: int, head_dim: int, item_bytes: int = 4) -> int:
    """Choose the number of KV slots for the host's memory."""
    slot_bytes = 2 * num_layers * num_kv_heads * head_dim * item_bytes
    return max(min(DEFAULT_SLOTS, CPU_KV_BYTES // slot_bytes), 1024)


def reason_against_native(checkpoint: Path, dtype: str = "auto") -> str:
    """Return why the kernels alone cannot load a checkpoint, or ""."""
    if dtype not in DTYPES:
        return f"the kernels compute in float32, not in {dtype}"
    if kernels() is None:
        return "this machine cannot build the kernels: it has no C compiler that works"
    if shape := draft_form.draft_shape(checkpoint):
        config = shape.llama_config()
        return reason_against({**config, "model_type": "llama", "hidden_act": "silu"}, shape.head_dim)
    if not is_gguf(checkpoint):
        return "it is not a GGUF file"
    config = gguf_config.model_config(read_gguf(checkpoint))
    return reason_against(config, config["head_dim"])


def default_of(checkpoint: Path, dtype: str = "auto") -> str:
    """Return the default arithmetic of a checkpoint.

    It is integer for a GGUF file with quantised types that are all supported, else rounded. It is exact if `dtype` is
    given, and for other checkpoints.
    """
    if dtype != "auto" or not is_gguf(checkpoint):
        return EXACT
    types = gguf_tensors.matrix_types(read_gguf(checkpoint))
    return INTEGER if types & BLOCK_FORMATS.keys() and types <= FORMATS.keys() else ROUNDED


def load(
    model: str,
    dtype: str = "auto",
    kv_slots: int = 0,
    name: str = "",
    threads: Threads = ALONE,
    *,
    engine: str = "native",
    arithmetic: str = AUTO,
) -> LoadedModel:
    """Load a checkpoint for the kernels.

    - model: a GGUF file, or a directory in the form of a draft model (`specq.checkpoints.draft_form`).
    - dtype: "float32" or "auto". "float32" is exact arithmetic, unless another one is given.
    - kv_slots: 0: as many as memory allows.
    - engine: the name of the engine that runs it.
    - arithmetic: of a GGUF file (`specq.engines.native.compiler`). "auto": see `default_of`.

    Raises ConfigError if the model cannot be found or used.
    """
    if arithmetic not in (AUTO, *SOURCES):
        raise ConfigError(f"arithmetic is {arithmetic!r}; known are {AUTO}, {', '.join(SOURCES)}")
    checkpoint = resolve_checkpoint(model)
    if reason := reason_against_native(checkpoint, dtype):
        raise ConfigError(f"the native engine cannot run {model}: {reason}; use the torch engine")
    if arithmetic == AUTO:
        arithmetic = default_of(checkpoint, dtype)
    elif arithmetic == INTEGER and not _is_quantised(checkpoint):
        raise ConfigError(
            f"integer arithmetic needs a GGUF file with quantised types ({', '.join(BLOCK_FORMATS)}), and {model} "
            f"is none; use arithmetic = exact"
        )
    library = kernels(arithmetic)
    assert library is not None
    if shape := draft_form.draft_shape(checkpoint):
        loaded = _load_draft(checkpoint, shape, library, kv_slots, name, threads, engine)
    else:
        loaded = _load_gguf(checkpoint, library, arithmetic, kv_slots, name, threads, engine)
    trim_memory()
    return loaded


def _is_quantised(checkpoint: Path) -> bool:
    """Return whether it is a GGUF file with types that integer arithmetic multiplies."""
    return is_gguf(checkpoint) and bool(gguf_tensors.matrix_types(read_gguf(checkpoint)) & BLOCK_FORMATS.keys())


def _load_gguf(
    path: Path,
    library: ctypes.CDLL,
    arithmetic: str,
    kv_slots: int,
    name: str,
    threads: Threads,
    engine: str,
) -> LoadedModel:
    config = gguf_config.model_config(read_gguf(path))
    slots = kv_slots or default_slots(config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"])
    forward: HostForward
    if arithmetic == INTEGER:
        values, (weights, blocks) = FLOAT32, integer_weights(path, library, slots, threads)
        forward, tensors = IntegerForward(weights, slots, library, threads, check=blocks.check), blocks.tensors_hash
    else:
        values, tensors = BFLOAT16 if arithmetic == ROUNDED else FLOAT32, ""
        forward = HostForward(gguf_weights(path, values, slots), slots, library, threads)
    info = describe(
        path,
        engine=engine,
        arithmetic=f"{forward.arithmetic} cpu",
        name=name,
        dtype=FLOAT32,
        vocab_size=config["vocab_size"],
        max_length=config["max_position_embeddings"],
        kv_slots=slots,
        overrides={"gguf_values": values},
        tensors=tensors,
    )
    return LoadedModel(info, forward)


def _load_draft(
    directory: Path,
    shape: draft_form.DraftModelShape,
    library: ctypes.CDLL,
    kv_slots: int,
    name: str,
    threads: Threads,
    engine: str,
) -> LoadedModel:
    slots = kv_slots or default_slots(shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim)
    tensors = read_draft(directory, shape)
    forward = HostForward(_draft_decoder(tensors, shape, slots), slots, library, threads)
    info = describe(
        directory,
        engine=engine,
        arithmetic=f"{forward.arithmetic} cpu",
        name=name,
        dtype=FLOAT32,
        vocab_size=shape.vocab_size,
        max_length=shape.max_position_embeddings,
        kv_slots=slots,
    )
    return LoadedModel(info, forward, tensors[draft_form.TOKEN_IDS].astype(np.int32), shape.num_places - 1)


def _draft_decoder(tensors: dict[str, np.ndarray], shape: draft_form.DraftModelShape, slots: int) -> NativeWeights:
    config, values = shape.llama_config(), draft_values(tensors, shape)
    tables = rope_tables(config["rope_parameters"], shape.head_dim, None, min(shape.max_position_embeddings, slots))
    named = NamedWeights(values, values.__getitem__, draft_blocks(tensors, shape))
    return decoder(config, shape.head_dim, named, tables)
