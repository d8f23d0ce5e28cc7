"""The tokens that end a text: those that any file of a checkpoint names, since many name only one of several.

Fine-tunes often add the end of a turn to the tokenizer alone, and leave the base model's end in
`generation_config.json`. vLLM, SGLang and llama.cpp end a text at any of them. Of a GGUF file: see
`specq.checkpoints.gguf_ends`.

Versions up to cb5a1ef read `generation_config.json`, else `config.json`, and of a GGUF file three keys. A job that
began under them ends by those tokens (docs/decisions/0016): `added_ends` are the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specq.checkpoints import gguf_ends, is_gguf, read_gguf, read_json, read_text
from specq.protocol import ConfigError
from specq.text import TextCodec, load_tokenizer_files, token_id

MAX_ID = 2**31 - 1
_CONFIGS = ("generation_config.json", "config.json")
_TOKENIZER_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


def end_tokens(model: Path) -> dict[int, str]:
    """Return the ids of the tokens that end a text, those of older versions first, each with what names it: a file, a
    key of the metadata."""
    if is_gguf(model):
        named = gguf_ends(read_gguf(model))
    else:
        named = dict(reversed([*_configured(model), *_of_tokenizer(model)]))
    before = former_ends(model)
    return {end: named.get(end, "config.json") for end in (*before, *sorted(named.keys() - {*before}))}


def ends_told(model: Path) -> list[str]:
    """Return a line for each token that ends a text: its text, its id, and what names it. Where no file names one, for
    the one that ends a chat (`TextCodec.turn_end`)."""
    files = load_tokenizer_files(model)
    codec = TextCodec(files) if files else None
    named = end_tokens(model)
    if not named and codec and codec.turn_end is not None:
        named = {codec.turn_end: "the chat template; in chats only"}
    texts = {end: codec.decode([end], skip_special=False) if codec else "" for end in named}
    return [f"{texts[end]} {end} ({source})".lstrip() for end, source in named.items()]


def added_ends(model: Path) -> tuple[int, ...]:
    """Return those that older versions did not take for ends."""
    return tuple(sorted(end_tokens(model).keys() - {*former_ends(model)}))


def former_ends(model: Path) -> tuple[int, ...]:
    """Return what older versions took for ends."""
    files = ("config.json",) if is_gguf(model) else _CONFIGS
    return next((found for file in files if (found := _ids(model / file, read_json(model, file))) is not None), ())


def _configured(model: Path) -> Iterator[tuple[int, str]]:
    for file in _CONFIGS:
        said = read_json(model, file)
        text_config = said.get("text_config")  # of a model that reads images, too
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
    """Return the ids that a configuration has for its end, None if it says nothing; ConfigError for what is no id."""
    value = said.get("eos_token_id")
    if value is None:
        return None
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(end) is int and 0 <= end <= MAX_ID for end in ids):
        raise ConfigError(f"{file}: eos_token_id is {value!r:.80}; it must be a token's id, or a list of ids")
    return ids
