"""Repeated work of fixed shapes on a device. On a GPU each kind of work is one CUDA graph.

The work reads its inputs at fixed addresses. All graphs of one `Replays` share the memory that they allocate. So the
intermediate data of one graph is lost when another one runs. Results are copied to a place of their own. If the device
cannot record some work, no further work is recorded. It then runs without graphs, which costs more host time.

`Inbox` and `fetch` copy numbers between the host and a device without waiting. Integers go to the device through pinned
memory. Results come back with an event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import numpy as np
import structlog
import torch

from specq.protocol import Int32Array
from specq.runtime import traced


class Inbox:
    """Host memory for copies of integers to the device. It is not written again before the copy is complete."""

    def __init__(self, length: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._memory = torch.zeros(length, dtype=torch.int32, pin_memory=on_gpu)
        self.array: Int32Array = self._memory.numpy()
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until `array` may be written."""
        if self._sent is not None:
            self._sent.synchronize()

    def copy(self, used: int, block: torch.Tensor) -> None:
        """Copy the first `used` integers of `array` to the device, without waiting."""
        block[:used].copy_(self._memory[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def fetch(values: torch.Tensor) -> Callable[[], np.ndarray]:
    """Begin to copy values to the host. Return a function that waits for the copy and returns it.

    Work that is launched later may reuse the device memory of `values`.
    """
    on_gpu = values.is_cuda
    found = torch.empty(values.shape, dtype=values.dtype, pin_memory=on_gpu)
    found.copy_(values, non_blocking=on_gpu)
    if not on_gpu:
        return found.numpy
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record(torch.cuda.current_stream(values.device))

    def wait() -> np.ndarray:
        arrived.synchronize()
        return found.numpy()

    return wait


log = structlog.get_logger(__name__)

NUM_INBOXES = 4  # most copies to the device in flight before the host waits

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)  # numbers of contexts for which work is recorded

Work = Callable[[], torch.Tensor]


def padded_batch(count: int) -> int:
    """Return the smallest of BATCH_SIZES that holds `count`."""
    return 1 << (count - 1).bit_length()


class Recorded(Protocol):
    """Recorded work."""

    def replay(self) -> None: ...


class Replays:
    """Work by key, on one device. `uses_graphs`: whether it is recorded; otherwise it runs directly each time."""

    def __init__(self, device: torch.device, *, uses_graphs: bool) -> None:
        self.device, self.uses_graphs = device, uses_graphs
        self._recorded: dict[Hashable, Recorded] = {}
        self._inputs: dict[Hashable, torch.Tensor] = {}
        self._results: dict[Hashable, torch.Tensor] = {}
        self._inboxes: list[Inbox] = []
        self._memory: Any = None  # torch calls it a pool
        self.num_recorded = 0
        self.is_in_service = False  # recordings from now on delay sessions, and are logged

    @classmethod
    def on(cls, device: torch.device) -> Replays | None:
        """Return an instance for a device that can record. None for other devices, where work may have any shape."""
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        return cls(device, uses_graphs=True) if is_nvidia else None

    def send(self, key: Hashable, values: Int32Array) -> torch.Tensor:
        """Copy integers i32[n] to the input of this key's work, without waiting. Return that input.

        n is the same at each call for a key.
        """
        block = self._inputs.get(key)
        if block is None:
            block = self._inputs[key] = torch.zeros(len(values), dtype=torch.int32, device=self.device)
        if not self._inboxes or len(values) > len(self._inboxes[0].array):
            self._inboxes = [Inbox(2 * len(values), self.device) for _ in range(NUM_INBOXES)]
        self._inboxes.append(self._inboxes.pop(0))
        inbox = self._inboxes[0]
        inbox.wait()
        inbox.array[: len(values)] = values
        with self._on_device():
            inbox.copy(len(values), block)
        return block

    def run(self, key: Hashable, work: Work) -> torch.Tensor:
        """Run the work of this key. Return its results, which stay until it runs again.

        All later runs read the addresses that the first run has read. So the work must read memory that outlives it, or
        memory that it allocates itself.
        """
        with self._on_device():
            return self._run(key, work)

    def _run(self, key: Hashable, work: Work) -> torch.Tensor:
        recorded = self._recorded.get(key)
        if recorded is not None:
            recorded.replay()
            return self._results[key]
        found = work()  # this also compiles kernels, which is not allowed during a recording
        if not self.uses_graphs:
            return found
        started = time.perf_counter()
        kept = self._results[key] = found.clone()

        def again() -> None:
            kept.copy_(work())

        try:
            self._recorded[key] = self._record(again)
            self.num_recorded += 1
            if self.is_in_service:
                log.info("cuda_graph_captured_at_runtime", key=key, ms=round(1e3 * (time.perf_counter() - started), 1))
        except RuntimeError as error:  # device errors: no memory, or work that cannot be recorded
            log.warning("cuda_graph_capture_failed", **traced(error))
            self.uses_graphs = False
        return kept

    def _record(self, work: Callable[[], None]) -> Recorded:
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        try:
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                work()
        except BaseException:
            self._end_failed(stream)
            raise
        return graph

    def _end_failed(self, stream: torch.cuda.Stream) -> None:
        """End a failed recording, which torch up to 2.11 does not do by itself.

        Otherwise torch would stay on the recording's stream. This process could then neither record more work nor free
        memory. The target's steps would suffer too.
        """
        torch.cuda.set_stream(stream)
        with suppress(RuntimeError, AttributeError):  # already ended, or an older torch has another name for it
            torch._C._cuda_endAllocateToPool(stream.device_index, self._memory)  # noqa: SLF001 - it has no other name

    def _on_device(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def forget(self) -> None:
        """Forget all recordings, because memory that they read or write has moved."""
        if self._recorded and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a graph may be running
        for kept in (self._recorded, self._inputs, self._results):
            kept.clear()
        self._memory = None  # torch may refuse a pool without graphs
