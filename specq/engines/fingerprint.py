"""What the text of a checkpoint depends on, as one hash: verifiers of equal fingerprints (and number formats) say the
same.

It covers the tensors (of a GGUF file all of it, of one in parts all of each), `config.json`, the files that say how
tensors are quantised, the tokens that end a text, and the options by which a deployment runs the model otherwise than
its files say. Files count by what they say, not by how it is written: the order of keys and spaces are left out, and so
are the keys in `LEFT_OUT`, which name where a copy came from, or the number format, which stands beside the
fingerprint.

Rule: what may change a text is in it; when in doubt, it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from specq.checkpoints import gguf_parts, is_gguf, read_json
from specq.engines.ends import end_tokens

LEFT_OUT = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
QUANTISATION = "quantization_config"  # below it every key counts, `dtype` too
_FILES = ("config.json", "quantize_config.json", "hf_quant_config.json", "quant_config.json")
CHUNK_BYTES = 16 << 20
_MARK = "specq fingerprint 2"


def fingerprint(
    model: Path, overrides: Mapping[str, Any] | None = None, *, tensors: str = "", ends: Iterable[int] | None = None
) -> str:
    """Hash what the text of a checkpoint depends on.

    overrides   options of what runs it that change its text
    tensors     its `tensors_hash`, where that is known already: to read large weights takes long
    ends        the tokens that end a text; None: all that its files name
    """
    said: dict[str, Any] = {name: _relevant(read_json(model, name)) for name in _FILES}
    said["eos"] = [*(end_tokens(model) if ends is None else ends)]
    if overrides:
        said["overrides"] = dict(overrides)
    parts = [_MARK, tensors or tensors_hash(model), said]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def tensors_hash(model: Path) -> str:
    """Hash the contents of the weight files, in the order of their names: all that fingerprints covered before."""
    return TensorsHash(model).result()


class TensorsHash:
    """`tensors_hash` of a checkpoint, computed by threads from now on: beside whatever loads the weights.

    A large model has many files, and hashing leaves the interpreter free but for a moment each CHUNK_BYTES.
    """

    def __init__(self, model: Path) -> None:
        files = gguf_parts(model) if is_gguf(model) else _weight_files(model)
        self._is_cancelled = Event()
        pool = ThreadPoolExecutor()
        self._digests = [pool.submit(self._file_digest, path) for path in files]
        pool.shutdown(wait=False)

    def result(self) -> str:
        """Wait for all files, and return the hash; OSError for one that cannot be read."""
        digest = hashlib.sha256()
        for found in self._digests:
            digest.update(found.result())
        return digest.hexdigest()

    def cancel(self) -> None:
        """Let the threads end soon; nobody may ask for the result."""
        self._is_cancelled.set()

    def _file_digest(self, path: Path) -> bytes:
        digest, chunk = hashlib.sha256(), memoryview(bytearray(min(CHUNK_BYTES, max(path.stat().st_size, 1))))
        with path.open("rb", buffering=0) as file:
            while (size := file.readinto(chunk)) and not self._is_cancelled.is_set():
                digest.update(chunk[:size])
        return digest.digest()


def _weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors")) or sorted(directory.glob("pytorch_model*.bin"))


def _relevant(value: Any) -> Any:
    """Return what a configuration says without the keys that are left out, at any depth."""
    if isinstance(value, list):
        return [_relevant(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: item if key == QUANTISATION else _relevant(item) for key, item in value.items() if key not in LEFT_OUT}
