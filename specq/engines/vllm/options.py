"""Turn a verifier's or drafter's options into vLLM's arguments, and explain vLLM's start-up errors. Pure.

The module has the arguments that specq sets, and checks those of a deployment. It describes the model that vLLM runs
with them. For a start-up error it names vLLM's reason and a remedy.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from specq.checkpoints import read_config
from specq.config import MTP
from specq.engines.checkpoint import describe
from specq.protocol import ConfigError, ModelInfo, did_you_mean

MOST_NAMES = 3  # most suggestions for an unknown name

# Set by specq: a change would break how specq drives vLLM, or the verifier has its own option.
RESERVED = {
    "model": "--model",
    "dtype": "--dtype",
    "max_num_seqs": "--max-sessions",
    "max_num_batched_tokens": "--max-prefill-rows",
    "num_gpu_blocks_override": "--kv-slots",
    "scheduler_cls": "",
    "worker_extension_cls": "",
    "speculative_config": "--heads",
    "async_scheduling": "",
    "pipeline_parallel_size": "",
}


def check_names(given: Collection[str], known: Collection[str]) -> None:
    """Raise ConfigError for arguments that specq sets and for arguments that vLLM does not have. It names all of them.

    `known`: the fields of vLLM's `EngineArgs`, empty if unknown.
    """
    wrong = [said for name in given if (said := _wrong(name, known))]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _wrong(name: str, known: Collection[str]) -> str:
    """Return what is wrong with the name of an argument, "" if it is fine."""
    if name in RESERVED:
        own = RESERVED[name]
        return f"engine option {name} is {f'given by {own}' if own else 'set by specq'}"
    if not known or name in known:
        return ""
    hint = did_you_mean(name, set(known) - set(RESERVED), most=MOST_NAMES)
    return f"vLLM has no engine option {name}; {hint or 'none has a name like it: `vllm serve --help=all` lists them'}"


CPU_KV_BYTES = 1 << 30
# Rows of steps for which vLLM captures CUDA graphs. They are as many as by default, but reach twice as many rows:
# prompts of a burst and drafts of many sessions have these. A step takes the next larger.
GRAPH_ROWS = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 32), *range(512, 1025, 64))
BLOCK_SIZES = {"cpu": 32, "cuda": 16}  # used if the number of slots is given; vLLM's CPU kernels need multiples of 32

# Set before vLLM is imported: the engine core runs in this process, which drives it, with the V1 model runner.
_NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
_WISHED = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",  # workers have no data to save
    # Otherwise each worker asks the first one's store for a dump, and logs an error at the end if that worker ended
    # first.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiled at start-up and never used: specq samples
}

# Arguments that may change the text from what the checkpoint's files specify.
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
    """What vLLM reports about a model that it has loaded."""

    dtype: str
    vocab_size: int
    max_length: int
    kv_slots: int


def model_info(arguments: Mapping[str, Any], loaded: Loaded, name: str, tensors: str = "") -> ModelInfo:
    """Return the description of the model that was loaded with these arguments.

    Arguments that change its text are part of its fingerprint. `tensors` as in `describe`.
    """
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
    """Set the variables that vLLM reads at import. With `--device cuda:N` vLLM sees only the devices from N on."""
    os.environ.update(_NEEDED)
    for name, value in _WISHED.items():
        os.environ.setdefault(name, value)
    if num_devices == 1:
        os.environ.setdefault(
            "VLLM_HOST_IP", "127.0.0.1"
        )  # no other host takes part, and the name of the machine's own address may be unknown
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

    Raises ConfigError for options that vLLM does not have, and for options that specq sets.
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


def drafter_options(heads: str, levels: int) -> dict[str, Any]:
    """Return the argument with which vLLM loads a drafter of its own: {} without heads."""
    if not heads:
        return {}
    if heads == MTP:
        return {"speculative_config": {"method": MTP, "num_speculative_tokens": levels}}
    method, most = _method_of(Path(heads)), _most_levels(Path(heads), levels)
    return {"speculative_config": {"model": heads, "method": method, "num_speculative_tokens": most}}


def _most_levels(heads: Path, levels: int) -> int:
    """Return how many of these levels heads were trained for: those of a block without its anchor, for block drafters.

    vLLM would draft with longer blocks.
    """
    said = read_config(heads)
    own = said.get("dflash_config")
    size = said.get("block_size", own.get("block_size") if isinstance(own, dict) else None)
    return min(levels, size - 1) if type(size) is int and size > 1 else levels


def _method_of(heads: Path) -> str | None:
    """Return vLLM's name for a drafter's method, by its config.json. None: vLLM knows it from there itself."""
    said = read_config(heads)
    if "speculators_model_type" in said:
        return None
    return "dflash" if "dflash_config" in said or "DFlash" in str(said.get("architectures")) else "eagle3"


def _graphs(given: Mapping[str, Any], most_rows: int, most_sessions: int) -> dict[str, list[int]]:
    """Return the rows for which CUDA graphs are captured, including the largest steps.

    Empty if the deployment specifies them.
    """
    further = given.get("compilation_config", {})
    own = {*given, *(further if isinstance(further, Mapping) else ("cudagraph_capture_sizes",))}
    if own & {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}:
        return {}
    largest = {rows for rows in (most_rows, most_sessions) if rows <= GRAPH_ROWS[-1]}
    return {"cudagraph_capture_sizes": sorted({rows for rows in GRAPH_ROWS if rows <= most_rows} | largest)}


def _device_kind(device: str) -> str:
    """Return the device kind of the installed vLLM. Raises ConfigError if another kind is requested."""
    from vllm.platforms import current_platform

    kind = str(current_platform.device_type)
    if device != "auto" and device.partition(":")[0] != kind:
        raise ConfigError(f"--device {device}: the installed vLLM runs on {kind or 'no device of this machine'}")
    return kind


_SMALLER = (
    "a smaller --max-model-len, --max-prefill-rows or --max-sessions, --quantization, or --tensor-parallel-size "
    "over more devices"
)

# Parts of messages of vLLM or torch (lower case), and the remedy. The first match counts.
_REMEDIES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("is less than desired",),  # vLLM checks the free memory before it loads the model
        "Others hold memory of the device: end them, or let vLLM take less by a lower --gpu-memory-utilization",
    ),
    (
        (
            "no available memory",
            "kv cache is needed",
            "to serve even a single token",
        ),  # weights fit, one text's KV does not
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
        ("unsupported speculative method: 'mtp'",),
        "The target has no MTP layer that vLLM knows: leave --heads out, or name a directory of heads",
    ),
    (
        ("see stack trace for root cause",),  # one of several worker processes
        "The cause is in what that process printed above; with --tensor-parallel-size 1 it would be named here",
    ),
)


def refusal(model: str, error: BaseException, heads: str = "") -> str:
    """Return the message for the user: vLLM's reason, its causes, and a remedy if known; `heads`: its own drafter."""
    reason = "; ".join(dict.fromkeys(_reasons(error)))
    said = f"vLLM cannot run {model}{f' with the heads {heads}' if heads else ''} so: {reason}"
    for signs, remedy in _REMEDIES:
        if any(sign in reason.lower() for sign in signs):
            return f"{said.rstrip('.')}. {remedy}"
    return said


def _reasons(error: BaseException | None) -> Iterator[str]:
    """Yield the messages of an error and its causes, outermost first, each on one line."""
    while error is not None:
        yield " ".join(str(error).split()) or type(error).__name__
        error = error.__cause__
