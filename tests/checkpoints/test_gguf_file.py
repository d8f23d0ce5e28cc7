"""The header of a GGUF file, as the gguf package reads it; and files that are cut or damaged anywhere."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from specq.checkpoints import is_gguf, read_gguf, read_json, read_text
from specq.checkpoints.gguf_config import model_config
from specq.checkpoints.gguf_tensors import tensors
from specq.protocol import ConfigError
from tests.each import each

VALUES = {
    "uint8": 200, "int8": -5, "uint16": 60_000, "int16": -300, "uint32": 2**32 - 1, "int32": -(2**31), "uint64": 2**63,
    "int64": -1, "float32": 0.5, "float64": 1e-300, "bool": True, "string": "né 🙂",
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a value of every kind, and tensors of three shapes."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for kind, value in VALUES.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_array("texts", ["a", "", "中文"])
    writer.add_array("numbers", [3, 1, 2])
    writer.add_tensor("norm", np.arange(3, dtype=np.float32))
    writer.add_tensor("half", np.ones((2, 5), np.float16))
    writer.add_tensor("blocks", np.arange(68, dtype=np.uint8).reshape(1, 68), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "a.gguf"


def test_it_is_read_as_the_package_reads_it(path):
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)

    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert VALUES.items() <= fields.items()
    assert ours.architecture == "llama"
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert (mine.shape, mine.type_id) == (tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type)
        assert mine.data.tobytes() == tensor.data.tobytes()


def test_a_file_is_read_once_while_it_does_not_change(path):
    first = read_gguf(path)
    assert read_gguf(path) is first
    path.write_bytes(path.read_bytes() + b"\0")
    assert read_gguf(path) is not first


def test_wherever_it_is_cut_it_is_refused(path, tmp_path):
    """The last byte that counts is the last tensor's; what follows only fills the file up."""
    data = path.read_bytes()
    last = read_gguf(path).tensors["blocks"].data
    needed = data.index(last.tobytes()) + last.size
    cut = tmp_path / "cut.gguf"
    for length in (*range(0, needed, 7), needed - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf is (cut|not a GGUF file)"):
            read_gguf(cut)
    cut.write_bytes(data[:needed])
    assert read_gguf(cut).metadata["numbers"] == [3, 1, 2]


def test_a_corrupt_header_byte_gives_a_file_or_an_error(path, tmp_path):
    """Counts may become huge and texts invalid. No other error is raised, and no memory is allocated for it."""
    data, rng = path.read_bytes(), np.random.default_rng(0)
    end = data.index(b"blocks") + 30
    for at in range(end):
        (tmp_path / "b.gguf").write_bytes(data[:at] + bytes([data[at] ^ int(rng.integers(1, 256))]) + data[at + 1 :])
        with contextlib.suppress(ConfigError):
            found = read_gguf(tmp_path / "b.gguf")
            list(tensors(found, model_config(found)))


@each(
    ("data", "said"),
    [
        (b"", "is not a GGUF file: it has 0 bytes"),
        (b"<!DOCTYPE html><html>", "does not begin with GGUF"),
        (b"GGUF\1\0\0\0" + bytes(100), "has GGUF version 1"),
        (b"GGUF\0\0\0\3" + bytes(100), "is big-endian; specq reads little-endian files"),
    ],
)
def test_a_file_that_is_not_gguf_is_refused(tmp_path, data, said):
    (tmp_path / "a.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_gguf(tmp_path / "a.gguf")


@each(("name", "other", "said"), [(b"uint16", b"uint32", "key uint32"), (b"half", b"norm", "tensor norm")])
def test_a_name_that_stands_twice_is_refused(path, tmp_path, name, other, said):
    """Which of both counts differs from reader to reader."""
    (tmp_path / "b.gguf").write_bytes(path.read_bytes().replace(name, other))
    with pytest.raises(ConfigError, match=f"is damaged: it has the {said} more than once; fetch it again"):
        read_gguf(tmp_path / "b.gguf")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.gguf cannot be read: No such file"):
        read_gguf(tmp_path / "no.gguf")


def test_texts_of_a_directory(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "list.json").write_text("[]")
    assert not is_gguf(tmp_path)
    assert read_text(tmp_path, "config.json") == '{"a": 1}'
    assert read_text(tmp_path, "tokenizer.json") is None
    assert read_json(tmp_path, "config.json") == {"a": 1}
    assert read_json(tmp_path, "tokenizer.json") == {}
    with pytest.raises(ConfigError, match=r"list\.json holds list, but must be a JSON object"):
        read_json(tmp_path, "list.json")
    for broken in ("{", '{"a":' * 10_000):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(ConfigError, match=r"broken\.json is not valid JSON"):
            read_json(tmp_path, "broken.json")
    (tmp_path / "latin.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"latin\.json cannot be read as UTF-8 text"):
        read_json(tmp_path, "latin.json")


def test_lists_in_lists_without_end_are_refused(tmp_path):
    """Twelve bytes a level."""
    path = tmp_path / "model.gguf"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    path.write_bytes(start + struct.pack("<IQ", 9, 1) * 100_000 + struct.pack("<IQ", 4, 0))
    with pytest.raises(ConfigError, match="lists in its header are nested too deeply"):
        read_gguf(path)
