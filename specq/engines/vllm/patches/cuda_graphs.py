"""Whole CUDA graphs of vLLM's first model runner for steps with several rows per session.

The runner captures whole graphs for one number of rows per session, its `uniform_decode_query_len`. With that number it
also decides in its dispatcher whether a step has a graph. Other steps run in pieces, with attention between them, up to
a number of rows. Beyond that they run one kernel after another. On an H100 such steps of a 7B model take 10 and 25 ms
of host time. The device needs 8.4 ms for 336 rows and 19 ms for 1,024.

Which other graphs can be captured depends on vLLM's attention. With FlashAttention 3, one graph serves any division of
rows among sessions. Prompts may be among them, and there is one graph for each number of rows. Otherwise there is one
graph for each pair (sessions, rows per session). A graph's key is its `BatchDescriptor`: the rows and requests of a
step, and whether all requests have the same number of rows. So the two kinds do not collide. The runner uses our
dispatcher for one kind of graphs (`WholeDispatcher`) instead of its own. It does so during capture and in each step.
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

from specq.engines.vllm.padding import MIXED, MOST_EVEN_ROWS, graphs_up_to, mixed_up_to

log = structlog.get_logger(__name__)


class WholeDispatcher:
    """Replaces vLLM's `CudagraphDispatcher`: a step takes the smallest whole graph that holds its rows.

    `usual` dispatches steps without a graph here.
    """

    def __init__(self, descriptors: Sequence[BatchDescriptor], usual: Any) -> None:
        """Make a dispatcher. `descriptors` are the graphs, ascending.

        All are for equal numbers of rows per request, or all for other steps.
        """
        self._descriptors, self._usual = descriptors, usual
        self._are_even = descriptors[0].uniform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._usual, name)

    def descriptors(self) -> list[BatchDescriptor]:
        """Return the captured descriptors, largest first, like vLLM."""
        return [*reversed(self._descriptors)]

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
        if uniform_decode == self._are_even and may_be_whole and not has_lora:
            descriptor = next((one for one in self._descriptors if one.num_tokens >= num_tokens), None)
            if descriptor is not None:
                return CUDAGraphMode.FULL, descriptor
        found: tuple[CUDAGraphMode, BatchDescriptor] = self._usual.dispatch(
            num_tokens=num_tokens,
            uniform_decode=uniform_decode and not self._are_even,
            has_lora=has_lora,
            num_active_loras=num_active_loras,
            valid_modes=valid_modes,
            invalid_modes=invalid_modes,
        )
        return found


class WholeGraphs:
    """The whole graphs of a runner for steps with several rows per session.

    - num_bytes: device memory that they took.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.num_bytes = 0
        self._usual = runner.cudagraph_dispatcher, runner.uniform_decode_query_len
        self._dispatchers: dict[int, WholeDispatcher] = {}

    def capture(self, graphs: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Capture graphs, given as from `possible_graphs`; return the graphs that now exist.

        If memory is short for one kind, its graphs above half the largest are omitted. If another error occurs, all
        graphs of all kinds are left out. Raises the device's error if the device is lost.

        The largest graphs come first, all in one call of vLLM if memory allows. Only graphs captured on one stream
        share the memory of their intermediate results. Each call takes a new stream. A call also collects all garbage
        twice.
        """
        kept = dict(graphs)
        self._dispatchers = {length: self._dispatcher(length, counts) for length, counts in kept.items()}
        waiting = sorted(kept, key=lambda length: max(length, 1) * kept[length][-1], reverse=True)
        with set_current_vllm_config(self._runner.vllm_config):
            while waiting:
                self._runner.cudagraph_dispatcher = SimpleNamespace(get_capture_descs=partial(self._in_turn, waiting))
                try:
                    self.num_bytes += self._runner.capture_model()
                except Exception as error:  # noqa: BLE001 - any error: steps run without these graphs
                    is_memory = isinstance(error, torch.OutOfMemoryError) and bool(waiting)
                    reason = "no memory is left for them" if is_memory else f"{type(error).__name__}: {error}"
                    fewer = {waiting[0]: _smaller(kept[waiting[0]])} if is_memory else dict.fromkeys(kept, ())
                    log.warning("vllm_graph_capture_failed", rows_each=sorted(fewer), reason=reason)
                    self.leave_out([*fewer])
                    kept |= fewer
                    self._dispatchers |= {
                        length: self._dispatcher(length, left) for length, left in fewer.items() if left
                    }
                    waiting = [length for length in waiting if length in self._dispatchers]
                finally:
                    self.use(MIXED)
        if graphs:
            gc.freeze()  # vLLM exempts its objects from garbage collection, and its capturing undoes that
        return {length: kept[length] for length in graphs if length in self._dispatchers}

    def _dispatcher(self, length: int, counts: Sequence[int]) -> WholeDispatcher:
        """Return the dispatcher to graphs of one kind, given as from `possible_graphs`."""
        most_requests = self._runner.vllm_config.scheduler_config.max_num_seqs
        found = [
            BatchDescriptor(count, min(count, most_requests), False)
            if length == MIXED
            else BatchDescriptor(count * length, count, True)
            for count in counts
        ]
        return WholeDispatcher(found, self._usual[0])

    def _in_turn(self, waiting: list[int]) -> Iterator[tuple[CUDAGraphMode, list[BatchDescriptor]]]:
        """Yield what the runner captures, one row count after another, and prepare the runner for it.

        `waiting` keeps the numbers that are not done.
        """
        while waiting:
            self.use(waiting[0])
            yield CUDAGraphMode.FULL, self._dispatchers[waiting[0]].descriptors()
            del waiting[0]

    def leave_out(self, lengths: Sequence[int]) -> None:
        """Forget graphs, captured or not, named as in `capture`. Leave vLLM in its state after a capture."""
        for length in lengths:
            dispatcher = self._dispatchers.pop(length, None)
            for descriptor in dispatcher.descriptors() if dispatcher else ():
                self._runner.model.concrete_cudagraph_entries.pop(descriptor, None)
        self.use(MIXED)
        set_cudagraph_capturing_enabled(False)
        torch.accelerator.synchronize()

    def use(self, length: int) -> None:
        """Let the next step use a graph for `length` rows per request, if there is one.

        MIXED: rows without padding.
        """
        usual, usual_length = self._usual
        self._runner.cudagraph_dispatcher = self._dispatchers.get(length, usual)
        self._runner.uniform_decode_query_len = (
            length if length != MIXED and length in self._dispatchers else usual_length
        )


def _smaller(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the counts that are at most half of the largest."""
    return tuple(count for count in counts if 2 * count <= counts[-1])


def possible_graphs(runner: Any) -> dict[int, tuple[int, ...]]:
    """Return which graphs can be captured beside vLLM's own.

    Returns MIXED -> numbers of rows, or rows per session -> numbers of sessions. Empty if vLLM does not capture
    separate whole graphs for plain rows. Also empty if its attention computes several rows of a request differently
    outside a graph.
    """
    mode, scheduling = runner.compilation_config.cudagraph_mode, runner.vllm_config.scheduler_config
    if runner.uniform_decode_query_len != 1 or not (mode and mode.separate_routine()):
        return {}
    support = _support(runner)
    if (
        mode.decode_mode() != CUDAGraphMode.FULL
        or _is_special(runner)
        or support < AttentionCGSupport.UNIFORM_BATCH.value
    ):
        return {}
    most_rows = min(runner.compilation_config.max_cudagraph_capture_size or 0, runner.max_num_tokens)
    if support >= AttentionCGSupport.ALWAYS.value:  # vLLM captures them with requests as long as the step
        sizes = mixed_up_to(min(most_rows, runner.max_model_len))
        return {MIXED: sizes} if sizes else {}
    found = graphs_up_to(min(most_rows, MOST_EVEN_ROWS), scheduling.max_num_seqs)
    return {length: counts for length, counts in found.items() if length <= (runner.reorder_batch_threshold or length)}


def _is_special(runner: Any) -> bool:
    """Return whether in vLLM's mode a step's graph depends on more than rows and requests."""
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


def _support(runner: Any) -> int:
    """Return the steps whose whole attention can be captured, as a value of `AttentionCGSupport`."""
    supports = [
        group.get_metadata_builder().get_cudagraph_support(runner.vllm_config, group.kv_cache_spec)
        for groups in runner.attn_groups
        for group in groups
    ]
    return int(min((support.value for support in supports), default=AttentionCGSupport.NEVER.value))
