"""The tokenizer of a GGUF file: that of the tokenizer.json which it was made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from specq.checkpoints.gguf_file import GgufFile
from specq.checkpoints.gguf_tokenizer import RULES, tokenizer_files
from specq.protocol import ConfigError
from specq.testing import tokenizer_files as made_files
from specq.testing import tokenizer_json
from specq.testing.checkpoints_gguf import tokenizer_keys
from specq.text import ByteCodec, TextCodec, num_tokens, tokenizer_hash
from tests.each import each

# As the models' own tokenizer.json have it; Qwen2's and Llama 3's differ in how many digits make a word.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|")


def by_regex(regex):
    return [pre_tokenizers.Split(Regex(regex), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


OWN = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": by_regex(QWEN2),
    "llama-bpe": by_regex(LLAMA3),
}


def file_of(**changes) -> GgufFile:
    """A file with the tokenizer of the tests, and some keys of its own."""
    keys = tokenizer_keys(360) | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return GgufFile(Path("a.gguf"), keys, {})


@each("rule", OWN)
@given(text=st.text() | st.text("ab' \t\n\r129.,;!?LlSs中🙂é"))
def test_texts_fall_into_the_tokens_of_the_original(rule, text):
    original = Tokenizer.from_str(tokenizer_json())
    original.pre_tokenizer = pre_tokenizers.Sequence(OWN[rule])
    if rule == "qwen2":
        original.normalizer = normalizers.NFC()
    if rule == "llama-bpe":
        content = json.loads(original.to_str())
        content["model"]["ignore_merges"] = True
        original = Tokenizer.from_str(json.dumps(content))
    codec = TextCodec(tokenizer_files(file_of(pre=rule)))

    found = codec.encode_part(text)

    assert found == original.encode(text, add_special_tokens=False).ids
    assert codec.decode(found) == original.decode(found)


def test_it_has_the_hash_of_the_original_and_no_padding():
    files = tokenizer_files(file_of())
    assert tokenizer_hash(files["tokenizer.json"]) == tokenizer_hash(tokenizer_json())
    assert num_tokens(files["tokenizer.json"]) == num_tokens(tokenizer_json()) < 360


def test_added_tokens_in_the_vocabulary_or_beside_it_are_no_difference():
    content = json.loads(tokenizer_json())
    before = tokenizer_hash(json.dumps(content))
    for token in content["added_tokens"]:
        del content["model"]["vocab"][token["content"]]
    assert tokenizer_hash(json.dumps(content)) == before
    content["added_tokens"].pop()
    assert tokenizer_hash(json.dumps(content)) != before


def special_ids(codec):
    return {i for i in range(400) if codec.tokens[i].is_special}


def test_special_tokens_and_the_chat_template():
    codec, original = TextCodec(tokenizer_files(file_of())), TextCodec(made_files())
    messages = [{"role": "user", "content": "Hello <|im_end|>"}]
    assert special_ids(codec) == special_ids(original) == {0, 1, 2}
    assert codec.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert codec.encode_chat(messages) == original.encode_chat(messages)


def test_a_chat_template_for_tools_stands_beside_the_other():
    file = file_of()
    file.metadata["tokenizer.chat_template.tool_use"] = "{{ tools | length }} tools"
    codec, messages = TextCodec(tokenizer_files(file)), [{"role": "user", "content": "a"}]
    assert codec.render_chat(messages, tools=[{}, {}]) == "2 tools"
    assert codec.render_chat(messages) == TextCodec(made_files()).render_chat(messages)


@each(
    ("changes", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [0], []),
        ({"add_bos_token": True, "add_eos_token": True}, [0], [2]),
        ({"pre": "llama-bpe"}, [0], []),
        ({"pre": "llama-bpe", "add_bos_token": False}, [], []),
        ({"add_bos_token": True, "bos_token_id": None}, [], []),
    ],
)
def test_a_prompt_begins_and_ends_as_the_file_says(changes, before, after):
    codec = TextCodec(tokenizer_files(file_of(**changes)))
    assert codec.encode("a b") == [*before, *codec.encode_part("a b"), *after]


REFUSED = {
    "kind": ({"model": "t5"}, r"a\.gguf: tokenizer\.ggml\.model is 't5'; supported in .*: gpt2 \(byte.* llama \(S"),
    "rule": ({"pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken'; supported in .* gpt-2, llama-bpe"),
    "no rule": ({"pre": ""}, r"\.pre is ''"),
    "no tokens": ({"tokens": None}, r"no tokenizer\.ggml\.tokens"),
    "other tokens": ({"tokens": [1, 2]}, r"no tokenizer\.ggml\.tokens that is a list of str"),
    "too few kinds": ({"token_type": [1]}, "it has 360 tokens and 1 token types"),
    "a merge": ({"merges": ["a b c"]}, "merge 'a b c'; expected two tokens"),
}


@each(("changes", "said"), REFUSED.values())
def test_what_is_not_supported_is_named(changes, said):
    with pytest.raises(ConfigError, match=said):
        tokenizer_files(file_of(**changes))


def test_a_token_may_stand_twice():
    """Its text becomes the last of its ids, as in llama.cpp's table; every id becomes that text, for people and for
    pieces of bytes."""
    keys = tokenizer_keys(360)
    tokens, kinds = (keys[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    copied = [tokens.index(name) for name in ("a", "\u0120a", "<|im_end|>", "\u00e9")]
    again = [(tokens[i], kinds[i]) for i in copied]
    ids = {name: [copied[at], len(tokens) + at, len(tokens) + 4 + at] for at, (name, _) in enumerate(again)}
    added = [*again, *again]
    file = file_of(tokens=tokens + [name for name, _ in added], token_type=kinds + [kind for _, kind in added])
    files = tokenizer_files(file)
    codec, pieces, once = TextCodec(files), ByteCodec(files), TextCodec(tokenizer_files(file_of()))
    for first, *others in ids.values():
        assert {codec.decode([i], skip_special=False) for i in (first, *others)} == {
            once.decode([first], skip_special=False)
        }
        assert {pieces.decode([i]) for i in (first, *others)} == {pieces.decode([first])}
    last = {first: others[-1] for first, *others in ids.values()}
    for text in ("a a aa ab", "a<|im_end|> a", "Janet sells 16 \u00e9 a day"):
        found = codec.encode_part(text)
        assert found == [last.get(i, i) for i in once.encode_part(text)]
        assert codec.decode(found, skip_special=False) == text
    assert pieces.id_of(b"a") == last[copied[0]]
    assert special_ids(codec) == special_ids(once) | {*ids["<|im_end|>"]}


@each("rule", RULES)
def test_every_rule_can_be_built(rule):
    """And splits a text without losing any of it."""
    text = "It's 2026:\n  na\u00efve words, 1,234.5 of them\u2026 \u4e2d\u6587 \U0001f642"
    codec = TextCodec(tokenizer_files(file_of(pre=rule)))
    assert codec.decode(codec.encode_part(text)) == text
