"""The cache file of integer arithmetic: written once, noticed when it is not whole, never in the way of others."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench.random_gguf import Q, write_random
from specq.checkpoints import forget_gguf, read_gguf
from specq.engines.native import ALONE, INTEGER, Threads, kernels
from specq.engines.native.block_cache import open_blocks
from specq.engines.native.engine import NativeEngine
from specq.protocol import ConfigError, EngineLostError, SamplingParams, SessionStep
from specq.runtime import available_cores
from specq.testing.checkpoints_gguf import tokenizer_keys
from tests.each import each

pytestmark = pytest.mark.skipif(kernels() is None, reason="no C compiler")
OPEN = """
import sys
from pathlib import Path
from specq.engines.native import INTEGER, kernels
from specq.engines.native.block_cache import open_blocks
print(open_blocks(Path(sys.argv[1]), kernels(INTEGER)).tensors_hash)
"""


def write(directory: Path, seed: int = 0, name: str = "model.gguf") -> Path:
    return write_random(directory / name, lambda _: Q.Q4_0, seed=seed)


def only(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


def up(path: Path) -> bytes:
    return open_blocks(path, kernels(INTEGER)).matrices["model.layers.1.mlp.up_proj.weight"].data.tobytes()


def test_a_file_is_written_once_for_its_owner_in_the_blocks_size(own_blocks, tmp_path):
    path = write(tmp_path)
    expected = up(path)
    before = only(own_blocks).stat()
    assert up(path) == expected
    assert only(own_blocks).stat().st_ino == before.st_ino
    assert stat.S_IMODE(before.st_mode) == 0o600
    assert stat.S_IMODE(own_blocks.stat().st_mode) == 0o700


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="no huge pages")
def test_huge_pages_are_asked_for_the_mapped_file(own_blocks, tmp_path):
    found = open_blocks(write(tmp_path), kernels(INTEGER))
    _, _, of_file = Path("/proc/self/smaps").read_text("utf-8").partition(str(found.place))
    flags = of_file.partition("VmFlags:")[2].partition("\n")[0].split()
    assert "hg" in flags


def test_threads_write_the_same_file_also_where_the_system_writes_a_part_at_a_time(own_blocks, tmp_path, monkeypatch):
    path, write_at = write(tmp_path), os.pwrite
    found = []
    for threads, most in ((ALONE, 1 << 30), (Threads(3), 1 << 30), (Threads(1, (max(available_cores()),)), 1000)):
        monkeypatch.setattr(os, "pwrite", lambda file, data, at, most=most: write_at(file, data[:most], at))
        open_blocks(path, kernels(INTEGER), threads)
        found.append(only(own_blocks).read_bytes())
        only(own_blocks).unlink()
    assert found[0] == found[1] == found[2]


def test_an_error_in_a_thread_is_reported_and_leaves_no_file(own_blocks, tmp_path):
    path = write(tmp_path)
    place = read_gguf(path).tensors["blk.1.ffn_up.weight"].data
    data = np.memmap(path, np.uint8, "r+")
    at = bytes(data).find(bytes(place[0, :18]))
    data[at : at + 2] = 0xFF, 0x7F  # the scale of its first block
    data.flush()
    forget_gguf()
    with pytest.raises(ConfigError, match=r"ffn_up\.weight \(Q4_0\) has a scale that is not finite"):
        open_blocks(path, kernels(INTEGER), Threads(2))
    assert list(own_blocks.iterdir()) == []


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(at: int):
    def change(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)

    return change


@each(
    "damage",
    [
        cut,
        lambda file: os.truncate(file, 20),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(b"another program's file" * 1000),
        flip(0),
        flip(20),
        flip(50),
        flip(100),
    ],
)
def test_a_cache_file_that_is_not_whole_is_written_anew(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECQ_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path)
    expected = up(path)
    file = only(tmp_path / "cache" / "blocks")
    whole = file.read_bytes()
    damage(file)
    assert up(path) == expected
    assert only(tmp_path / "cache" / "blocks").read_bytes() == whole


def test_a_model_that_is_replaced_is_repacked_and_harms_nobody(own_blocks, tmp_path):
    path = write(tmp_path)
    held = open_blocks(path, kernels(INTEGER)).matrices["model.layers.1.mlp.up_proj.weight"].data
    first = held.tobytes()
    write(tmp_path, seed=1, name="other.gguf").replace(path)
    assert up(path) != first
    assert held.tobytes() == first
    assert len(list(own_blocks.iterdir())) == 1
    os.truncate(path, 100)
    assert held.tobytes() == first


def test_a_change_where_no_sample_is_taken_is_noticed_by_its_time(own_blocks, tmp_path, monkeypatch):
    monkeypatch.setattr("specq.engines.native.block_cache._HEAD_BYTES", 1000)
    monkeypatch.setattr("specq.engines.native.block_cache._SAMPLES", 1)
    monkeypatch.setattr("specq.engines.native.block_cache._SAMPLE_BYTES", 8)
    path = write(tmp_path)
    first = open_blocks(path, kernels(INTEGER))
    data = bytearray(path.read_bytes())
    data[-5000] ^= 0x11
    path.write_bytes(data)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))
    second = open_blocks(path, kernels(INTEGER))
    assert first.tensors_hash != second.tensors_hash
    assert any(not np.array_equal(first.matrices[name].data, second.matrices[name].data) for name in first.matrices)
    assert len(list(own_blocks.iterdir())) == 1


@pytest.mark.slow
def test_processes_may_write_at_once(own_blocks, tmp_path, monkeypatch):
    path = write(tmp_path)
    started = [
        subprocess.Popen([sys.executable, "-c", OPEN, str(path)], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    found = {process.communicate(timeout=120)[0].splitlines()[-1] for process in started}
    assert len(found) == 1
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(list(own_blocks.iterdir())) == 1


def test_a_file_that_is_cut_while_it_is_mapped_ends_the_engine_and_the_next_one_goes_on(own_blocks, tmp_path):
    """It says which file. A read beyond its end would kill the process without a word."""

    def step(engine: NativeEngine) -> list[int]:
        engine.open(0, text)
        return engine.step([SessionStep(0, 0, text, SamplingParams())]).judgements[0].token_ids.tolist()

    path, text = tmp_path / "model.gguf", np.array([5, 70, 9], np.int32)
    write_random(path, lambda _: Q.Q4_0, metadata=tokenizer_keys(352))
    engine = NativeEngine(str(path), kv_slots=64)
    said = step(engine)
    engine.close(0)
    os.truncate(only(own_blocks), only(own_blocks).stat().st_size - 1)
    with pytest.raises(EngineLostError, match=r"\.blocks was cut while it was in use; the next start writes it anew"):
        step(engine)
    assert step(NativeEngine(str(path), kv_slots=64)) == said


def test_writing_deletes_the_files_that_nobody_needs(own_blocks, tmp_path):
    """Those of models that are gone, and those that were not used for a month; not those that were used since."""

    def named(path: Path) -> Path:
        return open_blocks(path, kernels(INTEGER)).place

    paths = [write(tmp_path, seed, f"{seed}.gguf") for seed in range(5)]
    _, old, used, fresh = map(named, paths[:4])
    paths[0].unlink()
    for file in (old, used):
        os.utime(file, (time.time(), time.time() - 31 * 86400))
    named(paths[2])
    newest = named(paths[4])
    assert {*own_blocks.iterdir()} == {used, fresh, newest}
