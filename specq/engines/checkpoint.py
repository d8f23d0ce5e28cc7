"""Read the end tokens and the fingerprint of a checkpoint, independent of the engine.

The tokens that end a text come from all files of a checkpoint. Many files name only one of several. Fine-tunes often
add the end of a turn to the tokenizer alone. `generation_config.json` then still has the base model's end. vLLM, SGLang
and llama.cpp end a text at any of them. For GGUF files see `specq.checkpoints.gguf_config`.

Versions up to cb5a1ef read `generation_config.json`, else `config.json`, and three GGUF keys. A job that began under
them ends by those tokens (docs/decisions/0016). `added_ends` returns the other ones.

The fingerprint is one hash of everything that the text of a checkpoint depends on. Verifiers with equal fingerprints
and number formats generate the same text.

The fingerprint covers the tensors: the whole GGUF file, or all its parts. It covers `config.json`, the files that
describe quantisation, and the end tokens. It also covers options of a deployment that override the files. Only the
content of a file counts: the order of keys and spaces do not. The keys in `LEFT_OUT` do not count either. They name the
origin of a copy, or the number format, which is compared separately.

Rule: the fingerprint includes everything that may change a text. When in doubt, include it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

from specq.checkpoints import (
    draft_form,
    gguf_ends,
    gguf_in,
    gguf_name,
    gguf_parts,
    is_gguf,
    read_config,
    read_gguf,
    read_json,
    read_text,
)
from specq.protocol import ConfigError, ModelInfo
from specq.text import TOKENIZER_FILES, TextCodec, load_tokenizer_files, num_tokens, token_id, tokenizer_hash

MAX_ID = 2**31 - 1
_CONFIGS = ("generation_config.json", "config.json")
_TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


def end_tokens(model: Path) -> dict[int, str]:
    """Return {id: source} of the tokens that end a text. A source is a file or a metadata key.

    The ids that older versions used come first.
    """
    if is_gguf(model):
        named = gguf_ends(read_gguf(model))
    else:
        named = dict(reversed([*_configured(model), *_of_tokenizer(model)]))
    before = former_ends(model)
    return {end: named.get(end, "config.json") for end in (*before, *sorted(named.keys() - {*before}))}


def ends_told(model: Path) -> list[str]:
    """Return a line for each end token: its text, its id, and its source.

    If no file names one, the line describes the token that ends a chat (`TextCodec.turn_end`).
    """
    files = load_tokenizer_files(model)
    codec = TextCodec(files) if files else None
    named = end_tokens(model)
    if not named and codec and codec.turn_end is not None:
        named = {codec.turn_end: "the chat template; in chats only"}
    texts = {end: codec.decode([end], skip_special=False) if codec else "" for end in named}
    return [f"{texts[end]} {end} ({source})".lstrip() for end, source in named.items()]


def added_ends(model: Path) -> tuple[int, ...]:
    """Return the end tokens that older versions did not use."""
    return tuple(sorted(end_tokens(model).keys() - {*former_ends(model)}))


def former_ends(model: Path) -> tuple[int, ...]:
    """Return the end tokens that older versions used."""
    files = ("config.json",) if is_gguf(model) else _CONFIGS
    return next((found for file in files if (found := _ids(model / file, read_json(model, file))) is not None), ())


def _configured(model: Path) -> Iterator[tuple[int, str]]:
    for file in _CONFIGS:
        said = read_json(model, file)
        text_config = said.get("text_config")  # present in models that also read images
        for part in (said, text_config if isinstance(text_config, dict) else {}):
            yield from ((end, file) for end in _ids(model / file, part) or ())


def _of_tokenizer(model: Path) -> Iterator[tuple[int, str]]:
    tokenizer = read_text(model, "tokenizer.json")
    for file in _TOKENIZER_CONFIGS if tokenizer else ():
        token = read_json(model, file).get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        end = token_id(tokenizer or "", text) if isinstance(text, str) else None
        if end is not None:
            yield end, file


def _ids(file: Path, said: dict[str, Any]) -> tuple[int, ...] | None:
    """Return the `eos_token_id` values of a configuration; None without that key. Raises ConfigError for bad ids."""
    value = said.get("eos_token_id")
    if value is None:
        return None
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(end) is int and 0 <= end <= MAX_ID for end in ids):
        raise ConfigError(f"{file}: eos_token_id is {value!r:.80}, but must be a token's id, or a list of ids")
    return ids


def resolve_checkpoint(model: str) -> Path:
    """Return the checkpoint's directory or GGUF file. Fetch it from the hub unless `model` is one."""
    found = local_checkpoint(model)
    if found is not None:
        return found
    directory = _fetched(model, "*.json", "*.jinja", "*.safetensors")
    if not any(directory.glob("*.safetensors")):
        _fetched(model, "*.json", "pytorch_model*.bin")
    return directory


