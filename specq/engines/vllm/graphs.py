"""Whole CUDA graphs of vLLM's first model runner for steps in which each session has the same number of rows, more than one.

The runner captures whole graphs for one number of rows a session, its `uniform_decode_query_len`, and tells its dispatcher by that number
whether a step has one; all other steps run in pieces, with attention between them. A graph is kept by its `BatchDescriptor`, which
has both the rows and the requests of a step, so graphs of several numbers do not meet. Here each further number has a dispatcher of its own, and the
runner has that of the step: while it captures, and in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import torch
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

    def get_capture_descs(self) -> list[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Return what is captured, largest first, as vLLM does."""
        return [(CUDAGraphMode.FULL, [self._descriptor(count * self._length) for count in reversed(self._counts)])]

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
    """The whole graphs of a runner for steps with drafts, and which one the next step uses."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._usual = runner.cudagraph_dispatcher, runner.uniform_decode_query_len
        self._dispatchers: dict[int, EvenDispatcher] = {}

    def capture(self, graphs: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Capture graphs: rows of each session -> numbers of sessions; return those for which there was memory."""
        with set_current_vllm_config(self._runner.vllm_config):
            for length in sorted(graphs, reverse=True):
                self._dispatchers[length] = EvenDispatcher(length, graphs[length], self._usual[0])
                self.use(length)
                try:
                    self._runner.capture_model()
                except torch.OutOfMemoryError:
                    del self._dispatchers[length]
                    log.warning("vllm_graphs_not_captured", rows_each=length, reason="no memory is left for them")
                finally:
                    self.use(0)
        return {length: graphs[length] for length in graphs if length in self._dispatchers}

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
    )


def _allows_several(runner: Any) -> bool:
    """Return whether all of the model's attention can be captured with several rows of each request."""
    supports = [
        group.get_metadata_builder().get_cudagraph_support(runner.vllm_config, group.kv_cache_spec)
        for groups in runner.attn_groups
        for group in groups
    ]
    return all(support.value >= AttentionCGSupport.UNIFORM_BATCH.value for support in supports)
