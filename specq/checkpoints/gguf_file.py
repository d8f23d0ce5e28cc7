"""A GGUF file, or all parts of one: its metadata, and where its tensors are.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. This module reads only the header.
`gguf.GGUFReader` does the same, but takes 1.8 s for the 98,000 strings of a small tokenizer, instead of 0.1 s. Tensors
are views of the mapped file.

Large models come in several files, NAME-00001-of-00003.gguf and so on, as `llama-gguf-split` writes them. Each has its
part number (`split.no`, `split.count`) and the total number of tensors (`split.tensors.count`). The first part has the
metadata. The name of any part stands for the whole model.

Rule: a file may be cut or wrong anywhere. Every such fault becomes a ConfigError that names the file and the fault.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specq.protocol import ConfigError

SUFFIX = ".gguf"
VERSIONS = (2, 3)
_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_OTHER_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """One tensor in the file: `data` u8[rows, bytes of a row], quantised as `type_id`.

    - shape: [rows, columns], as in PyTorch; the file's own order is reversed.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """The content of a file, or of all its parts.

    It is equal only to itself, so that results derived from it can be cached.
    """

    path: Path  # of the first part
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def is_gguf(model: str | Path) -> bool:
    """Return whether a model's name is that of a GGUF file, in any case. A directory is not one."""
    return str(model).lower().endswith(SUFFIX) and not Path(model).is_dir()


def gguf_name(path: Path) -> str:
    """Return a file's name without suffix and part number."""
    match = _PART.fullmatch(path.name)
    return match["name"] if match else path.stem


def gguf_in(directory: Path) -> Path | None:
    """Return the one GGUF file, or the first part, in a directory.

    Returns None if it has weights in another layout, or no weights. Raises ConfigError for a directory with several
    models.
    """
    if any(any(directory.glob(pattern)) for pattern in _OTHER_WEIGHTS):
        return None
    found = sorted(path for path in directory.iterdir() if is_gguf(path))
    first = {gguf_name(path): path for path in reversed(found)}
    if len(first) > 1:
        raise ConfigError(
            f"{directory} holds {len(first)} GGUF models; name one: {', '.join(sorted(p.name for p in found))}"
        )
    return next(iter(first.values()), None)


def gguf_parts(path: str | Path) -> list[Path]:
    """Return all files of a GGUF model, in order; `path` is one part. Raises ConfigError for missing parts."""
    path = Path(path)
    count = _split(_header(path))[1]
    if count == 1:
        return [path]
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise ConfigError(
            f"{path} is one of {count} parts of a model (split.count); its name must be as in "
            f"NAME-00001-of-{count:05}.gguf, beside the other parts"
        )
    numbers = range(1, count + 1)
    parts = [path.with_name(f"{match['name']}-{i:05}-of-{match['count']}{match['suffix']}") for i in numbers]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ConfigError(f"{path} is one of {count} parts of a model; missing beside it: {', '.join(missing)}")
    return parts


def read_gguf(path: str | Path) -> GgufFile:
    """Read a file's header, and those of its other parts.

    Raises ConfigError for an unreadable or cut file, a file that is not GGUF, or a part of another model. The result is
    cached as long as the file does not change. A verifier reads tokenizer, configuration and tensors in turn.
    """
    parts = gguf_parts(path)
    return _header(parts[0]) if len(parts) == 1 else _joined(tuple(map(_state, parts)))


def _state(path: Path) -> tuple[Path, int, int]:
    try:
        about = path.stat()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return path, about.st_size, about.st_mtime_ns