def local_checkpoint(model: str) -> Path | None:
    """Return the checkpoint's directory, its GGUF file, or the GGUF file in its directory. None for a hub name."""
    path = Path(model)
    if path.is_dir():
        return gguf_in(path) or path
    return path if is_gguf(path) else None


def tokenizer_files(model: str) -> dict[str, str]:
    """Return a model's tokenizer files as {name: text}; empty if it has none.

    For a hub name, only these files are fetched.
    """
    return load_tokenizer_files(local_checkpoint(model) or _fetched(model, *TOKENIZER_FILES))


def _fetched(model: str, *patterns: str) -> Path:
    """Return the directory of a model's files from the hub that match the patterns."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(patterns)))
    except Exception as error:  # the hub client raises many kinds of errors
        raise ConfigError(
            f"model {model!r} is neither a name from `specq models` nor a directory, and the hub does not provide it: "
            f"{error}"
        ) from error


def check_whole(checkpoint: Path) -> None:
    """Raise ConfigError if the headers of a checkpoint's weights show damage. It reads no weights."""
    if is_gguf(checkpoint):
        read_gguf(checkpoint)
        return
    from safetensors import SafetensorError, safe_open

    for path in checkpoint.glob("*.safetensors"):
        try:
            with safe_open(path, "np"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read; it may be truncated: {error}") from error


def resolve_directory(model: str, needed_by: str) -> Path:
    """Return the checkpoint's directory, for a caller that does not load GGUF files. Raises like `check_no_gguf`."""
    check_no_gguf(model, needed_by)
    return resolve_checkpoint(model)


def check_no_gguf(model: str, needed_by: str, name: str = "") -> None:
    """Raise ConfigError if `model` is a GGUF file. The error names `needed_by`, which does not load such files.

    `name` is the name under which the user requested the model.
    """
    if is_gguf(model):
        shown = f"{name} ({model})" if name and name != model else model
        raise ConfigError(
            f"{shown} is a GGUF file, which {needed_by} does not support: use a directory in Hugging Face layout or a "
            "hub name, or the native or torch engine"
        )


def read_info(checkpoint: Path, name: str = "") -> ModelInfo:
    """Return what a checkpoint's files specify about its model, without reading the weights.

    Fingerprint, number format and KV slots stay empty. Raises ConfigError for unusable files.
    """
    said = read_config(checkpoint)
    num_masks = draft_form.num_places(checkpoint) - 1 if draft_form.draft_shape(checkpoint) is None else 0
    vocab_size = int(said.get("vocab_size") or 0) - num_masks
    tokens, tokenizer = _tokenizer(checkpoint, vocab_size)
    return ModelInfo(
        name=name or _name(checkpoint),
        fingerprint="",
        dtype="",
        engine="",
        vocab_size=vocab_size,
        num_tokens=tokens,
        eos_ids=tuple(end_tokens(checkpoint)),
        max_length=int(said.get("max_position_embeddings") or 0),
        tokenizer_hash=tokenizer,
    )


def describe(
    checkpoint: Path,
    *,
    engine: str,
    name: str,
    dtype: str,
    vocab_size: int,
    max_length: int,
    kv_slots: int,
    arithmetic: str = "",
    overrides: Mapping[str, Any] | None = None,
    tensors: str = "",
) -> ModelInfo:
    """Return the description of a checkpoint's model as an engine runs it.

    - arithmetic: which kernels compute, see `ModelInfo`; empty: the engine has only one kind.
    - overrides: options of the engine that change the text.
    - tensors: its `tensors_hash`, if already known.
    """
    tokens, tokenizer = _tokenizer(checkpoint, vocab_size)
    tensors, added = tensors or tensors_hash(checkpoint), added_ends(checkpoint)
    former = fingerprint(checkpoint, overrides, tensors=tensors, ends=former_ends(checkpoint)) if added else tensors
    return ModelInfo(
        name=name or _name(checkpoint),
        fingerprint=fingerprint(checkpoint, overrides, tensors=tensors),
        former_fingerprint=former,
        dtype=dtype,
        arithmetic=arithmetic or engine,
        engine=engine,
        vocab_size=vocab_size,
        num_tokens=tokens,
        eos_ids=tuple(end_tokens(checkpoint)),
        added_eos_ids=added,
        max_length=max_length,
        tokenizer_hash=tokenizer,
        kv_slots=kv_slots,
    )


def _tokenizer(checkpoint: Path, vocab_size: int) -> tuple[int, str]:
    """Return the number of tokens and the hash of the checkpoint's tokenizer.

    A draft model of specq's own form names the tokenizer that it was made for.
    """
    if shape := draft_form.draft_shape(checkpoint):
        return shape.num_tokens, shape.tokenizer_hash
    text = read_text(checkpoint, "tokenizer.json")
    return (num_tokens(text), tokenizer_hash(text)) if text else (vocab_size, "")


def _name(checkpoint: Path) -> str:
    return gguf_name(checkpoint) if is_gguf(checkpoint) else checkpoint.name


LEFT_OUT = frozenset(
    {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
QUANTISATION = "quantization_config"  # below this key every key counts, including `dtype`
_FILES = ("config.json", "quantize_config.json", "hf_quant_config.json", "quant_config.json")
CHUNK_BYTES = 16 << 20
_MARK = "specq fingerprint 2"


def fingerprint(
    model: Path, overrides: Mapping[str, Any] | None = None, *, tensors: str = "", ends: Iterable[int] | None = None
) -> str:
    """Hash everything that the text of a checkpoint depends on.

    - overrides: options of the engine that change the text.
    - tensors: its `tensors_hash`, if already known: reading large weights takes long.
    - ends: the tokens that end a text; None: all that its files name.
    """
    said: dict[str, Any] = {name: _relevant(read_json(model, name)) for name in _FILES}
    said["eos"] = [*(end_tokens(model) if ends is None else ends)]
    if overrides:
        said["overrides"] = dict(overrides)
    parts = [_MARK, tensors or tensors_hash(model), said]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def tensors_hash(model: Path) -> str:
    """Hash the contents of the weight files, in the order of their names. Older fingerprints covered only these."""
    return TensorsHash(model).result()


class TensorsHash:
    """Compute the `tensors_hash` of a checkpoint in threads, while the weights are loaded.

    The threads start at once. A large model has many files. Hashing releases the interpreter lock, except for a moment
    after each CHUNK_BYTES.
    """

    def __init__(self, model: Path) -> None:
        files = gguf_parts(model) if is_gguf(model) else _weight_files(model)
        self._is_cancelled = Event()
        pool = ThreadPoolExecutor()
        self._digests = [pool.submit(self._file_digest, path) for path in files]
        pool.shutdown(wait=False)

    def result(self) -> str:
        """Wait for all files and return the hash. Raises OSError for a file that cannot be read."""
        digest = hashlib.sha256()
        for found in self._digests:
            digest.update(found.result())
        return digest.hexdigest()

    def cancel(self) -> None:
        """Stop the threads soon. The result must not be requested afterwards."""
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
    """Return a configuration without the keys in `LEFT_OUT`, at any depth."""
    if isinstance(value, list):
        return [_relevant(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: item if key == QUANTISATION else _relevant(item) for key, item in value.items() if key not in LEFT_OUT}
