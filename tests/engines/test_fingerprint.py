"""Two checkpoints that may say different things have different fingerprints; two copies of one have the same."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specq.engines.checkpoint import TensorsHash, describe, fingerprint, tensors_hash
from specq.models import resolve_model
from specq.protocol.errors import ConfigError
from specq.protocol.types import ModelInfo

# What f8b254c called the fingerprint of the bundled target: journals from then hold it.
FORMER = "23f5fd6edf13db6afa86118cf95218c49c25ca978bedb84c47b898185bd3b854"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of the bundled target's settings, with invalid tensors."""
    source = Path(resolve_model("tiny", "target"))
    for name in ("config.json", "generation_config.json"):
        shutil.copy(source / name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"tensors")
    return tmp_path


def change(directory: Path, name: str, **changes: Any) -> None:
    """Set keys of a JSON file; None takes one away."""
    path = directory / name
    said = json.loads(path.read_text()) if path.exists() else {}
    said = {key: value for key, value in (said | changes).items() if value is not None or key not in changes}
    path.write_text(json.dumps(said))


DIFFERENT: dict[str, Callable[[Path], None]] = {
    "tensors": lambda path: (path / "model.safetensors").write_bytes(b"others") and None,
    "rope_theta": lambda path: change(path, "config.json", rope_theta=500_000.0),
    "rope_parameters": lambda path: change(path, "config.json", rope_parameters={"rope_theta": 1e6}),
    "rms_norm_eps": lambda path: change(path, "config.json", rms_norm_eps=1e-6),
    "eos of the model": lambda path: change(path, "config.json", eos_token_id=7),
    "eos of generation": lambda path: change(path, "generation_config.json", eos_token_id=[2, 9]),
    "quantisation": lambda path: change(path, "config.json", quantization_config={"quant_method": "fp8"}),
    "number format of quantisation": lambda path: change(path, "config.json", quantization_config={"dtype": "fp8"}),
    "another file of quantisation": lambda path: change(path, "hf_quant_config.json", quant_algo="FP8"),
    "window": lambda path: change(path, "config.json", sliding_window=64),
}


def test_what_may_change_the_text_changes_the_fingerprint_and_every_difference_is_another_one(
    checkpoint: Path, tmp_path: Path
) -> None:
    found = {fingerprint(checkpoint)}
    for number, make in enumerate(DIFFERENT.values()):
        copy = shutil.copytree(checkpoint, tmp_path / f"copy {number}", ignore=shutil.ignore_patterns("copy*"))
        make(copy)
        found.add(fingerprint(copy))
    assert len(found) == 1 + len(DIFFERENT)


def turned_around(value: Any) -> Any:
    """Return the same with the keys in the other order."""
    if isinstance(value, dict):
        return {key: turned_around(value[key]) for key in reversed(value)}
    return value


def test_how_it_is_written_does_not_matter(checkpoint: Path) -> None:
    """Nor do where the copy came from, who wrote it, and the number format, which stands beside the fingerprint."""
    before = fingerprint(checkpoint)
    for path in checkpoint.glob("*.json"):
        path.write_text(json.dumps(turned_around(json.loads(path.read_text())), indent=7))
    assert fingerprint(checkpoint) == before
    change(checkpoint, "config.json", _name_or_path="/elsewhere", transformers_version="9.9", torch_dtype="float16")
    change(checkpoint, "config.json", dtype=None, use_cache=False)
    change(checkpoint, "generation_config.json", transformers_version="9.9", temperature=0.3)
    assert fingerprint(checkpoint) == before


def test_options_that_change_the_text_count(checkpoint: Path) -> None:
    """One copy quantised by an option of the deployment is another model."""
    plain, quantised = fingerprint(checkpoint, {}), fingerprint(checkpoint, {"quantization": "fp8"})
    assert fingerprint(checkpoint) == plain != quantised


def test_the_former_fingerprint_is_what_older_journals_hold() -> None:
    """Of the tensors alone; it goes with the description of a model, so that jobs which began under it go on."""
    directory = Path(resolve_model("tiny", "target"))
    info: ModelInfo = describe(
        directory, engine="e", name="tiny", dtype="float32", vocab_size=4096, max_length=2048, kv_slots=1
    )
    assert info.former_fingerprint == tensors_hash(directory) == FORMER
    assert info.fingerprint == fingerprint(directory) != FORMER


def test_a_description_reads_the_weights_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have many gigabytes."""
    read: list[Path] = []
    digest = TensorsHash._file_digest
    monkeypatch.setattr(TensorsHash, "_file_digest", lambda self, path: read.append(path) or digest(self, path))
    describe(checkpoint, engine="e", name="", dtype="float32", vocab_size=4096, max_length=2048, kv_slots=1)
    assert read == [checkpoint / "model.safetensors"]


def test_weights_are_hashed_beside_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of several chunks, and an empty one, in the order of their names; what was cancelled ends without reading
    them to the end."""
    monkeypatch.setitem(TensorsHash._file_digest.__globals__, "CHUNK_BYTES", 7)
    contents = {f"{name}.safetensors": name.encode() * count for name, count in (("b", 100), ("a", 3), ("c", 0))}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    expected = hashlib.sha256(b"".join(hashlib.sha256(contents[name]).digest() for name in sorted(contents)))
    assert TensorsHash(tmp_path).result() == tensors_hash(tmp_path) == expected.hexdigest()
    stopped = TensorsHash(tmp_path)
    stopped.cancel()
    stopped.result()


def test_weights_that_cannot_be_read_are_an_error_where_the_hash_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    with pytest.raises(OSError, match=r"a\.safetensors"):
        TensorsHash(tmp_path).result()


def test_a_file_that_cannot_be_read_is_named(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        fingerprint(checkpoint)
