"""Threads that share a forward pass: the same bits as one, there only when needed, on their cores, and gone
afterwards."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from specq.engines.native import compiler
from specq.engines.native import forward as native
from specq.engines.native.forward import ALONE, MIN_SHARED_ROWS, Threads
from specq.engines.native.rows import PackedRows, RowPacker
from specq.engines.native.sharing import FIRST, TRIAL
from specq.engines.torch.engine import TorchEngine
from specq.engines.torch.loading import load
from specq.protocol.errors import ConfigError
from specq.runtime.usage import available_cores
from specq.testing.checkpoints import CONFIGS, make_checkpoint, random_tokens

SLOTS = 1024
RUN_AND_LEAVE = """
import sys
import numpy as np
from specq.engines.torch.engine import TorchEngine
engine = TorchEngine(sys.argv[1], device="cpu", kv_slots=256, threads=3)
engine.step_times([32, 32])
print("done", flush=True)
"""

pytestmark = pytest.mark.skipif(compiler.kernels() is None, reason="no C compiler")
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells threads and their cores")


def random_batch(rng: np.random.Generator, num_sessions: int) -> PackedRows:
    """Sessions of any context, each with a chunk of its chain and a bush of nodes; slots as they come."""
    packer, slots = RowPacker(), rng.permutation(SLOTS).astype(np.int32)
    for own in np.array_split(slots, num_sessions):
        length = int(rng.integers(1, min(len(own) - 8, 300)))
        count = int(rng.integers(1, min(length, 9) + 1))
        table, start = own[:length], length - count
        packer.add_session(table)
        packer.add_chain(random_tokens(rng, count).tolist(), table[start:].tolist(), start, bool(rng.integers(4)))
        line: list[int] = []
        for slot in own[length : length + int(rng.integers(0, 6))].tolist():
            line = [*(line if rng.integers(2) else ()), slot]
            packer.add_node(int(random_tokens(rng, 1)[0]), slot, length + len(line) - 1, length, line)
    return packer.pack()


@pytest.fixture
def llama(tmp_path: Path) -> str:
    return str(make_checkpoint("llama", tmp_path))


def a_step(num_rows: int) -> PackedRows:
    packer, table = RowPacker(), np.arange(num_rows, dtype=np.int32)
    packer.add_session(table)
    packer.add_chain([5] * num_rows, table.tolist(), 0, judged=True)
    return packer.pack()


def threads_of_this_process() -> set[int]:
    gc.collect()  # engines of other tests
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def settles(expected: set[int], patience_s: float = 10) -> bool:
    """Wait until there are no other threads: the kernel takes ended ones off its list shortly after they were joined.

    Threads of other tests may end meanwhile.
    """
    deadline = time.monotonic() + patience_s
    while threads_of_this_process() - expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return not threads_of_this_process() - expected


@pytest.mark.parametrize("threads", [Threads(2), Threads(4)], ids=["two", "four"])
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in ("opt", "llama-odd")])
def test_threads_change_no_bit(tmp_path, monkeypatch, kind, threads):
    """Hundreds of random steps one after the other, on the same KV: a race would show."""
    monkeypatch.setattr(native, "MIN_SHARED_ROWS", 1)
    directory = str(make_checkpoint(kind, tmp_path))
    alone, shared = (load(directory, device="cpu", kv_slots=SLOTS, threads=t).forward for t in (ALONE, threads))
    for forward in (alone, shared):
        for seed, held in enumerate((forward.kv.keys, forward.kv.values)):
            held[:] = np.random.default_rng(seed).normal(size=held.shape)
    rng = np.random.default_rng(0)
    for _ in range(150):
        rows = random_batch(rng, int(rng.integers(1, 24)))
        expected, output = alone(rows), shared(rows)
        assert np.array_equal(expected.logits, output.logits)
        assert np.array_equal(expected.hidden, output.hidden)
    assert np.array_equal(alone.kv.keys, shared.kv.keys)
    assert np.array_equal(alone.kv.values, shared.kv.values)


@on_linux
@pytest.mark.parametrize("num_rows", [1, MIN_SHARED_ROWS])
def test_helpers_come_with_the_first_step_and_go_with_the_forward(llama, num_rows):
    forward = load(llama, device="cpu", kv_slots=SLOTS, threads=Threads(3)).forward
    before = threads_of_this_process()
    forward(a_step(num_rows))
    forward(a_step(MIN_SHARED_ROWS + 5))
    assert len(threads_of_this_process() - before) == 2
    del forward
    assert settles(before)


@on_linux
def test_small_steps_are_shared_where_that_is_faster_and_large_ones_always(llama, monkeypatch):
    forward = load(llama, device="cpu", kv_slots=SLOTS, threads=Threads(2)).forward
    shared, share = [], forward.native._helpers
    monkeypatch.setattr(forward.native, "_helpers", lambda: shared.append(True) or share())
    monkeypatch.setattr(forward.native._sharing, "should_share", lambda kind: False)
    forward(a_step(1))
    assert not shared
    forward(a_step(MIN_SHARED_ROWS))
    assert len(shared) == 1
    monkeypatch.undo()
    monkeypatch.setattr(forward.native._sharing, "should_share", lambda kind: True)
    forward(a_step(1))
    assert len(forward.native._teams) == 1


@on_linux
def test_helpers_stay_on_their_cores_and_the_caller_where_it_was(llama):
    core, own = available_cores()[-1], os.sched_getaffinity(0)
    forward = load(llama, device="cpu", kv_slots=SLOTS, threads=Threads(1, (core,))).forward
    before = threads_of_this_process()
    forward(a_step(MIN_SHARED_ROWS))
    (helper,) = threads_of_this_process() - before
    assert os.sched_getaffinity(helper) == {core}
    assert os.sched_getaffinity(0) == own


@on_linux
def test_a_helper_takes_no_part_while_it_is_not_wanted(llama):
    """Nor does it start; the others go on as before, and the bits are the same."""
    core = available_cores()[-1]
    forward = load(llama, device="cpu", kv_slots=SLOTS, threads=Threads(2, (core,))).forward
    before = threads_of_this_process()
    forward.is_helped = False
    alone = forward(a_step(MIN_SHARED_ROWS)).logits
    assert len(threads_of_this_process() - before) == 1
    forward.is_helped = True
    assert np.array_equal(forward(a_step(MIN_SHARED_ROWS)).logits, alone)
    started = threads_of_this_process() - before
    assert len(started) == 3
    assert [core] in [sorted(os.sched_getaffinity(thread)) for thread in started]


@on_linux
def test_helpers_that_were_late_share_passes_again_once_they_are_wanted_again(llama, monkeypatch):
    """They were late because a draft worker used their core. It is silent when they are wanted."""
    forward = load(llama, device="cpu", kv_slots=SLOTS, threads=Threads(1, (available_cores()[-1],))).forward
    shared, helpers = [], forward.native._helpers
    monkeypatch.setattr(forward.native, "_helpers", lambda: shared.append(0) or helpers())
    clock = iter(range(10**6))
    slow = lambda: next(clock) * (100.0 if shared else 1.0)  # noqa: E731 - a shared pass takes long
    monkeypatch.setattr("specq.engines.native.forward.time.perf_counter", slow)
    for _ in range(FIRST + TRIAL + 1):
        shared.clear()
        forward(a_step(1))
    assert not shared
    forward.is_helped = False
    forward.is_helped = True
    forward(a_step(1))
    assert shared


def test_step_times_are_kept_apart_with_helpers_and_without(llama):
    """Without helpers they are those of an engine that has none."""
    options = {"device": "cpu", "kv_slots": 64, "threads": 1}
    helped, alone = (TorchEngine(llama, **options, helper_cores=cores) for cores in ((0,), ()))
    assert (helped.is_helped, alone.is_helped) == (True, False)
    with_helpers = helped._times_file()
    helped.is_helped = False
    assert with_helpers != helped._times_file() == alone._times_file()


@on_linux
def test_a_core_that_is_not_there_is_refused(llama):
    forward = load(llama, device="cpu", kv_slots=SLOTS, threads=Threads(1, (4095,))).forward
    before = threads_of_this_process()
    with pytest.raises(ConfigError, match="4095"):
        forward(a_step(MIN_SHARED_ROWS))
    assert settles(before)


def test_an_engine_has_as_many_threads_as_it_is_given(llama):
    def num_helpers(**given) -> int:
        return TorchEngine(llama, device="cpu", kv_slots=64, **given)._forward.native._threads.num_helpers

    assert num_helpers(threads=1) == 0
    assert num_helpers(threads=3) == 2
    assert num_helpers(threads=1, helper_cores=(0,)) == 1
    assert num_helpers() < len(available_cores())


@pytest.mark.slow
def test_helpers_hold_up_no_exit(spawn, llama):
    process = spawn("-c", RUN_AND_LEAVE, llama, program=(sys.executable,))

    assert process.wait(60) == 0
    assert "done" in process.output.read_text()