def _header(path: Path) -> GgufFile:
    try:
        return _read(*_state(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def _split(file: GgufFile) -> tuple[int, int]:
    """Return a file's part number, from 0, and the number of parts; (0, 1) for a whole file."""
    number, count = (file.metadata.get(key, unsaid) for key, unsaid in (("split.no", 0), ("split.count", 1)))
    count = count or 1
    if not (isinstance(number, int) and isinstance(count, int) and 0 <= number < count < 100_000):
        raise ConfigError(
            f"{file.path} is damaged: it is part {number!r} of {count!r} (split.no, split.count); fetch it again"
        )
    return number, count


@lru_cache(maxsize=2)
def _joined(states: tuple[tuple[Path, int, int], ...]) -> GgufFile:
    """Return the content of all parts together."""
    files = [_header(path) for path, _, _ in states]
    for i, file in enumerate(files):
        if (found := _split(file)) != (i, len(files)):
            raise ConfigError(
                f"{file.path} contains part {found[0] + 1} of {found[1]} (split.no, split.count), "
                f"not {i + 1} of {len(files)}, as in its name; fetch it again"
            )
    _check_tensors(files)
    tensors = {name: tensor for file in files for name, tensor in file.tensors.items()}
    return GgufFile(files[0].path, files[0].metadata, tensors)


def _check_tensors(files: list[GgufFile]) -> None:
    """Raise ConfigError for parts of different models."""
    counts = Counter(name for file in files for name in file.tensors)
    name, times = counts.most_common(1)[0] if counts else ("", 0)
    if times > 1:
        places = " and ".join(file.path.name for file in files if name in file.tensors)
        raise ConfigError(f"{files[0].path}: {places} both have the tensor {name}; they are parts of several models")
    for file in files:
        said = file.metadata.get("split.tensors.count", len(counts))
        if said != len(counts):
            raise ConfigError(
                f"{file.path} belongs to a model of {said} tensors (split.tensors.count); all parts here have "
                f"{len(counts)}, so one of them belongs to another model"
            )


@lru_cache(maxsize=2)
def _read(path: Path, num_bytes: int, _changed: int) -> GgufFile:
    if num_bytes < len(_MAGIC) + 4:
        raise ConfigError(f"{path} is not a GGUF file: it has {num_bytes} bytes")
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Header(path, mapped).read()
    except struct.error:
        raise ConfigError(
            f"{path} is cut: it ends within its header, after {num_bytes} bytes; fetch it again"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is damaged: a string of its header is not valid UTF-8; fetch it again") from None
    except RecursionError:
        raise ConfigError(f"{path} is damaged: lists in its header are nested too deeply; fetch it again") from None


def forget_headers() -> None:
    """Free what was read of files."""
    _read.cache_clear()
    _joined.cache_clear()


class _Header:
    """Reads a mapped file from its beginning. Raises struct.error if the file ends too early."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path, self._bytes, self._at = path, mapped, 0

    def read(self) -> GgufFile:
        if self._bytes[: len(_MAGIC)] != _MAGIC:
            raise ConfigError(f"{self._path} is not a GGUF file: it does not begin with {_MAGIC.decode()}")
        self._at = len(_MAGIC)
        version = self._scalar("I")
        if version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise ConfigError(
                    f"{self._path} is big-endian; specq reads little-endian files: fetch such a file, or convert it "
                    f"with gguf-convert-endian of the gguf package"
                )
            raise ConfigError(f"{self._path} has GGUF version {version}; supported: {known}")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        pairs = [self._pair() for _ in self._counted(num_keys)]
        places = [self._place() for _ in self._counted(num_tensors)]
        self._check_names([name for name, _ in pairs], [name for name, *_ in places])
        metadata = dict(pairs)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._damaged(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._tensor(name, shape, type_id, start + at) for name, shape, type_id, at in places}
        return GgufFile(self._path, metadata, tensors)

    def _check_names(self, keys: list[str], tensors: list[str]) -> None:
        for kind, names in (("key", keys), ("tensor", tensors)):
            if len(set(names)) < len(names):
                raise self._damaged(f"it has the {kind} {Counter(names).most_common(1)[0][0]} more than once")

    def _pair(self) -> tuple[str, Any]:
        key = self._text()
        return key, self._value(self._scalar("I"))

    def _value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        raise self._damaged(f"a value of the unknown kind {kind}")

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            return self._texts(count)
        if kind not in _SCALARS:
            return [self._value(kind) for _ in self._counted(count)]
        values = struct.unpack_from(f"<{len(self._counted(count))}{_SCALARS[kind]}", self._bytes, self._at)
        self._at += count * struct.calcsize(_SCALARS[kind])
        return list(values)

    def _counted(self, count: int) -> range:
        """Return a range of `count` items. Each item takes at least one byte."""
        if count > len(self._bytes) - self._at:
            raise struct.error
        return range(count)

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._bytes, self._at)
        self._at += struct.calcsize(code)
        return value

    def _text(self) -> str:
        return self._texts(1)[0]

    def _texts(self, count: int) -> list[str]:
        """Return strings. A vocabulary has hundreds of thousands, so this loop calls little."""
        data, at, length = self._bytes, self._at, struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in self._counted(count):
            start = at + 8
            at = start + length(data, at)[0]
            if at > len(data):
                raise struct.error
            found.append(data[start:at].decode())
        self._at = at
        return found

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return a tensor's name, shape, type, and its offset from the start of the tensors."""
        name, num_dimensions = self._text(), self._scalar("I")
        if num_dimensions > _MOST_DIMENSIONS:
            raise self._damaged(f"the tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._scalar("I"), self._scalar("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, start: int) -> GgufTensor:
        row_bytes = self._row_bytes(name, shape, type_id)
        num_rows = math.prod(shape[:-1])
        if 0 in shape:
            raise self._damaged(f"the tensor {name} has the shape {shape}")
        end = start + num_rows * row_bytes
        if end > len(self._bytes):
            raise ConfigError(
                f"{self._path} is cut: the tensor {name} ends at byte {end}, the file at {len(self._bytes)}; fetch it "
                f"again"
            )
        data = np.frombuffer(self._bytes, np.uint8, num_rows * row_bytes, start)
        return GgufTensor(name, shape, type_id, data.reshape(num_rows, row_bytes))

    def _row_bytes(self, name: str, shape: tuple[int, ...], type_id: int) -> int:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = next((known for known in GGMLQuantizationType if known == type_id), None)
        if kind is None:
            raise ConfigError(f"{self._path}: the tensor {name} has the type {type_id}, which specq does not support")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        width = shape[-1] if shape else 1
        if width % block:
            raise self._damaged(
                f"rows of {width} values in the tensor {name}, whose type {kind.name} has blocks of {block}"
            )
        return int(width // block * block_bytes)

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path} is damaged: {what}; fetch it again")
