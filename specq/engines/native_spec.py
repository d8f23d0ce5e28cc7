"""The table entry of the `native` engine, and its options, without an import of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specq.config import Cores, OwnOptions, option
from specq.engines.arithmetic import ARITHMETICS, AUTO
from specq.engines.interface import Engine, EngineSpec


@dataclass(frozen=True, slots=True)
class HostOptions(OwnOptions):
    """The keys of engines that compute on a CPU."""

    helper_cores: Cores = option((), "CPU cores for one helper thread each, e.g. 0,2-3. Default: no helper threads.")
    batch_invariant: bool = option(
        default=False,
        text="On a GPU: no text depends on other sessions, on drafts, or on how its prompt was cut into steps. A "
        "step of one row takes up to 9% longer. On a CPU this is always so.",
    )


@dataclass(frozen=True, slots=True)
class NativeOptions(HostOptions):
    """The keys of [target.native]."""

    LABEL = "native"

    arithmetic: str = option(
        AUTO,
        "Arithmetic of a GGUF file on a CPU. `integer`: products of the file's blocks, with activations of 8 bits. "
        "`exact`: products of floats. `rounded`: the same with values rounded to bfloat16. `auto`: integer for a "
        "quantised file, else rounded.",
        choices=ARITHMETICS,
    )


def _make(model: str, *, batch_invariant: bool = True, **arguments: Any) -> Engine:  # noqa: ARG001 - always so
    from specq.engines.native.engine import NativeEngine

    return NativeEngine(model, **arguments)


NATIVE = EngineSpec(_make, NativeOptions, colocates=True)
