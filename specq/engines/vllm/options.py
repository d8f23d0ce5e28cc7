"""Options of a verifier or drafter as vLLM's: what specq sets by itself, what a deployment may change, what it may not;
and what the model is that vLLM runs with them.

Which arguments of vLLM's `EngineArgs` a deployment may give by name.

What vLLM says when it cannot start, and what to change about it, in the names of a verifier's own options. Pure.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from specq.engines.checkpoint import describe
from specq.protocol import ConfigError, ModelInfo, did_you_mean

MOST_NAMES = 3  # that are offered in the place of one that vLLM does not have

# Set by specq: the way in which vLLM is driven would break, or there is a verifier's own option for it.
RESERVED = {
    "model": "--model",
    "dtype": "--dtype",
    "max_num_seqs": "--max-sessions",
    "max_num_batched_tokens": "--max-prefill-rows",
    "num_gpu_blocks_override": "--kv-slots",
    "scheduler_cls": "",
    "worker_extension_cls": "",
    "speculative_config": "",
    "async_scheduling": "",
    "pipeline_parallel_size": "",
}


def check_names(given: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError, which names all of them, for arguments that specq sets, and for those that vLLM does not have.

    `known`: the fields of vLLM's `EngineArgs`, empty where they are not known.
    """
    wrong = [said for name in given if (said := _wrong(name, known))]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _wrong(name: str, known: Collection[str]) -> str:
    """Return what is wrong with the name of an argument, "" if nothing is."""
    if name in RESERVED:
        own = RESERVED[name]
        return f"engine option {name} is {f'given by {own}' if own else 'set by specq'}"
    if not known or name in known:
        return ""
    hint = did_you_mean(name, set(known) - set(RESERVED), most=MOST_NAMES)
    return f"vLLM has no engine option {name}; {hint or 'none has a name like it: `vllm serve --help=all` lists them'}"


CPU_KV_BYTES = 1 << 30
# Rows of steps that vLLM captures CUDA graphs for, as many as it does by itself, but up to twice as many rows: prompts
# of a burst and drafts of many sessions have these. A step takes the next larger.
GRAPH_ROWS = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, 1025, 64))
BLOCK_SIZES = {"cpu": 32, "cuda": 16}  # where the number of KV slots is given; vLLM's CPU kernels want multiples of 32

# Before vLLM is imported: the engine core runs in this process, which drives it, with the V1 model runner.
_NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
_WISHED = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # workers have nothing to save
    # Else each worker asks the first one's store for something to dump, and complains at the end if that one was
    # quicker to go.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # is compiled at start-up, and never used: specq samples
}

# Arguments by which another text may come than the checkpoint's files say.
CHANGES_TEXT = (
    "hf_config_path",
    "hf_overrides",
    "kv_cache_dtype",
    "load_format",
    "model_impl",
    "override_attention_dtype",
    "quantization",
    "rope_scaling",
    "rope_theta",
)


class Loaded(Protocol):
    """What vLLM says of a model that it has loaded."""

    dtype: str
    vocab_size: int
    max_length: int
    kv_slots: int


def model_info(arguments: Mapping[str, Any], loaded: Loaded, name: str, tensors: str = "") -> ModelInfo:
    """Return what the model is that was loaded with these arguments; those that change its text are in its fingerprint.
    `tensors` as of `describe`."""
    return describe(
        Path(arguments["model"]),
        engine="vllm",
        name=name,
        dtype=loaded.dtype,
        vocab_size=loaded.vocab_size,
        max_length=loaded.max_length,
        kv_slots=loaded.kv_slots,
        tensors=tensors,
        overrides={key: arguments[key] for key in CHANGES_TEXT if arguments.get(key) not in (None, "", "auto")},
    )


def prepare_environment(device: str, num_devices: int = 1) -> None:
    """Set the variables that vLLM reads when it is imported. With `--device cuda:N` it shall see only devices from N
    on."""
    os.environ.update(_NEEDED)
    for name, value in _WISHED.items():
        os.environ.setdefault(name, value)
    if num_devices == 1:
        os.environ.setdefault(
            "VLLM_HOST_IP", "127.0.0.1"
        )  # nobody else is met; of the machine's own address the name may not be known
    if device.startswith("cuda:"):
        first = int(device.removeprefix("cuda:"))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        there = visible.split(",") if visible else [str(i) for i in range(first + num_devices)]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(there[first : first + num_devices])


