"""Whole CUDA graphs of vLLM's first model runner for steps in which each session has the same number of rows, more than one.

The runner captures whole graphs for one number of rows a session, its `uniform_decode_query_len`, and tells its dispatcher by that number
whether a step has one; all other steps run in pieces, with attention between them. A graph is kept by its `BatchDescriptor`, which
has both the rows and the requests of a step, so graphs of several numbers do not meet. Here each further number has a dispatcher of its own, and the
runner has that of the step: while it captures, and in each step.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import structlog
import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import AttentionCGSupport

from specq.engines.vllm.even import graph_rows, graphs_up_to

log = structlog.get_logger(__name__)


class EvenDispatcher:
    """Stands in for vLLM's `CudagraphDispatcher` in steps of `length` rows a request; what is no such step, `usual` dispatches."""

    def __init__(self, length: int, counts: Sequence[int], usual: Any) -> None:
        self._length, self._counts, self._usual = length, counts, usual

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def descriptors(self) -> list[BatchDescriptor]:
        """Return what is captured, largest first, as vLLM does."""
        return [self._descriptor(count * self._length) for count in reversed(self._counts)]

    def dispatch(
        self,
        num_tokens: int,
        uniform_decode: bool = False,
        has_lora: bool = False,
        num_active_loras: int = 0,
        valid_modes: set[CUDAGraphMode] | None = None,
        invalid_modes: set[CUDAGraphMode] | None = None,
    ) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """See `CudagraphDispatcher.dispatch`."""
        may_be_whole = CUDAGraphMode.FULL not in (invalid_modes or ()) and (
            not valid_modes or CUDAGraphMode.FULL in valid_modes
        )
        if uniform_decode and may_be_whole and not has_lora:
            rows = graph_rows(self._counts, self._length, -(-num_tokens // self._length))
            if rows:
                return CUDAGraphMode.FULL, self._descriptor(rows)
        found: tuple[CUDAGraphMode, BatchDescriptor] = self._usual.dispatch(
            num_tokens=num_tokens,
            uniform_decode=False,
            has_lora=has_lora,
            num_active_loras=num_active_loras,
            valid_modes=valid_modes,
            invalid_modes=invalid_modes,
        )
        return found

    def _descriptor(self, num_rows: int) -> BatchDescriptor:
        return BatchDescriptor(num_rows, num_rows // self._length, True)


class EvenGraphs:
    """The whole graphs of a runner for steps with drafts, and which one the next step uses.

    num_bytes   of the device's memory that they took
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_bytes = 0
        self._usual = runner.cudagraph_dispatcher, runner.uniform_decode_query_len
        self._dispatchers: dict[int, EvenDispatcher] = {}

    def capture(self, graphs: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Capture graphs: rows of each session -> numbers of sessions; return those that there are then.

        Left out are those for which there is no memory, and all where anything else fails; raises what the device says
        if it is lost. The largest come first, and all in one call of vLLM's where memory allows: only graphs that were
        captured on one stream share the memory of what they compute in between, and each call takes a new stream. It
        also collects all garbage twice.
        """
        self._dispatchers = {
            length: EvenDispatcher(length, counts, self._usual[0]) for length, counts in graphs.items()
        }
        waiting = sorted(graphs, key=lambda length: length * graphs[length][-1], reverse=True)
        with set_current_vllm_config(self._runner.vllm_config):
            while waiting:
                self._runner.cudagraph_dispatcher = SimpleNamespace(get_capture_descs=partial(self._in_turn, waiting))
                try:
                    self.num_bytes += self._runner.capture_model()
                except Exception as error:  # noqa: BLE001 - whatever it is: steps run without these graphs
                    is_memory = isinstance(error, torch.OutOfMemoryError) and bool(waiting)
                    left_out = waiting[:1] if is_memory else sorted(self._dispatchers)
                    reason = "no memory is left for them" if is_memory else f"{type(error).__name__}: {error}"
                    log.warning("vllm_graphs_not_captured", rows_each=left_out, reason=reason)
                    self._leave_out(left_out)
                    waiting = [length for length in waiting if length in self._dispatchers]
                finally:
                    self.use(0)
        if graphs:
            gc.freeze()  # vLLM leaves what it has made to no collector, and its capturing undoes that
        return {length: graphs[length] for length in graphs if length in self._dispatchers}

    def _in_turn(self, waiting: list[int]) -> Iterator[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Say what the runner captures, one number of rows after the other, and make it ready for that; `waiting`
        keeps those that are not done."""
        while waiting:
            self.use(waiting[0])
            yield CUDAGraphMode.FULL, self._dispatchers[waiting[0]].descriptors()
            del waiting[0]

    def _leave_out(self, lengths: Sequence[int]) -> None:
        """Forget the graphs for so many rows of each session, captured or not, and leave vLLM as it is when it has captured."""
        for length in lengths:
            for descriptor in self._dispatchers.pop(length).descriptors():
                self._runner.model.concrete_cudagraph_entries.pop(descriptor, None)
        set_cudagraph_capturing_enabled(False)
        torch.accelerator.synchronize()

    def use(self, length: int) -> None:
        """Let the next step of the runner use a graph for so many rows of each request, where there is one; 0: as vLLM would."""
        usual, usual_length = self._usual
        dispatcher = self._dispatchers.get(length)
        self._runner.cudagraph_dispatcher = dispatcher or usual
        self._runner.uniform_decode_query_len = length if dispatcher else usual_length


def possible_graphs(runner: Any) -> dict[int, tuple[int, ...]]:
    """Return which graphs for steps with drafts can be captured, rows of each session -> numbers of sessions: none where vLLM captures no whole
    ones for plain rows alone, or its attention computes several rows of a request otherwise than in a graph."""
    mode, config = runner.compilation_config.cudagraph_mode, runner.vllm_config
    if runner.uniform_decode_query_len != 1 or not (mode and mode.separate_routine()):
        return {}
    if mode.decode_mode() != CUDAGraphMode.FULL or _is_special(runner) or not _allows_several(runner):
        return {}
    most_rows = min(runner.compilation_config.max_cudagraph_capture_size or 0, runner.max_num_tokens)
    found = graphs_up_to(most_rows, config.scheduler_config.max_num_seqs)
    return {length: counts for length, counts in found.items() if length <= (runner.reorder_batch_threshold or length)}


def _is_special(runner: Any) -> bool:
    """Return whether vLLM runs in a way in which a step's graph depends on more than its rows and requests."""
    parallel, cache = runner.parallel_config, runner.vllm_config.cache_config
    return bool(
        runner.lora_config is not None
        or parallel.data_parallel_size > 1
        or parallel.use_ubatching
        or parallel.decode_context_parallel_size > 1
        or cache.kv_sharing_fast_prefill
        or getattr(runner.compilation_config.pass_config, "enable_sp", False)
        or runner.encoder_cudagraph_manager is not None
        or not isinstance(runner.model, CUDAGraphWrapper)
    )


def _allows_several(runner: Any) -> bool:
    """Return whether all of the model's attention can be captured with several rows of each request."""
    supports = [
        group.get_metadata_builder().get_cudagraph_support(runner.vllm_config, group.kv_cache_spec)
        for groups in runner.attn_groups
        for group in groups
    ]
    return all(support.value >= AttentionCGSupport.UNIFORM_BATCH.value for support in supports)
