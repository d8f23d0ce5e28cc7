"""The native engine: GGUF files on a CPU, by the compiled kernels alone. It needs NumPy and no torch."""

from __future__ import annotations

from specq.engines.arithmetic import AUTO
from specq.engines.native.loaded import LoadedModel
from specq.engines.native.loading import load, threads_of
from specq.engines.native.steps import PooledEngine
from specq.protocol import ConfigError

DEVICES = ("auto", "cpu")


class NativeEngine(PooledEngine):
    """Fulfils `specq.engines.Engine`.

    The arguments are those of `specq.engines.native.loading.load`. The first may also be the result of that function.
    More arguments:

    - device: "cpu" or "auto".
    - threads: number of threads, within the cores of the process. 0: the usual number, at most one per core.
    - helper_cores: one more thread on each of these cores.
    - verbose: log the decision on each draft node.

    max_sessions and max_step_rows have no effect here.
    """

    drafts_on = "cpu"

    def __init__(
        self,
        model: str | LoadedModel,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        threads: int = 0,
        helper_cores: tuple[int, ...] = (),
        verbose: bool = False,
        max_sessions: int = 0,
        max_step_rows: int = 0,
        arithmetic: str = AUTO,
    ) -> None:
        if device not in DEVICES:
            raise ConfigError(f"device is {device!r}; the native engine computes on the CPU: give cpu or auto")
        team = threads_of(threads, helper_cores)
        if isinstance(model, str):
            model = load(model, dtype=dtype, kv_slots=kv_slots, name=name, threads=team, arithmetic=arithmetic)
        super().__init__(model, team, verbose=verbose)
