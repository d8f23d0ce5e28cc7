"""The table entry of `auto`, the default: the native engine for a GGUF file on a CPU, else the torch engine."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from specq.engines.interface import Engine, EngineSpec
from specq.engines.native_spec import NativeOptions
from specq.protocol import ConfigError


@dataclass(frozen=True, slots=True)
class AutoOptions(NativeOptions):
    """The keys of [target.auto]; those of [target.torch] and [target.native] count, too."""

    LABEL = "auto"


def _make(
    model: str, *, device: str = "auto", dtype: str = "auto", arithmetic: str = "auto", batch_invariant: bool = False,
    **arguments: Any,
) -> Engine:  # fmt: skip
    from specq.engines.models import runs_natively

    if runs_natively(model, device, dtype):
        from specq.engines.native.engine import NativeEngine

        return NativeEngine(model, dtype=dtype, arithmetic=arithmetic, **arguments)
    if arithmetic != "auto":
        raise ConfigError(f"--arithmetic {arithmetic} needs a GGUF file on a CPU; the torch engine computes {model}")
    from specq.engines.torch.engine import TorchEngine

    return TorchEngine(model, device=device, dtype=dtype, batch_invariant=batch_invariant, **arguments)


def _check(model: str, device: str, dtype: str) -> None:
    if find_spec("torch") is None:
        from specq.engines.models import runs_natively

        runs_natively(model, device, dtype)


AUTO = EngineSpec(_make, AutoOptions, check=_check, colocates=True)
