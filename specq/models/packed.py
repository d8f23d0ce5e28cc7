"""Models whose weights lie compressed: unpacked into the cache when they are first asked for.

A directory is packed if it holds NAME.safetensors.xz and no NAME.safetensors beside it. `xz -d` does by hand what is
done here, and a plain file is used as it is. To pack a model: the command in `tiny/README.md`. One that others take
tensors from (`shared` of `checkpoints.draft_form`) stays plain: they look for it beside themselves.

    CACHE/models/PAIR/DIGEST/ROLE   a copy of the whole directory, with the weights as they are

Rules: the digest is of all files of the packed directory, so another version has another place. A copy that is there is
whole: it is made by one process at a time, beside its place, and moved there by one rename. An unpacked file counts by
the hash in its archive when it is made, and by its size whenever it is asked for, which is quicker; a copy that is not
whole is made again.
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

from specq.config import cache_dir
from specq.protocol import ConfigError

PACKED = ".xz"
_WEIGHTS = f"*.safetensors{PACKED}"
_PARTIAL, _LOCK = "partial-", ".lock"
_FOOTER_BYTES = 12
_CHUNK_BYTES = 1 << 20


def is_packed(model: Path) -> bool:
    """Tell whether some weights of a directory lie there only compressed."""
    return any(not file.with_suffix("").exists() for file in model.glob(_WEIGHTS))


def unpacked(model: Path) -> Path:
    """Return a directory with a model's weights as they are: its own unless it is packed, else the copy in the cache,
    made if need be.

    Raises ConfigError for a damaged archive, a cache that cannot be written, and a full disk.
    """
    if not is_packed(model):
        return model
    place = _place(model)
    if not _is_whole(place, model):
        try:
            _unpack(model, place)
        except OSError as error:
            needed = f"{num_bytes(model) / 1e6:.1f} MB are needed"
            raise ConfigError(
                f"{model} cannot be unpacked into {place}: {error.strerror or error} ({needed}); set "
                f"SPECQ_CACHE to another directory"
            ) from None
    return place


def find_unpacked(model: Path) -> Path | None:
    """Return the copy of a packed model if it is there and whole; nothing is unpacked."""
    place = _place(model)
    return place if _is_whole(place, model) else None


def num_bytes(model: Path) -> int:
    """Return the bytes of a directory's files, of packed ones as they are when they are unpacked."""
    return sum(_sizes(model).values())


def unpacked_bytes(archive: Path) -> int:
    """Return the bytes that an .xz file of one stream unpacks to, as its index says; ConfigError for one that is
    damaged.

    The index is at the end (https://tukaani.org/xz/xz-file-format.txt, 2.1.2 and 4): a zero byte, the number of blocks,
    for each block its packed and its unpacked size, padding, and a checksum; behind it the footer, which has its
    length.
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
    """Yield integers of seven bits a byte, the lowest first; the highest bit says that more follows."""
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            yield value
            value = shift = 0


def _files(model: Path) -> list[Path]:
    """Return the files of a directory, but for archives whose contents lie beside them."""
    return [
        file for file in sorted(model.iterdir()) if file.is_file() and not (_is_archive(file) and _plain(file).exists())
    ]


def _is_archive(file: Path) -> bool:
    return file.match(_WEIGHTS)


def _plain(file: Path) -> Path:
    """Return the path of what a file holds, beside it."""
    return file.with_suffix("") if _is_archive(file) else file


def _sizes(model: Path) -> dict[str, int]:
    """Return the names of a directory's files when they are unpacked, and their bytes."""
    return {
        _plain(file).name: unpacked_bytes(file) if _is_archive(file) else file.stat().st_size for file in _files(model)
    }


def _is_whole(place: Path, model: Path) -> bool:
    """Tell whether a copy has all files of a model, each of its size; one that cannot be read is none."""
    wanted = _sizes(model)
    try:
        return all((place / name).stat().st_size == size for name, size in wanted.items())
    except OSError:
        return False


def _place(model: Path) -> Path:
    """Return where the copy of a packed model is, or will be."""
    model = model.resolve()
    digest = hashlib.sha256()
    for file in _files(model):
        found = file.stat()
        digest.update(f"{file.name} {_digest(file, found.st_size, found.st_mtime_ns)}\n".encode())
    return cache_dir() / "models" / model.parent.name / digest.hexdigest()[:16] / model.name


@lru_cache
def _digest(file: Path, _size: int, _mtime_ns: int) -> str:
    """Hash a file, once in a process while it stays the same."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _unpack(model: Path, place: Path) -> None:
    """Make the copy of a packed model, unless another process makes it meanwhile; raises OSError where it cannot be
    written."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with _alone(place.parent):
        if _is_whole(place, model):
            return
        for left in place.parent.glob(f"{_PARTIAL}*"):  # by a process that was killed
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
            if place.exists():  # and is damaged
                shutil.rmtree(place)
            made.rename(place)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process is in this block; one that is killed leaves it."""
    with (folder / _LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _copy(file: Path, to: Path) -> None:
    """Copy a file, of an archive what it holds."""
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
