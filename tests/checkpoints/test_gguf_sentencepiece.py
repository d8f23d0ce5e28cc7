"""SentencePiece's tokenizers of GGUF files, against its algorithm as llama.cpp has it, written here again."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specq.checkpoints import same_tokenizer
from specq.checkpoints.gguf_file import GgufFile
from specq.checkpoints.gguf_tokenizer import tokenizer_files
from specq.grammar import SessionGrammar
from specq.grammar.building import build_matcher
from specq.grammar.limits import GrammarLimits
from specq.grammar.tokenizer import build_tokenizer
from specq.protocol import ConfigError
from specq.testing.checkpoints_gguf import sentencepiece_keys
from specq.text import ByteCodec, Detokenizer, StopMatcher, TextCodec, num_tokens
from tests.each import each

SPACE = "\u2581"
SIZE = 512
KEYS = sentencepiece_keys(SIZE)
PARTS = ("a day", "Janet", " ", "  ", "\n", "\t", "=", " return", "\U0001f642", "\u4e2d\u6587", "\u0301", SPACE, "\x00")
MARKS = ("<s>", "</s>", "[INST]", "<user>", "<unk>", "<0x0A>", "<s", "NST]")


def file_of(**changes) -> GgufFile:
    """A file with the tokenizer of the tests, and some keys of its own."""
    return GgufFile(Path("a.gguf"), KEYS | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, {})


def with_pieces(pieces: list[str]) -> dict[str, Any]:
    """Return keys of a vocabulary with these pieces, best first, after the special tokens and the bytes."""
    start = KEYS["tokenizer.ggml.tokens"][:259]
    kinds = KEYS["tokenizer.ggml.token_type"][:259]
    scores = [0.0] * len(start) + [-float(i) for i in range(len(pieces))]
    return {"tokens": [*start, *pieces], "token_type": [*kinds, *(1 for _ in pieces)], "scores": scores}


def reference(file: GgufFile, text: str) -> list[int]:
    """Tokenize as llama.cpp does: by marks first, then by the scores of neighbours."""
    tokens, kinds, scores = (file.metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    ids = {token: i for i, token in enumerate(tokens) if kinds[i] != 5}
    marks = sorted((token for token, i in ids.items() if kinds[i] in (2, 3, 4)), key=len, reverse=True)
    parts: list[str | int] = [text]
    for mark in marks:
        parts = [one for part in parts for one in (cut(part, mark, ids[mark]) if isinstance(part, str) else [part])]
    prefix = SPACE if file.metadata.get("tokenizer.ggml.add_space_prefix", True) else ""
    found = (
        [part] if isinstance(part, int) else join((prefix + part).replace(" ", SPACE), ids, scores) for part in parts
    )
    return [one for own in found for one in own]


def cut(text: str, mark: str, token_id: int) -> list[str | int]:
    between = ([token_id, part] for part in text.split(mark))
    return [part for part in itertools.chain.from_iterable(between) if part != ""][1:]


def join(text: str, ids: dict[str, int], scores: list[float]) -> list[int]:
    """Join the best neighbours, the leftmost first, until there are none."""
    symbols = list(text)
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]
        if not pairs:
            break
        place = -max(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    by_byte = ([ids[one]] if one in ids else [ids[f"<0x{byte:02X}>"] for byte in one.encode()] for one in symbols)
    return [token_id for own in by_byte for token_id in own]


CODEC, BYTES, FILE = TextCodec(tokenizer_files(file_of())), ByteCodec(tokenizer_files(file_of())), file_of()


@given(st.text() | st.lists(st.sampled_from((*PARTS, *MARKS)) | st.text(max_size=3)).map("".join))
def test_texts_fall_into_the_tokens_of_the_scores(text):
    found = CODEC.encode_part(text)

    assert found == reference(FILE, text)
    assert CODEC.encode(text) == [1, *found]
    plain = text.replace(SPACE, " ")
    if not any(mark in text for mark in MARKS):
        assert CODEC.decode(found) == plain
        assert BYTES.decode(found).decode() == (text and " " + plain)
    assert BYTES.decode(BYTES.encode(plain.encode())).decode() == plain


@given(st.permutations([*"ab" + SPACE]), st.text("ab ", max_size=24), st.data())
def test_any_vocabulary_with_scores_that_differ(letters, text, data):
    """Also tokens that no merges reach, and tokens that several pairs of tokens make."""
    words = st.lists(st.text("ab" + SPACE, min_size=2, max_size=6), max_size=16, unique=True)
    pieces = data.draw(st.permutations([*letters, *data.draw(words)]))
    file = file_of(**with_pieces(pieces))
    assert TextCodec(tokenizer_files(file)).encode_part(text) == reference(file, text)


def test_the_reference_is_that_of_llama():
    """By hand: the leftmost of equal pairs first, a better token of two later, bytes of what is unknown."""
    file = file_of(**with_pieces(["aa", "ab", "aab", "a", "b", SPACE]))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    found = reference(file, "aaab<s>\U0001f642")
    assert [tokens[i] for i in found] == [SPACE, "aa", "ab", "<s>", SPACE, "<0xF0>", "<0x9F>", "<0x99>", "<0x82>"]


@each(
    ("changes", "text", "spelled"),
    [
        ({}, "a", ["<s>", "\u2581a"]),
        ({}, "", ["<s>"]),
        ({}, "a</s>a", ["<s>", "\u2581a", "</s>", "\u2581a"]),
        ({"add_space_prefix": False}, "a", ["<s>", "a"]),
        ({"add_bos_token": False}, "a", ["\u2581a"]),
        ({"add_eos_token": True}, "a", ["<s>", "\u2581a", "</s>"]),
        ({"bos_token_id": None}, "a", ["\u2581a"]),
    ],
)
def test_a_prompt_begins_and_ends_as_the_file_says(changes, text, spelled):
    codec = TextCodec(tokenizer_files(file_of(**changes)))
    found = codec.encode(text)
    assert [codec.tokens[i].spelling for i in found] == spelled
    assert codec.decode(found) == text.replace("</s>", " " * ("add_space_prefix" not in changes))


def test_special_tokens_are_named_and_left_out():
    """Those of the kind, if the file names none; user-defined ones are text."""
    keys = {key: value for key, value in KEYS.items() if not key.endswith("_token_id")}
    codec = TextCodec(tokenizer_files(GgufFile(Path("a.gguf"), keys, {})))
    assert codec.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    found = codec.encode("[INST]<user>a<unk>")
    assert codec.decode(found) == "<user> a"
    assert codec.decode(found, skip_special=False) == "<s>[INST]<user> a<unk>"
    assert num_tokens(tokenizer_files(file_of())["tokenizer.json"]) < SIZE, "padding of the vocabulary is no token"


def test_equal_scores_are_in_the_order_of_ids():
    """As converters write them that know none."""
    pieces = with_pieces(["ba", "ab", "a", "b", SPACE])
    codec = TextCodec(tokenizer_files(file_of(**pieces | {"scores": [-1000.0] * len(pieces["tokens"])})))
    assert [codec.tokens[i].spelling for i in codec.encode_part("aba")] == [SPACE, "a", "ba"]


def test_a_token_may_stand_twice():
    keys = with_pieces(["ab", "a", "b", SPACE, "ab", "a"])
    keys |= {"tokens": [*keys["tokens"], "</s>"], "token_type": [*keys["token_type"], 3]}
    keys["scores"].append(0.0)
    files = tokenizer_files(file_of(**keys))
    codec, pieces = TextCodec(files), ByteCodec(files)
    assert codec.encode_part("aba</s>") == [262, 263, 264, 265]
    assert [codec.decode([262, i]) for i in (259, 263, 260, 264)] == ["ab", "ab", "a", "a"]
    assert [codec.tokens[i].text for i in (2, 265, 259)] == ["</s>", "</s>", "ab"]
    assert [pieces.decode([i]) for i in (259, 263)] == [b"ab"] * 2
    assert pieces.id_of(b"a") == 264


REFUSED = {
    "no scores": ({"scores": None}, r"no tokenizer\.ggml\.scores that is a list of float"),
    "too few scores": ({"scores": [0.0]}, rf"{SIZE} tokens and 1 scores"),
    "no number": ({"scores": [float("nan")] * SIZE}, r"scores \(tokenizer\.ggml\.scores\), which must be numbers"),
    "whitespace": ({"remove_extra_whitespaces": True}, r"ggml\.remove_extra_whitespaces is True; supported in GGUF"),
    "normalisation": ({"precompiled_charsmap": [1, 2]}, r"ggml\.precompiled_charsmap is \[1, 2\]; supported in GGUF"),
    "no bytes": (
        {"token_type": [1] * SIZE},
        r"0 tokens of kind byte must be <0x00> to <0xFF>.* missing: <0x00>, <0x",
    ),
    "other bytes": (
        {"tokens": ["<0x0G>" if token == "<0x0A>" else token for token in KEYS["tokenizer.ggml.tokens"]]},
        r"256 tokens of kind byte .* unexpected: <0x0G>",
    ),
}


@each(("changes", "said"), REFUSED.values())
def test_what_is_not_supported_is_named(changes, said):
    with pytest.raises(ConfigError, match=rf"a\.gguf.*{said}"):
        tokenizer_files(file_of(**changes))


WRONG = (None, -1, 2**40, 0.5, "x", [], [0], ["a"], [3] * SIZE, [0.0] * SIZE, ["<0x41>"] * SIZE)


@each("key", [key for key in KEYS if KEYS[key] is not None] + ["tokenizer.ggml.add_space_prefix"])
def test_any_value_of_a_key_gives_a_tokenizer_or_an_error(key):
    """Nothing else is raised, also where files are only compared."""
    outcomes = set()
    for value in WRONG:
        file = GgufFile(Path("a.gguf"), KEYS | {key: value}, {})
        try:
            outcomes.add(same_tokenizer(file, FILE))
            codec = TextCodec(tokenizer_files(file))
            assert codec.decode(codec.encode_part("a")).strip() == "a"
        except ConfigError as error:
            outcomes.add(str(error))
    assert not isinstance(KEYS.get(key), list) or len(outcomes) > 2


@given(st.lists(st.integers(0, SIZE), max_size=12), st.lists(st.integers(0, SIZE), max_size=12))
def test_a_stream_has_the_text_of_the_whole(prompt, answer):
    """The rule of texts (`tests/text/test_token_texts.py`), on a prompt of whole characters."""
    prompt = [i for i in prompt if not CODEC.tokens[i].is_byte]
    detokenizer = Detokenizer(CODEC, prompt)
    told = "".join(map(detokenizer.push, answer)) + detokenizer.flush()
    whole, before = CODEC.decode(prompt + answer), CODEC.decode(prompt)
    assert told == whole[len(before) :]


def test_a_stop_string_ends_between_bytes_and_pieces():
    matcher = StopMatcher(CODEC, ("\U0001f642",))
    found = CODEC.encode_part("Janet \U0001f642 day")
    assert matcher.push(found) == found.index(CODEC.encode_part("\U0001f642")[-1], 1)
    assert matcher.take() == "Janet "


def test_grammars_read_the_same_tokens():
    """llguidance has the same bytes for each token, apart from 0xFF, which no text has."""
    own = build_tokenizer(tokenizer_files(FILE), SIZE, (2,))
    text = 'Janet sells 16 \u00e9\n\U0001f642 "a"'
    assert own.inner.decode_bytes(own.ids(text)) == text.encode()
    plain = [i for i in range(SIZE) if CODEC.tokens[i].data not in (b"", b"\xff") and not CODEC.tokens[i].is_special]
    assert [own.inner.decode_bytes([i]) for i in plain] == [CODEC.tokens[i].data for i in plain]


@each("seed", range(8))
def test_a_text_under_a_grammar_is_what_the_grammar_says(seed):
    """Masks allow pieces and single bytes; the detokenizer's text behind a prompt is valid JSON."""
    values, draw = ["a day", "\u00e9 \U0001f642", " Janet  sells\n"], random.Random(seed)
    own = build_tokenizer(tokenizer_files(FILE), SIZE, (2,))
    schema = {"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"], "additionalProperties": False}
    wanted = json.dumps({"json_schema": schema})
    grammar = SessionGrammar(build_matcher(own, wanted, GrammarLimits()), own.inner, (2,))
    detokenizer, text = Detokenizer(CODEC, CODEC.encode("[INST] say it")), ""
    masks = np.zeros((1, SIZE // 32), np.int32)
    while not grammar.has_ended:
        grammar.fill((), (), masks)
        allowed = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()
        token_id = draw.choice([i for i in allowed if i != 2] or allowed)
        grammar.commit([token_id])
        text += detokenizer.push(token_id)
    assert json.loads(text + detokenizer.flush()) in [{"a": value} for value in values]
