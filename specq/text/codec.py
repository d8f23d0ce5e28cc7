"""The tokenizer of one model: prompts and chats to ids, ids to text, without torch or transformers.

Rule: the identity of a tokenizer is `tokenizer_hash`, which ignores formatting and file layout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from specq.checkpoints import read_text
from specq.protocol import ConfigError, JobError
from specq.text.token_texts import TokenTexts

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
TOKENIZER_FILES = (  # the large one last: a client that has it cached can compare all others by the first piece
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    TOOL_TEMPLATE,
    "tokenizer.json",
)
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_ANSWER = "answer-4f1c"  # a text that appears in no template
LONG_CHARACTERS = 4096  # from this length on, tokenizing takes milliseconds


def load_tokenizer_files(model: str | Path) -> dict[str, str]:
    """Return the tokenizer files of a checkpoint as {name: text}. Empty if it has no tokenizer.json."""
    found = {name: read_text(Path(model), name) for name in TOKENIZER_FILES}
    return {name: text for name, text in found.items() if text is not None} if found["tokenizer.json"] else {}


# --- identity -----------------------------------------------------------------------------------------------------


def tokenizer_hash(tokenizer_json: str) -> str:
    """Return the SHA-256 (64 hex digits) of vocabulary, merges and added tokens. Raises ConfigError for a bad file.

    Some files also list added tokens in the vocabulary, others do not. The hash ignores that difference.
    """
    content = parse_tokenizer(tokenizer_json)
    model = content["model"]
    added = [(token["id"], token["content"]) for token in content.get("added_tokens") or []]
    identity = {
        "vocab": sorted((vocabulary_of(content) | {text: token_id for token_id, text in added}).items()),
        "merges": [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model.get("merges") or []],
        "added": sorted(added),
    }
    return hashlib.sha256(orjson.dumps(identity)).hexdigest()


def num_tokens(tokenizer_json: str) -> int:
    """Return one more than the largest token id. Raises ConfigError for a bad file."""
    content = parse_tokenizer(tokenizer_json)
    added = [token["id"] for token in content.get("added_tokens") or []]
    return 1 + max([*vocabulary_of(content).values(), *added], default=-1)


def token_id(tokenizer_json: str, token: str) -> int | None:
    """Return the id of a token, None if it does not exist. Raises ConfigError for a bad file."""
    content = parse_tokenizer(tokenizer_json)
    added = {one["content"]: int(one["id"]) for one in content.get("added_tokens") or []}
    return added.get(token, vocabulary_of(content).get(token))


def parse_tokenizer(tokenizer_json: str) -> dict[str, Any]:
    """Return the content of a tokenizer.json. Raises ConfigError unless it has a model with a vocabulary."""
    try:
        content = orjson.loads(tokenizer_json)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"tokenizer.json is not valid JSON: {error}") from None
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("vocab"), (dict, list)):
        raise ConfigError("tokenizer.json has no model with a vocabulary")
    return dict(content)


def vocabulary_of(content: dict[str, Any]) -> dict[str, int]:
    """Return token -> id; a Unigram model lists [token, score] in the order of the ids."""
    vocab = content["model"]["vocab"]
    return vocab if isinstance(vocab, dict) else {piece[0]: i for i, piece in enumerate(vocab)}


# --- the codec ----------------------------------------------------------------------------------------------------


class TextCodec:
    """The tokenizer of one model.

    - files: {name: text}, as returned by `load_tokenizer_files`. "tokenizer.json" is required. The others give the chat
      template and the names of the special tokens.
    - tokens: each token's spelling, bytes and text, by id.
    """

    def __init__(self, files: dict[str, str]) -> None:
        if "tokenizer.json" not in files:
            raise ConfigError(f"the model has no tokenizer.json, only {', '.join(files) or 'no files at all'}")
        self._tokenizer = build_tokenizer(files["tokenizer.json"])
        self._config = _settings(files)
        self._templates = _templates(files, self._config)
        self.tokens = TokenTexts(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, with the model's special tokens (BOS) around it."""
        return self._ids(text, special=True)

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a part of a text, without special tokens around it."""
        return self._ids(text, special=False)

    def _ids(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text. A long text is encoded as a batch.

        Only a batch releases the interpreter lock. So a long text does not block other threads.
        """
        if len(_encodable(text)) < LONG_CHARACTERS:
            return list(self._tokenizer.encode(text, add_special_tokens=special).ids)
        return list(self._tokenizer.encode_batch([text], add_special_tokens=special)[0].ids)

    def encode_chat(self, messages: Sequence[dict[str, Any]], /, **variables: Any) -> list[int]:
        """Return the ids of a conversation and the opening of the answer, by the model's chat template.

        messages: dicts with "role" and "content". `variables` are passed to the template (tools, enable_thinking and so
        on). Raises JobError if the model has no template or the template refuses the messages.
        """
        return self.encode_part(self.render_chat(messages, **variables))

    def render_chat(self, messages: Sequence[dict[str, Any]], /, **variables: Any) -> str:
        """Return the conversation as the text that the model was trained on. Raises JobError like `encode_chat`.

        With tools, the template `tool_use` is preferred to `default`, as in transformers.
        """
        from specq.text.messages import render

        template = self.chat_template(with_tools=variables.get("tools") is not None)
        if not template:
            raise JobError(f"the model has no chat template{self._other_templates()}; send a plain prompt")
        return render(template, messages, {**self.special_tokens, "add_generation_prompt": True, **variables})

    def render_open_chat(self, messages: Sequence[dict[str, Any]], /, **variables: Any) -> str:
        """Return the conversation like `render_chat`, up to the end of the last message, which the model continues."""
        from specq.text.messages import continued

        values = {"add_generation_prompt": False, **variables}
        if values["add_generation_prompt"]:
            raise JobError("continue_final_message and add_generation_prompt cannot both be true")
        return continued(messages, lambda changed: self.render_chat(changed, **values))

    def chat_template(self, *, with_tools: bool = False) -> str:
        """Return the text of the chat template, "" if there is none. See `render_chat`."""
        names = ("tool_use", "default") if with_tools else ("default",)
        return next((self._templates[name] for name in names if name in self._templates), "")

    def _other_templates(self) -> str:
        return f" called 'default', only {', '.join(map(repr, self._templates))}" if self._templates else ""

    @cached_property
    def turn_end(self) -> int | None:
        """The id of the special token with which the chat template ends an answer.

        None if the template ends it in another way, or if there is no template.
        """
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}]
        try:
            rendered = self.render_chat(turns, add_generation_prompt=False) if self.has_chat_template else ""
        except JobError:  # a template may require other turns
            return None
        behind = self.encode_part(rendered.rpartition(_ANSWER)[2].lstrip())[:1]
        return behind[0] if behind and self.tokens[behind[0]].is_special else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def special_tokens(self) -> dict[str, str]:
        """The named special tokens (bos_token, eos_token ...) for chat templates, as in transformers."""
        named = {name: _text(self._config.get(name)) for name in NAMED_TOKENS}
        return {name: text for name, text in named.items() if text}

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the vocabulary lacks it."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text. An unfinished character becomes U+FFFD. An id outside the vocabulary adds no text."""
        return str(self._tokenizer.decode([int(i) for i in token_ids], skip_special_tokens=skip_special))


