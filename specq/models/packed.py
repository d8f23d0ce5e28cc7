"""Models with compressed weights: unpacked into the cache at first use.

A directory is packed if it holds NAME.safetensors.xz and no NAME.safetensors beside it. `xz -d` does the same by hand,
and a plain file is used directly. To pack a model, use the command in `tiny/README.md`.

CACHE/models/PAIR/DIGEST/ROLE is a copy of the whole directory with unpacked weights. If the model has tensors of
another one beside it (`shared` of `checkpoints.draft_form`), a copy of that is beside the copy.

Rules:

- The digest covers all files of the packed directories, so another version has another place.
- A copy is always complete. One process at a time makes it beside its place. One rename moves it there.
- An unpacked file is checked by the hash in its archive when it is made. Later it is checked by its size, which is
  faster. An incomplete copy is made again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from specq.checkpoints import read_json
from specq.config import cache_dir
from specq.protocol import ConfigError

PACKED = ".xz"
_WEIGHTS = f"*.safetensors{PACKED}"
_PARTIAL, _LOCK = "partial-", ".lock"
_FOOTER_BYTES = 12
_CHUNK_BYTES = 1 << 20


def is_packed(model: Path) -> bool:
    """Return whether some weights that a directory needs exist only compressed."""
    return any(not file.with_suffix("").exists() for one in _needed(model) for file in one.glob(_WEIGHTS))


def _needed(model: Path) -> list[Path]:
    """Return the directories of a model: its own, and the one beside it whose tensors it has, if there is one."""
    if not model.is_dir():
        return [model]
    other = (model / str(read_json(model, "config.json").get("shared") or ".")).resolve()
    is_beside = other.parent == model.resolve().parent and other != model.resolve() and other.is_dir()
    return [model, other] if is_beside else [model]


def unpacked(model: Path) -> Path:
    """Return a directory with a model's unpacked weights.

    For a packed model it is the copy in the cache, made if needed. For another model it is its own directory. Raises
    ConfigError for a damaged archive, an unwritable cache, and a full disk.
    """
    if not is_packed(model):
        return model
    place = _place(model)
    for one in _needed(model):
        try:
            _unpack(one, place.with_name(one.name))
        except OSError as error:
            needed = f"{num_bytes(one) / 1e6:.1f} MB are needed"
            raise ConfigError(
                f"{model} cannot be unpacked into {place}: {error.strerror or error} ({needed}); set "
                f"SPECQ_CACHE to another directory"
            ) from None
    return place


def find_unpacked(model: Path) -> Path | None:
    """Return the copy of a packed model if it exists and is complete. It unpacks no files."""
    place = _place(model)
    return place if all(_is_whole(place.with_name(one.name), one) for one in _needed(model)) else None


def num_bytes(model: Path) -> int:
    """Return the total size of a directory's files, unpacked, in bytes."""
    return sum(_sizes(model).values())


def unpacked_bytes(archive: Path) -> int:
    """Return the unpacked size of an .xz file with one stream, from its index, in bytes.

    Raises ConfigError for a damaged file. The index is at the end (https://tukaani.org/xz/xz-file-format.txt, 2.1.2 and
    4). It is a zero byte, the number of blocks, the packed and unpacked size of each, padding, a checksum. The footer
    after it has the index's length.
    """
    with archive.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        footer = _read_at(file, end - _FOOTER_BYTES, _FOOTER_BYTES)
        length = (int.from_bytes(footer[4:8], "little") + 1) * 4
        index = _read_at(file, end - _FOOTER_BYTES - length, length)
    if footer[-2:] != b"YZ" or zlib.crc32(index[:-4]) != int.from_bytes(index[-4:], "little"):
        raise _damaged(archive, "it has no index at its end")
    num_blocks, *sizes = _numbers(index[1:-4])
    return sum(sizes[1 : 2 * num_blocks : 2])


def _read_at(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(max(start, 0))
    return file.read(length)


def _numbers(data: bytes) -> Iterator[int]:
    """Yield integers of seven bits per byte, lowest first. The highest bit of a byte is set if more bytes follow."""
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            yield value
            value = shift = 0


def _files(model: Path) -> list[Path]:
    """Return the files of a directory, except archives whose contents are beside them."""
    return [
        file for file in sorted(model.iterdir()) if file.is_file() and not (_is_archive(file) and _plain(file).exists())
    ]


def _is_archive(file: Path) -> bool:
    return file.match(_WEIGHTS)


def _plain(file: Path) -> Path:
    """Return the path of a file's unpacked contents, beside it."""
    return file.with_suffix("") if _is_archive(file) else file


def _sizes(model: Path) -> dict[str, int]:
    """Return the unpacked names of a directory's files, and their sizes in bytes."""
    return {
        _plain(file).name: unpacked_bytes(file) if _is_archive(file) else file.stat().st_size for file in _files(model)
    }


def _is_whole(place: Path, model: Path) -> bool:
    """Return whether a copy has all files of a model, each with its size. An unreadable copy is incomplete."""
    wanted = _sizes(model)
    try:
        return all((place / name).stat().st_size == size for name, size in wanted.items())
    except OSError:
        return False


def _place(model: Path) -> Path:
    """Return where the copy of a packed model is, or will be."""
    model = model.resolve()
    digest = hashlib.sha256()
    for file in (file for one in _needed(model) for file in _files(one)):
        found = file.stat()
        digest.update(f"{file.name} {_digest(file, found.st_size, found.st_mtime_ns)}\n".encode())
    return cache_dir() / "models" / model.parent.name / digest.hexdigest()[:16] / model.name


@lru_cache
def _digest(file: Path, _size: int, _mtime_ns: int) -> str:
    """Hash a file, once per process as long as it does not change."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _unpack(model: Path, place: Path) -> None:
    """Make the copy of a packed model, unless there is one. Raises OSError if it cannot be written."""
    if _is_whole(place, model):
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(place.parent):
        if _is_whole(place, model):
            return
        for left in place.parent.glob(f"{_PARTIAL}*"):  # from a process that was killed
            shutil.rmtree(left)
        with TemporaryDirectory(dir=place.parent, prefix=_PARTIAL) as folder:
            made = Path(folder) / place.name
            made.mkdir()
            for file in _files(model):
                _copy(file, made / _plain(file).name)
            if not _is_whole(made, model):
                raise ConfigError(
                    f"{model}: an archive contains more data than its index lists; expected a single xz stream"
                )
            if place.exists():  # it is damaged
                shutil.rmtree(place)
            made.rename(place)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in this block. A killed process leaves it."""
    with (folder / _LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy(file: Path, to: Path) -> None:
    """Copy a file; unpack it if it is an archive."""
    if not _is_archive(file):
        shutil.copyfile(file, to)
        return
    try:
        import lzma  # some builds of Python lack it
    except ImportError:
        raise ConfigError(f"this Python was built without lzma; unpack by hand: xz -dk {file}") from None
    try:
        with lzma.open(file) as archive, to.open("wb") as out:
            shutil.copyfileobj(archive, out, _CHUNK_BYTES)
    except (lzma.LZMAError, EOFError) as error:
        raise _damaged(file, str(error)) from None


def _damaged(archive: Path, reason: str) -> ConfigError:
    return ConfigError(f"{archive} is damaged: {reason}; it should be as it is in the repository or the package")
