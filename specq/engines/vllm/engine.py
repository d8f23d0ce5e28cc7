"""The vLLM engine: all models, quantisations and tensor parallelism of vLLM; drafts are chains.

vLLM loads the model, keeps the KV and runs the forward passes. specq decides the contents of each pass. Its own judge
replaces vLLM's samplers, so every strategy works. `specq.engines.vllm` has the parts.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from specq.checkpoints import read_config
from specq.engines.checkpoint import TensorsHash, resolve_directory
from specq.engines.checks import check_asked, check_steps, check_tokens, misfit
from specq.engines.interface import Launched
from specq.engines.profiling import step_times
from specq.engines.vllm.options import drafter_options, make_options, model_info, prepare_environment, refusal
from specq.engines.vllm.self_test import check_drafts
from specq.engines.vllm.versions import is_tested, unfit, warn_if_untested
from specq.protocol import NO_TAP, ConfigError, EngineError, Int32Array, SessionStep, StepOutput, Tap
from specq.runtime import reap
from specq.verification import StepBatch, ahead, places_in_runs, without_handles

if TYPE_CHECKING:
    from specq.engines.vllm.sessions import Sessions

log = structlog.get_logger(__name__)

PATIENCE_S = 1.0  # of the profile at start
# rows of a session in large profiled steps, if these have whole graphs: about as in steps with drafts
ROWS_EACH = 4
COMPILING_S = 10.0  # kernels that are not compiled this long after vLLM has started are compiled here
HALVES = ("bfloat16", "float16")  # types of logits, unless they are converted


class VllmEngine:
    """Fulfils `specq.engines.Engine`.

    - kv_slots: 0: as many as memory allows.
    - max_sessions: of a step.
    - max_step_rows: tokens and nodes of a step.
    - verbose: log the decision on each draft node.
    - options: arguments of vLLM's `EngineArgs`, as in `tensor_parallel_size=2`.
    - heads: the directory of a drafter that vLLM runs within its steps, or MTP. "": none.
    - levels: how many tokens it drafts for each session.
    - eager: do not use compiled kernels and CUDA graphs.
    - threads: has no effect here.

    Raises ConfigError if vLLM cannot run the model with these options.
    """

    num_tap_layers = 0
    is_helped = False
    jumps: tuple[int, ...] = ()
    takes_scratch = False
    takes_masks = judges_late = scores_rows = True

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_slots: int = 0,
        name: str = "",
        eager: bool = False,
        threads: int = 0,
        verbose: bool = False,
        max_sessions: int = 64,
        max_step_rows: int = 1024,
        options: Mapping[str, Any] | None = None,
        heads: str = "",
        levels: int = 8,
    ) -> None:
        prepare_environment(device, int((options or {}).get("tensor_parallel_size", 1)))
        directory = resolve_directory(model, "the vllm engine")
        arguments = make_options(
            directory,
            device=device,
            dtype=dtype,
            kv_slots=kv_slots,
            max_sessions=max_sessions,
            max_step_rows=max_step_rows,
            given={**({"enforce_eager": True} if eager else {}), **(options or {})},
        ) | drafter_options(heads, levels)
        self._sessions, tensors = _start_beside(arguments, verbose=verbose)
        self._most_sessions, self._most_rows = arguments["max_num_seqs"], arguments["max_num_batched_tokens"]
        self._block_slots = arguments.get("block_size", 1)  # is given if the number of KV slots is given
        self.max_chain, self.overlaps = self._sessions.max_chain, self._sessions.overlaps
        self.takes_unread, self.is_apart = self._sessions.takes_unread, self._sessions.is_apart
        self.own_levels = self._sessions.own_levels
        self.even_chains = self._sessions.even_chains  # as in `specq.engines.even_chains`
        self.info = model_info(arguments, self._sessions, name, tensors)
        self._test_itself()

    def open(self, session_id: int, token_ids: Int32Array, owner: str = "") -> int:
        """Start a session; see `Engine.open`."""
        return self._sessions.open(session_id, token_ids, owner)

    def close(self, session_id: int) -> None:
        """End a session; see `Engine.close`."""
        self._sessions.close(session_id)

    @property
    def free_slots(self) -> int:
        return self._sessions.free_slots

    def step(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP) -> StepOutput:
        """Run and judge one forward pass; see `Engine.step`."""
        return self.launch(steps, tap).collect()

    def launch(self, steps: Sequence[SessionStep], tap: Tap = NO_TAP, after: Launched | None = None) -> Launched:
        """Begin a step; see `OverlappingEngine.launch`."""
        batch = StepBatch.of(steps).as_read()
        check_asked(self, batch, tap)
        check_steps(batch, self._sessions.lengths(batch.session_ids), self.info)
        if len(batch.parents):
            self._check_chains(batch)
        check_tokens(batch.token_ids if batch.drafted is None else without_handles(batch.token_ids), batch, self.info)
        self._check_room(batch)
        return self._sessions.launch(batch, tap.drafts)

    def step_times(self, sizes: Sequence[int]) -> list[float]:
        """Measure step times; see `Engine.step_times`."""
        return step_times(
            self,
            sizes,
            patience_s=PATIENCE_S,
            most_sessions=self._most_sessions,
            block_slots=self._block_slots,
            most_each=ROWS_EACH if self._sessions.has_graphs else 0,
        )

    def shutdown(self) -> None:
        """Release the device and stop the worker processes."""
        self._sessions.shutdown()

    def _test_itself(self) -> None:
        """Raise ConfigError if this vLLM was not tested and drafts change its text."""
        version = _version()
        if is_tested(version):
            return
        try:
            check_drafts(self, self._most_sessions)
        except Exception as error:
            self.shutdown()
            raise ConfigError(unfit(version, error)) from error

    def _check_chains(self, batch: StepBatch) -> None:
        """Raise EngineError for a tree that is not a chain, or is too long."""
        within = places_in_runs(batch.num_nodes)
        if int(batch.num_nodes.max()) <= self.max_chain and not np.count_nonzero(batch.parents != within - 1):
            return
        for step in batch:
            num_nodes = step.tree.num_nodes
            if num_nodes > self.max_chain or not np.array_equal(step.tree.parents, np.arange(num_nodes) - 1):
                raise misfit(step, f"the vllm engine takes chains of at most {self.max_chain} nodes")

    def _check_room(self, batch: StepBatch) -> None:
        """Raise EngineError if a step exceeds the free slots, or vLLM's limits from its start."""
        num_rows = len(batch.token_ids)
        if num_rows > self.free_slots:
            raise EngineError(f"{num_rows} KV slots are needed and {self.free_slots} of {self.info.kv_slots} are free")
        if num_rows > self._most_rows or len(batch) > self._most_sessions:
            raise EngineError(
                f"a step of {len(batch)} sessions and {num_rows} rows; vLLM was made for "
                f"{self._most_sessions} and {self._most_rows}"
            )


