"""GGUF models in several files, as the gguf package writes them. Any part names the whole. Other files are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from specq.checkpoints import gguf_in, gguf_parts, is_gguf, read_gguf, read_text, weight_bytes
from specq.engines import local_checkpoint, resolve_directory
from specq.engines.checkpoint import tensors_hash
from specq.models import resolve_model
from specq.protocol import ConfigError
from specq.testing.checkpoints_gguf import MADE, write_gguf

NUM_PARTS, EACH = 3, 4
SHAPES = {
    "model.embed_tokens.weight": (352, 64), "model.norm.weight": (64,), "lm_head.weight": (352, 64),
    **{f"model.layers.0.self_attn.{name}_proj.weight": (rows, 64) for name, rows in (("q", 128), ("k", 64), ("v", 64))},
    "model.layers.0.self_attn.o_proj.weight": (64, 128), "model.layers.0.mlp.gate_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.weight": (96, 64), "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.layers.0.input_layernorm.weight": (64,), "model.layers.0.post_attention_layernorm.weight": (64,),
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, random = tmp_path_factory.mktemp("source"), np.random.RandomState(0)
    tensors = {name: random.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps({"model_type": "llama", **MADE, "num_hidden_layers": 1}))
    return place


@pytest.fixture
def parts(source: Path, tmp_path: Path) -> list[Path]:
    (tmp_path / "model").mkdir()
    write_gguf(source, tmp_path / "model" / "m.gguf", tensors_each=EACH)
    found = sorted((tmp_path / "model").iterdir())
    assert [path.name for path in found] == [f"m-0000{i}-of-0000{NUM_PARTS}.gguf" for i in (1, 2, 3)]
    return found


def test_any_part_and_the_directory_name_the_whole(source: Path, parts: list[Path], tmp_path: Path) -> None:
    """The same tensors and texts as of one file; all parts count for bytes and identity."""
    whole = read_gguf(write_gguf(source, tmp_path / "whole.gguf"))
    for path in parts:
        found = read_gguf(path)
        assert read_gguf(path) is found, "it is remembered"
        assert found.path == parts[0]
        said = {name: value for name, value in found.metadata.items() if not name.startswith("split.")}
        assert said == whole.metadata
        assert found.tensors.keys() == whole.tensors.keys()
        assert all(np.array_equal(found.tensors[name].data, whole.tensors[name].data) for name in whole.tensors)
        assert read_text(path, "config.json") == read_text(whole.path, "config.json")
        assert gguf_parts(path) == parts
        assert weight_bytes(path) == sum(part.stat().st_size for part in parts)
    folder = parts[0].parent
    found = (gguf_in(folder), local_checkpoint(str(folder)), Path(resolve_model(str(folder), "target")))
    assert found == (parts[0],) * 3
    before = {tensors_hash(path) for path in parts}
    parts[-1].write_bytes(parts[-1].read_bytes()[:-1] + b"\x01")
    assert len({tensors_hash(path) for path in parts} | before) == 2


def swap(parts: list[Path]) -> None:
    second = parts[1].read_bytes()
    shutil.copy(parts[2], parts[1])
    parts[2].write_bytes(second)


WRONG: dict[str, tuple[Callable[[list[Path], Path], object], str]] = {
    "one is missing": (
        lambda parts, _: parts[1].unlink(),
        r"one of 3 parts of a model; missing beside it: m-00002-of-00003\.gguf",
    ),
    "swapped": (lambda parts, _: swap(parts), r"m-00002-of-00003\.gguf contains part 3 of 3 .*, not 2 of 3"),
    "one stands twice": (
        lambda parts, _: shutil.copy(parts[0], parts[2]),
        r"m-00003-of-00003\.gguf contains part 1 of 3",
    ),
    "renamed": (
        lambda parts, _: parts[0].rename(parts[0].with_name("model.gguf")),
        r"model\.gguf is one of 3 parts of a model \(split\.count\); its name must be as in NAME-00001-of-00003\.gguf",
    ),
    "one of a model in other parts": (
        lambda parts, place: shutil.copy(place / "m-00003-of-00004.gguf", parts[2]),
        r"m-00003-of-00003\.gguf is one of 4 parts .* as in NAME-00001-of-00004\.gguf",
    ),
    "one of a larger model": (
        lambda parts, place: shutil.copy(place / "n-00003-of-00003.gguf", parts[2]),
        r"(both have the tensor|belongs to a model of \d+ tensors)",
    ),
}


@pytest.mark.parametrize(("change", "said"), WRONG.values())
def test_a_file_that_is_not_a_part_is_named(
    change: Callable[[list[Path], Path], object], said: str, source: Path, parts: list[Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_gguf(source, other / "m.gguf", tensors_each=3)
    more = {f"blk.{i}.attn_norm.weight": np.ones(64, np.float32) for i in (1, 2, 3)}
    write_gguf(source, other / "n.gguf", tensors_each=5, extra=more)
    change(parts, other)
    with pytest.raises(ConfigError, match=said):
        read_gguf(max(parts[0].parent.iterdir()))


def test_a_directory_of_several_models_is_refused_with_their_names(source: Path, parts: list[Path]) -> None:
    write_gguf(source, parts[0].parent / "b.gguf")
    with pytest.raises(ConfigError, match=r"holds 2 GGUF models; name one: b\.gguf, m-00001-of-00003\.gguf"):
        local_checkpoint(str(parts[0].parent))


def test_the_suffix_ignores_case_and_a_directory_is_not_a_file(source: Path, tmp_path: Path) -> None:
    path = write_gguf(source, tmp_path / "M.GGUF")
    assert is_gguf(path)
    assert read_text(path, "config.json")
    (tmp_path / "model.gguf").mkdir()
    assert not is_gguf(tmp_path / "model.gguf")
    shutil.copytree(source, tmp_path / "hf")
    shutil.copy(path, tmp_path / "hf")
    assert local_checkpoint(str(tmp_path / "hf")) == tmp_path / "hf", "weights of Hugging Face layout come first"
    with pytest.raises(ConfigError, match=r"M\.GGUF is a GGUF file, which the vllm engine does not support"):
        resolve_directory(str(path), "the vllm engine")