def _encodable(text: str) -> str:
    """Return the text. Raises JobError for half a surrogate pair, which JSON can carry but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JobError(f"the prompt is not valid Unicode at character {error.start}: {error.reason}") from None
    return text


def build_tokenizer(tokenizer_json: str) -> Tokenizer:
    """Return a tokenizer that neither truncates nor pads. Raises ConfigError for unusable content."""
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # noqa: BLE001 - the Rust side raises plain Exception
        raise ConfigError(f"tokenizer.json cannot be used: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _settings(files: dict[str, str]) -> dict[str, Any]:
    """Return tokenizer_config.json merged over special_tokens_map.json.

    Raises ConfigError if one is not a JSON object.
    """
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            content = orjson.loads(files.get(name, "{}"))
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{name} is not valid JSON: {error}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{name} is not a JSON object")
        settings |= content
    return settings


def _templates(files: dict[str, str], config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name. A single template is "default". Files override the configuration."""
    told = config.get("chat_template")
    entries = told if isinstance(told, list) else [{"name": "default", "template": told}]
    found = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    in_files = {"default": files.get("chat_template.jinja"), "tool_use": files.get(TOOL_TEMPLATE)}
    if in_files["default"]:
        found = {}
    found |= {name: text for name, text in in_files.items() if text}
    return {str(name): str(template) for name, template in found.items() if template}


def _text(token: Any) -> str:
    """Return a special token's text. Some files wrap it in an object."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")