def make_options(
    directory: Path,
    *,
    device: str,
    dtype: str,
    kv_slots: int,
    max_sessions: int,
    max_step_rows: int,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the arguments of vLLM's `EngineArgs`; `given` are those of the deployment.

    Raises ConfigError for options that vLLM does not have, and for those that are specq's own.
    """
    from vllm.engine.arg_utils import EngineArgs

    check_names(given, {field.name for field in fields(EngineArgs)})
    kind = _device_kind(device)
    options: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "dtype": "float32" if (dtype, kind) == ("auto", "cpu") else dtype,
        "max_model_len": -1,  # the model's, or what fits into the KV memory
        "max_num_seqs": max_sessions,
        "max_num_batched_tokens": max(max_step_rows, max_sessions),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    options |= _graphs(given, options["max_num_batched_tokens"], max_sessions)
    if kind == "cpu":
        options |= {"enforce_eager": True, "block_size": BLOCK_SIZES[kind], "kv_cache_memory_bytes": CPU_KV_BYTES}
    options |= given
    if kv_slots:
        options.setdefault("block_size", BLOCK_SIZES[kind])
        num_blocks = -(-kv_slots // options["block_size"])
        options["num_gpu_blocks_override"] = num_blocks + 1  # vLLM keeps one block for itself
    return options


def _graphs(given: Mapping[str, Any], most_rows: int, most_sessions: int) -> dict[str, list[int]]:
    """Return for which rows CUDA graphs are captured, unless the deployment says which: those of the largest steps
    included."""
    further = given.get("compilation_config", {})
    own = {*given, *(further if isinstance(further, Mapping) else ("cudagraph_capture_sizes",))}
    if own & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}:
        return {}
    largest = {rows for rows in (most_rows, most_sessions) if rows <= GRAPH_ROWS[-1]}
    return {"cudagraph_capture_sizes": sorted({rows for rows in GRAPH_ROWS if rows <= most_rows} | largest)}


def _device_kind(device: str) -> str:
    """Return the kind of device that the installed vLLM was built for; ConfigError if another is asked for."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if device != "auto" and device.partition(":")[0] != kind:
        raise ConfigError(f"--device {device}: the installed vLLM runs on {kind or 'no device of this machine'}")
    return kind


_SMALLER = (
    "a smaller --max-model-len, --max-prefill-rows or --max-sessions, --quantization, or --tensor-parallel-size "
    "over more devices"
)

# What vLLM or torch says (in small letters), and what helps then. The first that fits counts.
_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("is less than desired",),  # vLLM looks at what is free before it loads anything
        "Others hold memory of the device: end them, or let vLLM take less by a lower --gpu-memory-utilization",
    ),
    (
        (
            "no available memory",
            "kv cache is needed",
            "to serve even a single token",
        ),  # weights fit, a text's KV does not
        f"Weights leave too little for keys and values: a higher --gpu-memory-utilization, {_SMALLER}",
    ),
    (
        ("out of memory", "can't allocate memory", "not enough memory"),
        (
            f"Weights and a step of the largest size do not fit beside what else is there: {_SMALLER}; or a lower "
            f"--gpu-memory-utilization"
        ),
    ),
    (
        ("see stack trace for root cause",),  # a worker process, of several
        "The cause is in what that process printed above; with --tensor-parallel-size 1 it would be named here",
    ),
)


def refusal(model: str, error: BaseException) -> str:
    """Return what to tell the user: vLLM's own reason on one line, those behind it, and what would help where that is
    known."""
    reason = "; ".join(dict.fromkeys(_reasons(error)))
    said = f"vLLM cannot run {model} so: {reason}"
    for signs, remedy in _REMEDIES:
        if any(sign in reason.lower() for sign in signs):
            return f"{said.rstrip('.')}. {remedy}"
    return said


def _reasons(error: BaseException | None) -> Iterator[str]:
    """Yield what an error and those behind it say, outermost first, each on one line."""
    while error is not None:
        yield " ".join(str(error).split()) or type(error).__name__
        error = error.__cause__
