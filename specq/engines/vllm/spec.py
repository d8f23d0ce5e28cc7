"""The `vllm` engine as the table has it, and its own options; nothing here imports vLLM.

Rule: the names of options are checked when they are read, so that a wrong one is found before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specq.config import Options, OwnOptions, option, parsed
from specq.engines.interface import Engine, EngineSpec
from specq.engines.vllm.options import check_names
from specq.engines.vllm.versions import argument_names

PREFILL_ROWS = 2048  # the ends of some hundred prompts whose blocks are cached fit in


def _check_further(_key: str, options: Options) -> None:
    check_names(parsed(options), argument_names())


@dataclass(frozen=True, slots=True)
class VllmModelOptions(OwnOptions):
    """What a model in vLLM takes, for a target and for drafts; `further` has any other arguments of `EngineArgs`."""

    LABEL = "vllm"

    gpu_memory_utilization: float = option(
        0.0, "Share of GPU memory for vLLM, from 0 to 1. 0: vLLM's default.", high=1.0
    )
    max_model_len: int = option(0, "Maximum context length for vLLM, in tokens. 0: the model's.")
    further: Options = option((), "", check=_check_further, is_hidden=True)

    def arguments(self) -> dict[str, Any]:
        """Return arguments of `EngineArgs` as `options`: those that were given."""
        own = {f.name: value for f in fields(self) if f.name != "further" and (value := getattr(self, f.name))}
        return {"options": own | parsed(self.further)}


@dataclass(frozen=True, slots=True)
class VllmOptions(VllmModelOptions):
    """The keys of [target.vllm]."""

    tensor_parallel_size: int = option(0, "Number of GPUs for vLLM's tensor parallelism. 0: one GPU.", high=1024)
    quantization: str = option("", "Quantization method of vLLM, e.g. fp8. Default: as in the checkpoint.")


def _make(model: str, **arguments: Any) -> Engine:
    from specq.engines.vllm.engine import VllmEngine

    return VllmEngine(model, **arguments)


VLLM = EngineSpec(
    _make,
    VllmOptions,
    renumbers_devices=True,
    prefill_rows=PREFILL_ROWS,
    package="vllm",
    takes_gguf=False,
    takes_heads=False,
    takes_scratch=False,
)
