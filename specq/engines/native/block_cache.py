"""The cache file of a GGUF model for integer arithmetic: its tensors, repacked once, then mapped read-only.

The file has the size of the model's blocks. Only it is mapped, so a model file that is replaced or cut later harms
nothing. Its name is a hash of the layout and of parts of the model's files: size, the first bytes with all metadata,
and samples. So no start reads gigabytes. Its header has size, time of change and inode of each file, too. If one
differs, the file is written anew, which takes as long as a hash of all would.

    magic, sha256 of the header, length of the header (u64, little-endian), header (JSON), zeros up to PAGE, data

A file that is damaged, cut or of another layout is written anew. Writers use a temporary name and rename it. So
processes may race, and a file that is mapped never changes. If somebody else cuts it, the process ends at its next step
(`BlockFile.check`). Files are readable only by their owner. A process that writes a file deletes unneeded ones: former
ones of the same path, files of models that are gone, and files that were not opened for MOST_DAYS.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import structlog

from specq.checkpoints import GgufFile, gguf_config, gguf_parts, gguf_tensors, read_gguf
from specq.config import cache_dir
from specq.engines.checkpoint import TensorsHash
from specq.engines.native.forward import ALONE, Threads
from specq.engines.native.panels import FORMATS, Bytes, PanelMatrix, num_panels, panel_bytes, repack
from specq.protocol import ConfigError, EngineLostError, Float32Array
from specq.runtime import whole_file

MAGIC = b"specq blocks 1\n\0"  # 16 bytes; the number is that of the layout in kernels/formats.h
PAGE = 4096
_FIXED = len(MAGIC) + 32 + 8
_HEAD_BYTES, _SAMPLES, _SAMPLE_BYTES = 8 << 20, 64, 4096
_VECTOR = "vector"
MOST_DAYS = 30

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class BlockFile:
    """A model's tensors by transformers' names.

    - matrices: views of the mapped file.
    - vectors: norms and biases, f32[n] each.
    - tensors_hash: of all content, see `specq.engines.checkpoint`.
    - place, mapped: the file, and its memory.
    """

    matrices: dict[str, PanelMatrix]
    vectors: dict[str, Float32Array]
    tensors_hash: str
    place: Path
    mapped: mmap.mmap

    def check(self) -> None:
        """Raise EngineLostError if the file was cut since it was mapped: a read beyond its end kills the process."""
        if self.mapped.size() < len(self.mapped):
            raise EngineLostError(f"{self.place} was cut while it was in use; the next start writes it anew")


def open_blocks(path: Path, library: ctypes.CDLL, threads: Threads = ALONE) -> BlockFile:
    """Map a GGUF model's cache file, written by these threads if needed.

    Raises ConfigError for a type that is not supported, for scales that are not finite, for a damaged model, and if the
    cache cannot be written.
    """
    states = [_state(part) for part in gguf_parts(path)]
    place = _place(states)
    found = _read(place, states)
    if found is None:
        try:
            _write(place, path, states, library, threads)
        except OSError as error:
            room = "It takes as much room as the model's file. " if error.errno == errno.ENOSPC else ""
            raise ConfigError(
                f"cannot write the repacked model to {place}: {error.strerror}. {room}SPECQ_CACHE names another folder"
            ) from error
        found = _read(place, [_state(part) for part in gguf_parts(path)])
    if found is None:
        raise ConfigError(f"{path} changed while it was read; start again when it is complete")
    return found


def has_block_cache(path: Path) -> bool:
    """Return whether a GGUF model's cache file is there."""
    return _place([_state(part) for part in gguf_parts(path)]).exists()


def _place(states: list[dict[str, Any]]) -> Path:
    content = [[state["size"], state["sample"]] for state in states]
    return cache_dir() / "blocks" / f"{hashlib.sha256(MAGIC + json.dumps(content).encode()).hexdigest()[:24]}.blocks"


