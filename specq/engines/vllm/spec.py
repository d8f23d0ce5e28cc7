"""The table entry of the `vllm` engine, and its options, without an import of vLLM.

Rule: option names are checked when they are read. So a wrong name is found before any process starts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specq.config import Options, OwnOptions, option, parsed
from specq.engines.interface import Engine, EngineSpec
from specq.engines.vllm.options import check_names
from specq.engines.vllm.versions import argument_names

PREFILL_ROWS = 2048  # holds the last rows of about a hundred prompts whose blocks are cached


def _check_further(_key: str, options: Options) -> None:
    check_names(parsed(options), argument_names())


@dataclass(frozen=True, slots=True)
class VllmModelOptions(OwnOptions):
    """The options of a model in vLLM, for a target or a drafter. `further` has other arguments of `EngineArgs`."""

    LABEL = "vllm"

    gpu_memory_utilization: float = option(
        0.0, "Share of GPU memory for vLLM, from 0 to 1. 0: vLLM's default.", high=1.0
    )
    max_model_len: int = option(0, "Maximum context length for vLLM, in tokens. 0: the model's.")
    further: Options = option((), "", check=_check_further, is_hidden=True)

    def arguments(self) -> dict[str, Any]:
        """Return the given options as arguments of `EngineArgs`, under the key `options`."""
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
    runs_heads=True,
    takes_scratch=False,
)
