"""The tokenizer of a GGUF file as the files of Hugging Face layout.

KINDS has the kinds that are supported. Others are refused. A slightly wrong tokenizer makes worse text, and the cause
stays invisible. To add a kind, add a function that returns its `TokenizerForm`.
"""

from __future__ import annotations

from typing import Any

import orjson

from specq.checkpoints.gguf_byte_level import byte_level
from specq.checkpoints.gguf_config import refusal
from specq.checkpoints.gguf_file import GgufFile
from specq.checkpoints.gguf_sentencepiece import sentencepiece
from specq.checkpoints.gguf_vocabulary import TokenizerForm, TokenKind, Vocabulary, decoder, read_vocabulary

KINDS = {"gpt2": byte_level, "llama": sentencepiece}  # of tokenizer.ggml.model
_ABOUT = "gpt2 (byte-level BPE), llama (SentencePiece's BPE)"
_CHANGES = ("tokenizer.ggml.remove_extra_whitespaces", "tokenizer.ggml.precompiled_charsmap")
_NAMED = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}  # key here -> name there


def tokenizer_files(file: GgufFile) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json. Raises ConfigError for a tokenizer that is not supported."""
    kind = file.metadata.get("tokenizer.ggml.model", "")
    if not isinstance(kind, str) or kind not in KINDS:
        raise refusal(file, "tokenizer.ggml.model", kind, _ABOUT)
    for key in _CHANGES:
        if value := file.metadata.get(key):
            raise refusal(file, key, value, "texts that are not changed")
    vocabulary = read_vocabulary(file)
    form = KINDS[kind](file, vocabulary)
    ids = {key: _special_id(file, key, form) for key in _NAMED}
    made = {
        "tokenizer.json": _tokenizer(file, form, vocabulary, ids),
        "tokenizer_config.json": _settings(file, vocabulary, ids),
    }
    return {name: orjson.dumps(said).decode() for name, said in made.items()}


def _special_id(file: GgufFile, key: str, form: TokenizerForm) -> int:
    """Return the id of a token that the file or its kind names; -1 if neither does."""
    found = file.metadata.get(f"tokenizer.ggml.{key}_token_id", form.ids.get(key))
    return found if isinstance(found, int) else -1


def _tokenizer(file: GgufFile, form: TokenizerForm, vocabulary: Vocabulary, ids: dict[str, int]) -> dict[str, Any]:
    plain = {"unk_token": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    unused = dict.fromkeys(("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, vocabulary.tokens[i], special=vocabulary.kinds[i] in form.special)
            for i in vocabulary.ids_of(*form.special, TokenKind.USER_DEFINED)
        ],
        "normalizer": form.normalizer,
        "pre_tokenizer": form.pre_tokenizer,
        "post_processor": _around(file, form, vocabulary.tokens, ids),
        "decoder": decoder(form, vocabulary),
        "model": {
            "type": "BPE",
            **unused,
            **plain,
            "vocab": {token: i for i, token in vocabulary.tokens.items()},
            **form.model,
        },
    }


def _added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    ways = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": special, **ways}


def _around(
    file: GgufFile, form: TokenizerForm, tokens: dict[int, str], special_ids: dict[str, int]
) -> dict[str, Any] | None:
    """Return the processor that adds BOS before a prompt and EOS after it, if requested."""
    unsaid = {"bos": form.begins, "eos": False}
    wanted = [end for end in unsaid if file.metadata.get(f"tokenizer.ggml.add_{end}_token", unsaid[end])]
    ids = {end: i for end in wanted if (i := special_ids[end]) in tokens}
    if not ids:
        return None
    ends = {end: [{"SpecialToken": {"id": tokens[i], "type_id": 0}}] for end, i in ids.items()}
    first, second = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    single = [*ends.get("bos", []), first, *ends.get("eos", [])]
    special = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ids.values()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second], "special_tokens": special}


def _settings(file: GgufFile, vocabulary: Vocabulary, ids: dict[str, int]) -> dict[str, Any]:
    """Return the names of special tokens and the chat template. A list by name if there is also one for tools."""
    tokens = vocabulary.tokens
    named = {f"{name}_token": tokens[ids[key]] for key, name in _NAMED.items() if ids[key] in tokens}
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    found = {name: file.metadata.get(key) for name, key in keys.items()}
    templates = [{"name": name, "template": text} for name, text in found.items() if isinstance(text, str)]
    told = templates if len(templates) > 1 else found["default"]
    return {**named, **({"chat_template": told} if isinstance(told, list | str) else {})}
