"""Rows of masks: their memory, and the threads that compute them.

One call computes the masks of many sessions, in several threads and without Python's lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING

from specq.protocol import Int32Array
from specq.runtime import available_cores
from specq.verification import host_memory

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    Plain = tuple[LLMatcher, int]  # and the row
    Chain = tuple[LLMatcher, int, list[int]]  # and the first row, and the tokens

SLOW_CALL_S = 0.02  # of all masks of a step
MOST_THREADS = 8
MOST_BUFFERS = 4  # kept: one for each step in flight, and more


def num_threads() -> int:
    """Return how many threads compute masks. One core is left to what goes on meanwhile."""
    return min(max(len(available_cores()) - 1, 1), MOST_THREADS)


class Watch:
    """Seconds since its making: the process must have worked as long, else other processes were the cause."""

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def seconds(self) -> float:
        """Return the lesser of the wall time and the process's processor time."""
        return min(time.perf_counter() - self._began[0], time.process_time() - self._began[1])


@cache
def executor() -> LLExecutor:
    """Return what computes masks in threads, for this process."""
    from llguidance import LLExecutor

    return LLExecutor(num_threads=num_threads())


class Buffers:
    """Memory for masks, used again. To map megabytes anew for each step takes longer than to compute the masks."""

    def __init__(self) -> None:
        self._free: list[Int32Array] = []

    def take(self, size: int) -> Int32Array:
        """Return i32[at least size]."""
        for i, one in enumerate(self._free):
            if len(one) >= size:
                return self._free.pop(i)
        return host_memory(size)

    def give(self, buffer: Int32Array) -> None:
        """Take memory back that nothing uses any more."""
        self._free.append(buffer)
        if len(self._free) > MOST_BUFFERS:
            self._free.pop(0)


BUFFERS = Buffers()


class _Call:
    """A call that another thread makes. `error`: what it raised. `seconds`: as of `Watch`.

    If that thread has not begun when the result is needed, the thread that waits makes the call.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call
        self._claim, self._has_begun, self._has_ended = Lock(), Lock(), Lock()
        self._has_begun.acquire()
        self._has_ended.acquire()
        self.error: BaseException | None = None
        self.seconds = 0.0

    def begin(self, *, waits: bool) -> None:
        """Let the other thread make the call.

        waits  whether to return when that thread has Python's lock, which the call soon gives up. Else the call waits
               for the lock as long as this thread works.
        """
        _calls().put(self)
        if waits:
            self._has_begun.acquire()

    def run(self) -> None:
        """Make the call, unless another thread does."""
        if not self._claim.acquire(blocking=False):
            return
        assert self._call is not None
        self._has_begun.release()
        watch = Watch()
        try:
            self._call()
        except BaseException as error:  # noqa: BLE001 - a panic of Rust code is not an Exception
            self.error = error
        self._call, self.seconds = None, watch.seconds()
        self._has_ended.release()

    @property
    def has_ended(self) -> bool:
        return not self._has_ended.locked()

    def wait(self) -> None:
        """Wait until the call has ended."""
        self.run()
        with self._has_ended:
            pass


@cache
def _calls() -> SimpleQueue[_Call]:
    """Start the thread that makes calls, one after the other. Return its queue."""
    queue: SimpleQueue[_Call] = SimpleQueue()

    def work() -> None:
        while True:
            queue.get().run()

    Thread(target=work, name="masks", daemon=True).start()
    return queue


class MaskRows:
    """Masks i32[rows, words]. Who uses `words` must keep this object.

    - `is_slow`: whether llguidance took long.
    """

    def __init__(self, num_rows: int, num_words: int) -> None:
        self._buffer = BUFFERS.take(num_rows * num_words)
        self.words = self._buffer[: num_rows * num_words].reshape(num_rows, num_words)
        self.is_slow = False
        self._beside: _Call | None = None

    def __del__(self) -> None:
        """Give the memory back, unless another thread may still write into it."""
        if self._beside is None or self._beside.has_ended:
            BUFFERS.give(self._buffer)

    def compute(self, plain: list[Plain], chains: list[Chain]) -> None:
        """Compute the masks of rows, and of chains from their first row on."""
        watch = Watch()
        _compute(self.words, plain, chains)
        self.is_slow |= watch.seconds() > SLOW_CALL_S

    def begin(self, plain: list[Plain], *, waits: bool = True) -> None:
        """Let other threads compute the masks of rows, until `wait`. `waits`: as of `_Call.begin`."""
        words = self.words

        def call() -> None:  # which keeps the memory
            _compute(words, plain, [])

        self._beside = _Call(call)
        self._beside.begin(waits=waits)

    def wait(self) -> bool:
        """Wait for the other threads. Return whether they have computed the masks."""
        if self._beside is None:
            return True
        self._beside.wait()
        self.is_slow = self._beside.seconds > SLOW_CALL_S
        return self._beside.error is None


def _compute(words: Int32Array, plain: list[Plain], chains: list[Chain]) -> None:
    target = words.ctypes.data, words.shape[1] * words.itemsize, len(words)
    if plain:
        executor().unsafe_compute_mask_ptr(plain, *target)
    if chains:
        executor().unsafe_compute_mask_ptr_with_draft_token(chains, *target)