def _state(part: Path) -> dict[str, Any]:
    """Return what shows a change of a file, and a hash of its first bytes and of samples."""
    digest = hashlib.sha256()
    try:
        with part.open("rb") as file:
            about = os.fstat(file.fileno())
            digest.update(file.read(_HEAD_BYTES))
            for i in range(1, _SAMPLES + 1):
                file.seek(max(about.st_size - _SAMPLE_BYTES, 0) * i // _SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"{part} cannot be read: {error.strerror}") from None
    return {"size": about.st_size, "mtime_ns": about.st_mtime_ns, "inode": about.st_ino, "sample": digest.hexdigest()}


def _read(place: Path, states: list[dict[str, Any]]) -> BlockFile | None:
    """Map the file. None if there is none, if it is not whole, or if the model's files have changed since."""
    try:
        with place.open("rb") as file:
            said = _header(file)
            if reason := _reason_against(said, states, os.fstat(file.fileno()).st_size):
                log.info("block_cache_rejected", file=str(place), reason=reason)
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with suppress(OSError, AttributeError):  # a system without huge pages
                mapped.madvise(mmap.MADV_HUGEPAGE)  # passes are 6 to 9% faster if the file comes from the disk in them
            os.utime(file.fileno())  # shows when it was last used
    except FileNotFoundError:
        return None
    except OSError as error:
        log.info("block_cache_rejected", file=str(place), reason=str(error))
        return None
    return _views(said, place, mapped)


def _header(file: BinaryIO) -> dict[str, Any]:
    """Return the header of a cache file; empty if it is damaged or of another version."""
    fixed = file.read(_FIXED)
    header = file.read(min(int.from_bytes(fixed[-8:], "little"), os.fstat(file.fileno()).st_size))
    is_ours = fixed[: len(MAGIC)] == MAGIC and fixed[len(MAGIC) : -8] == hashlib.sha256(header).digest()
    found: dict[str, Any] = json.loads(header) if is_ours else {}
    return found


def _reason_against(said: dict[str, Any], states: list[dict[str, Any]], num_bytes: int) -> str:
    """Return why a file with this header cannot be used, "" if it can."""
    if not said:
        return "its header is damaged or of another version"
    if said["states"] != states:
        return "the model's files have changed"
    return "" if num_bytes == said["size"] else "it is cut"


def _views(said: dict[str, Any], place: Path, memory: mmap.mmap) -> BlockFile:
    matrices, vectors, mapped = {}, {}, np.frombuffer(memory, np.uint8)
    for name, (kind, num_rows, k, start, count, each) in said["tensors"].items():
        data = mapped[start : start + count * each]
        if kind == _VECTOR:
            vectors[name] = data.view(np.float32)
        else:
            matrices[name] = PanelMatrix(FORMATS[kind], num_rows, k, data.reshape(count, each))
    return BlockFile(matrices, vectors, said["tensors_hash"], place, memory)


def _write(place: Path, path: Path, states: list[dict[str, Any]], library: ctypes.CDLL, threads: Threads) -> None:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    model = read_gguf(path)
    hashed = TensorsHash(path)
    try:
        with whole_file(place) as temporary, open(temporary, "wb", opener=_owner_only) as file:
            tensors = _write_tensors(file, model, library, threads)
            file.seek(0, os.SEEK_END)
            found = {"tensors": tensors, "tensors_hash": hashed.result(), "size": file.tell()}
            said: dict[str, Any] = {"path": str(path.resolve()), "states": states, **found}
            _write_header(file, json.dumps(said).encode())
            file.flush()
            os.fsync(file.fileno())
    finally:
        hashed.cancel()
    _drop_unneeded(place, said["path"])
    log.info("block_cache_written", file=str(place), num_bytes=said["size"])


def _drop_unneeded(place: Path, path: str) -> None:
    """Delete the other cache files that are not needed. A process that has mapped one keeps it."""
    oldest = time.time() - MOST_DAYS * 86400
    for other in place.parent.glob("*.blocks"):
        with suppress(OSError), other.open("rb") as file:
            of = _header(file).get("path", "")
            is_needed = of != path and Path(of).exists() and os.fstat(file.fileno()).st_mtime >= oldest
            if other != place and not is_needed:
                other.unlink()


def _owner_only(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _write_header(file: BinaryIO, header: bytes) -> None:
    file.seek(0)
    file.write(MAGIC + hashlib.sha256(header).digest() + len(header).to_bytes(8, "little") + header)


def _write_tensors(file: BinaryIO, model: GgufFile, library: ctypes.CDLL, threads: Threads) -> dict[str, Any]:
    """Write all tensors behind the room for the header, in threads; return where they are."""
    found: dict[str, Any] = {}
    at, pending = _room_for_header(len(model.tensors)), deque[Future[None]]()
    with ThreadPoolExecutor(threads.count, initializer=threads.spread) as pool:
        for name, kind, num_rows, k, size, packed in _packed(model, library):
            pending.append(pool.submit(_write_at, file.fileno(), at, packed))
            found[name] = [kind, num_rows, k, at, *size]
            align = 64 if kind == _VECTOR else PAGE
            at += -(-prod(size) // align) * align
            if len(pending) > 2 * threads.count:
                pending.popleft().result()
        for written in pending:
            written.result()
    file.truncate(at)
    return found


def _write_at(fileno: int, at: int, packed: Callable[[], Bytes]) -> None:
    data = packed().reshape(-1).data
    while written := os.pwrite(fileno, data, at):
        data, at = data[written:], at + written


def _room_for_header(num_tensors: int) -> int:
    return -(-(_FIXED + 4096 + 256 * num_tensors) // PAGE) * PAGE


def _packed(
    model: GgufFile, library: ctypes.CDLL
) -> Iterator[tuple[str, str, int, int, tuple[int, int], Callable[[], Bytes]]]:
    """Yield (name, kind, rows, columns, shape, data) of each tensor. data: u8[shape], parts and bytes of a part."""
    config = gguf_config.model_config(model)
    for name, values in gguf_tensors.vectors(model, config):
        yield name, _VECTOR, 1, values.size, (1, values.nbytes), partial(_bytes_of, values)
    for name, tensor, rows in gguf_tensors.matrices(model, config):
        kind, k = gguf_tensors.type_name(tensor), tensor.shape[1]
        if kind not in FORMATS:
            raise ConfigError(
                f"{model.path}: the tensor {tensor.name} has the type {kind}; integer arithmetic reads "
                f"{', '.join(FORMATS)}. Use arithmetic = exact, which takes several times the memory, or a file in "
                f"Q4_K_M"
            )
        shape = num_panels(len(rows)), panel_bytes(library, kind, k)
        told = f"{model.path} is damaged: the tensor {tensor.name}"
        yield name, kind, len(rows), k, shape, partial(_repacked, library, told, kind, rows, k)


def _bytes_of(values: Float32Array) -> Bytes:
    return np.ascontiguousarray(values).view(np.uint8)


def _repacked(library: ctypes.CDLL, told: str, kind: str, rows: Bytes, k: int) -> Bytes:
    try:
        return repack(library, kind, rows, k)
    except ValueError as error:
        raise ConfigError(f"{told} ({kind}) has {error}; fetch the file again") from None