def _start_beside(arguments: dict[str, Any], *, verbose: bool) -> tuple[Sessions, str]:
    """Start vLLM; meanwhile hash the weights and compile the judge. Returns the sessions and the hash.

    If vLLM forks workers, no thread of this process may run. The hash is then "".
    """
    compiling = _begin_compiling(arguments)
    is_alone = arguments.get("tensor_parallel_size", 1) == 1
    tensors = TensorsHash(Path(arguments["model"])) if is_alone else None
    try:
        return _start(arguments, verbose=verbose), tensors.result() if tensors else ""
    finally:
        if tensors:
            tensors.cancel()
        if compiling:
            reap(compiling, COMPILING_S)


def _begin_compiling(arguments: Mapping[str, Any]) -> subprocess.Popen[bytes] | None:
    """Begin to compile the judge's kernels, if the device has some and the checkpoint specifies sizes."""
    from vllm.platforms import current_platform

    said = read_config(Path(arguments["model"]))
    vocab_size = said.get("vocab_size")
    dtype = arguments["dtype"] if arguments["dtype"] != "auto" else said.get("dtype") or said.get("torch_dtype")
    if not (current_platform.is_cuda() and vocab_size and dtype in HALVES):
        return None
    capability = current_platform.get_device_capability()
    return ahead.begin(vocab_size, dtype, capability.to_int()) if capability else None


def _version() -> str:
    import vllm

    return str(vllm.__version__)


def _start(arguments: dict[str, Any], *, verbose: bool) -> Sessions:
    """Start vLLM. Raises ConfigError if vLLM refuses the arguments or the model."""
    version, drafter = _version(), arguments.get("speculative_config", {})
    heads = str(drafter.get("model") or drafter.get("method") or "")
    warn_if_untested(version)
    try:
        from specq.engines.vllm.sessions import Sessions

        sessions = Sessions(arguments, verbose=verbose)
    except ConfigError:
        raise
    except (ImportError, AttributeError, TypeError, EngineError) as error:  # vLLM is not as specq expects it
        if is_tested(version) and not heads:
            raise
        said = refusal(arguments["model"], error, heads) if is_tested(version) else unfit(version, error)
        raise ConfigError(said) from error
    except Exception as error:  # any error of vLLM or of one of its workers
        raise ConfigError(refusal(arguments["model"], error, heads)) from error
    log.info("vllm_started")
    return sessions
