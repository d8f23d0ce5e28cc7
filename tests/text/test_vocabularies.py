"""Two vocabularies: bytes to ids and back, the shared tokens, and a text in the other's tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers

from specq.models import resolve_model
from specq.protocol import ConfigError
from specq.testing.tokenizer import sentencepiece_files, tokenizer_files
from specq.text import ByteCodec, Retold, SharedTokens, TextCodec, Vocabularies, load_tokenizer_files, whole_characters
from specq.text.vocabularies import CHUNK, LONG_CHUNK
from tests.each import each

TINY_FILES = load_tokenizer_files(resolve_model("tiny", "target"))
FILES = {"trained": tokenizer_files(), "tiny": TINY_FILES, "sentencepiece": sentencepiece_files()}
CODECS = {name: ByteCodec(files) for name, files in FILES.items()}
PAIRS = [(draft, target) for draft in CODECS for target in CODECS if draft != target]
texts = st.text(max_size=40) | st.text(st.sampled_from("ab \nreturn eggs é中🙂<|im_end|>"), max_size=60)
anything = st.binary(max_size=30) | texts.map(str.encode)


@given(data=anything, name=st.sampled_from(sorted(CODECS)))
def test_bytes_come_back_from_their_ids(data, name):
    codec = CODECS[name]
    token_ids = codec.encode(data)
    assert codec.decode(token_ids) == data
    assert all(codec.tokens[i] is not None for i in token_ids)  # so none is special, for any text


@each("text", ["def add(a, b):\n    return a + b", " the eggs", "naïve 中文 🙂"])
def test_text_is_cut_as_the_tokenizer_cuts_it(text):
    for name in ("trained", "tiny"):
        assert CODECS[name].encode(text.encode()) == TextCodec(FILES[name]).encode_part(text)


def test_no_space_is_put_before_a_piece_of_a_text():
    codec = CODECS["sentencepiece"]
    assert codec.tokens[codec.encode(b"return")[0]] == b"re"
    assert codec.tokens[codec.encode(b" return")[0]] == b" return"


def test_texts_are_not_normalised():
    """What a tokenizer would make the same would be another text to the target."""
    content = json.loads(tokenizer_files()["tokenizer.json"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    codec = ByteCodec({"tokenizer.json": tokenizer.to_str()})
    data = "Cafe\u0301".encode()
    assert codec.decode(codec.encode(data)) == data


def test_what_the_vocabulary_lacks_is_left_out():
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.Metaspace()
    codec = ByteCodec({"tokenizer.json": tokenizer.to_str()})
    assert codec.encode("aéb\n".encode()) == [0, 1]


def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ConfigError, match=r"no bytes of their own \(decoder: WordPiece\)"):
        ByteCodec({"tokenizer.json": tokenizer.to_str()})


@given(st.text(max_size=10), st.integers(0, 3))
def test_half_a_character_waits(text, cut):
    data = (text + "🙂").encode()
    data = data[: len(data) - cut]
    assert data[: whole_characters(data)].decode() == (text if cut else text + "🙂")


# --- what is shared ---------------------------------------------------------------------------------------------------


@each(("draft", "target"), PAIRS)
def test_shared_tokens_have_equal_bytes_and_stand_once(draft, target):
    both = SharedTokens.of(CODECS[draft], CODECS[target])
    assert len(set(both.draft_ids.tolist())) == len(set(both.target_ids.tolist())) == len(both) > 50
    assert both.target_ids.tolist() == sorted(both.target_ids.tolist())
    for own, its in zip(both.draft_ids.tolist(), both.target_ids.tolist(), strict=True):
        bytes_of = CODECS[draft].tokens[own], CODECS[target].tokens[its]
        assert bytes_of[0] == bytes_of[1]
        if bytes_of[0] is None:
            assert own in CODECS[draft].special.values()
            assert its in CODECS[target].special.values()


def test_special_tokens_are_shared_by_spelling_or_by_what_they_are():
    tiny, trained, pieces = CODECS["tiny"], CODECS["trained"], CODECS["sentencepiece"]
    same = Vocabularies(trained, tiny).special
    assert same[tiny.special["<|im_start|>"]] == trained.special["<|im_start|>"]
    assert Vocabularies(pieces, tiny).special == {tiny.ends["eos_token"]: pieces.special["</s>"]}


def test_how_many_are_shared_is_said():
    said = str(Vocabularies(CODECS["trained"], CODECS["tiny"]).shared)
    assert said == "7% of the target's 4096 tokens"


# --- a text that grows ------------------------------------------------------------------------------------------------


def spelled(vocabularies: Vocabularies, target_ids: list[int]) -> bytes:
    return b"".join(map(vocabularies.bytes_of, target_ids))


@given(data=st.data(), pair=st.sampled_from(PAIRS))
def test_retokenized_texts_keep_their_bytes_for_any_commit_order(data, pair):
    """For any target tokens and commit positions, the draft tokens have the same bytes."""
    vocabularies = Vocabularies(CODECS[pair[0]], CODECS[pair[1]])
    token = st.integers(0, len(vocabularies.target.tokens) - 1)
    parts = data.draw(st.lists(st.lists(token, min_size=1, max_size=50), min_size=1, max_size=6))
    grown = Retold(vocabularies, parts[0])
    for part in parts[1:]:
        before = list(grown.draft_ids)
        num_kept = grown.append(part)
        assert grown.draft_ids[:num_kept] == before[:num_kept]
    whole = [token for part in parts for token in part]
    assert grown.target_ids == whole
    assert grown.draft_ids == Retold(vocabularies, whole).draft_ids
    if any(vocabularies.target.tokens[i] or i in vocabularies.special for i in whole):
        assert vocabularies.draft.decode(grown.draft_ids) == spelled(vocabularies, whole)


@each("text", ["Janet sells her eggs. " * 60, "中文" * 400])
def test_only_the_end_of_a_text_is_cut_anew(text, monkeypatch):
    vocabularies = Vocabularies(CODECS["tiny"], CODECS["trained"])
    target_ids = vocabularies.target.encode(text.encode())
    retold = Retold(vocabularies, target_ids)
    lengths = []
    monkeypatch.setattr(Vocabularies, "retell", lambda self, ids: lengths.append(len(ids)) or [0])
    retold.append(target_ids[:1])
    assert sum(lengths) <= LONG_CHUNK + CHUNK
    assert len(target_ids) > 2 * sum(lengths)


def test_drafted_tokens_stay_unchanged_until_a_correction():
    vocabularies = Vocabularies(CODECS["tiny"], CODECS["trained"])
    tiny, target = vocabularies.draft, vocabularies.target
    retold = Retold(vocabularies, target.encode(b"I will"))
    start = list(retold.draft_ids)
    letters = [tiny.id_of(bytes([byte])) for byte in b" return"]
    retold.follow(target.encode(b" return"), letters)
    assert retold.draft_ids == [*start, *letters]
    num_kept = retold.append(target.encode(b" it"))
    assert num_kept == len(start)
    assert retold.draft_ids == tiny.encode(b"I will return it")


def test_the_draft_models_own_beginning_stands_once():
    """Its token for a text's beginning is put before a text, unless that begins with the target's."""
    pieces, trained = CODECS["sentencepiece"], CODECS["trained"]
    assert Retold(Vocabularies(pieces, trained), trained.encode(b"a")).draft_ids[0] == pieces.special["<s>"]
    files = sentencepiece_files()
    other = ByteCodec(files | {"tokenizer.json": files["tokenizer.json"].replace("▁eggs", "▁ogres")})
    told = Retold(Vocabularies(pieces, other), [other.special["<s>"], *other.encode(b"a")]).draft_ids
    assert told.count(pieces.special["<s>"]) == 1
