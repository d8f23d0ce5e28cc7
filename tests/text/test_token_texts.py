"""Single tokens, streams, whole texts, offsets and stop strings against the tokenizer's own decoding."""

from __future__ import annotations

from itertools import takewhile
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from specq.client.events import NewTokens
from specq.client.parameters import TextOptions
from specq.client.result import PieceMaker, Result, completion_text
from specq.protocol import SamplingParams
from specq.testing.tokenizer import sentencepiece_files, tokenizer_files
from specq.text import ByteCodec, StopMatcher, TextCodec
from specq.text.detokenizer import Detokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁▁", "▁a", "▁the", "a", "s", "é", "中", "▁é", "▁▁x", ",", "▁,"]
CHARACTERS = ["中", "🦄", "é", " ", "A", "▁", "\ufffd"]
SPACES = decoders.Replace("▁", " ")


def pieces_with(decoder: Any) -> Tokenizer:
    """Return a tokenizer of SentencePiece's kind with a decoder; special and added tokens."""
    vocabulary = {text: i for i, text in enumerate(["<unk>", "<s>", "</s>", *WORDS, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("x y"), AddedToken(" q"), AddedToken("é▁")])
    return tokenizer


def byte_level() -> Tokenizer:
    """Return one with added tokens: with letters that its decoder takes for bytes, with others, and with both."""
    tokenizer = Tokenizer.from_str(tokenizer_files()["tokenizer.json"])
    tokenizer.add_tokens([AddedToken("é"), AddedToken("x y"), AddedToken("Ġzz")])
    return tokenizer


def word_pieces() -> Tokenizer:
    words = ["[UNK]", "a", "##b", "do", "not", ",", "n't", "[CLS]", "##"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.add_special_tokens(["[CLS]"])
    return tokenizer


def word_ends() -> Tokenizer:
    vocabulary = {word: i for i, word in enumerate(["a", "b</w>", "c", "lo</w>", "</w>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    return tokenizer


FALLBACK = decoders.ByteFallback()
FUSED = (SPACES, FALLBACK, decoders.Fuse())
TOKENIZERS = {
    "byte-level": byte_level(),
    "llama 2": pieces_with(decoders.Sequence([*FUSED, decoders.Strip(" ", 1, 0)])),
    "gemma": pieces_with(decoders.Sequence([*FUSED])),
    "two spaces off": pieces_with(decoders.Sequence([*FUSED, decoders.Strip(" ", 2, 0)])),
    **{
        f"metaspace {scheme}": pieces_with(
            decoders.Sequence([FALLBACK, decoders.Metaspace(prepend_scheme=scheme)])  # type: ignore[arg-type]
        )
        for scheme in ("first", "always", "never")
    },
    "metaspace without bytes": pieces_with(decoders.Metaspace()),
    "unigram": Tokenizer.from_str(sentencepiece_files()["tokenizer.json"]),
    "no decoder": pieces_with(None),
    "WordPiece": word_pieces(),
    "word ends": word_ends(),
}
CODECS = {name: TextCodec({"tokenizer.json": tokenizer.to_str()}) for name, tokenizer in TOKENIZERS.items()}


class Sequences:
    """Random tokens of a tokenizer: all kinds, bytes that are characters or parts of them, ids that there are not."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random, self._size = Random(seed), tokenizer.get_vocab_size()
        found = [tokenizer.token_to_id(text) for text in BYTES]
        self._bytes = [token for token in found if token is not None]

    def __call__(self, *lengths: int) -> list[int]:
        length, ids = self._random.choice(lengths), list[int]()
        while len(ids) < length:
            ids += self._some()
        return ids

    def _some(self) -> list[int]:
        kind = self._random.random()
        if self._bytes and kind < 0.25:
            character = self._random.choice(CHARACTERS).encode()
            return [self._bytes[byte] for byte in character][: self._random.choice([4, 4, 4, 1, 2])]
        if kind < 0.3:
            return [self._size + 5]
        few = min(self._size, 20) if self._bytes and kind < 0.8 else self._size
        return [self._random.randrange(few)]


def continuation(tokenizer: Tokenizer, prompt: list[int], answer: list[int]) -> str:
    """Return what the tokenizer's own decoding of prompt and answer has beyond that of the prompt.

    The prompt's text ends in several ways: without an unfinished character, or with U+FFFD for each byte.
    """
    whole = tokenizer.decode(prompt + answer)
    before = [tokenizer.decode(prompt[:length]) for length in range(len(prompt) + 1)]
    broken = tokenizer.token_to_id("<0xFF>")
    if broken is not None and tokenizer.decode([broken]) == "\ufffd":
        before.append(tokenizer.decode([*prompt, broken])[:-1])
    return str(whole[max(num_common(whole, text) for text in before) :])


def num_common(first: str, second: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def test_special_tokens_may_be_part_of_a_text():
    """As in the tokenizer's own decoding with them, in one call and token by token."""
    for name, tokenizer in TOKENIZERS.items():
        special = [token for token in range(tokenizer.get_vocab_size()) if CODECS[name].tokens[token].is_special]
        make, random = Sequences(tokenizer, seed=2), Random(2)
        for _ in range(40 if special else 0):
            answer = make(1, 5, 9)
            answer.insert(random.randrange(len(answer) + 1), random.choice(special))
            wanted = tokenizer.decode(answer, skip_special_tokens=False)
            whole, single = (Detokenizer(CODECS[name], with_special=True) for _ in range(2))
            assert (name, answer, whole.push_all(answer) + whole.flush()) == (name, answer, wanted)
            pieces = [single.push(token) for token in answer]
            assert (name, answer, "".join(pieces) + single.flush()) == (name, answer, wanted)


def test_pieces_offsets_and_texts_are_those_of_the_tokenizer_s_own_decoding():
    """Of random tokens after random prompts: at once, as a stream, and taken up again, with the same offsets."""
    for name, tokenizer in TOKENIZERS.items():
        make = Sequences(tokenizer, seed=1)
        for _ in range(40):
            prompt, answer = make(0, 1, 2, 4, 9), make(0, 3, 6, 12)
            expected = continuation(tokenizer, prompt, answer)
            text, offsets, _ = completion_text(CODECS[name], answer, SamplingParams(logprobs=0), prompt)
            at_once = completion_text(CODECS[name], answer, SamplingParams(), prompt)
            assert (name, prompt, answer, at_once) == (name, prompt, answer, (expected, [], ""))
            streamed = [list[dict[str, Any]](), ""]
            for known in {0, len(answer) // 2}:
                maker = PieceMaker(CODECS[name], SamplingParams(), num_known=known, before=prompt)
                pieces = [maker.piece(NewTokens(1, (token,), ("own",), ({"id": token},))) for token in answer]
                pieces.append(maker.last(Result(1, None)))
                streamed = [[one for piece in pieces for one in piece.logprobs], "".join(p.text for p in pieces)]
                assert [one["offset"] for one in streamed[0]] == offsets[known:]
                assert expected.endswith(streamed[1])
            assert (name, prompt, answer, text) == (name, prompt, answer, expected)
            maker = PieceMaker(CODECS[name], SamplingParams(), before=prompt)
            whole = maker.last(Result(1, None), NewTokens(1, tuple(answer), ("own",) * len(answer)))
            assert ("".join(whole.texts) or whole.text, whole.text) == (expected, expected)
            for count, offset in enumerate(offsets):
                so_far = continuation(tokenizer, prompt, answer[:count])
                if name != "word ends" and "\ufffd" not in so_far:  # there, a space is owed
                    assert (name, prompt, answer, count, offset) == (name, prompt, answer, count, len(so_far))


def test_a_token_adds_its_own_text_and_bytes_within_a_text():
    """For each token of each vocabulary, behind a word; and both codecs agree."""
    for name, tokenizer in TOKENIZERS.items():
        codec = CODECS[name]
        byte_codec = None if name in ("WordPiece", "word ends", "no decoder") else ByteCodec(_files(tokenizer))
        word = tokenizer.token_to_id("a")
        for token_id in range(tokenizer.get_vocab_size()):
            token = codec.tokens[token_id]
            assert token.spelling == tokenizer.id_to_token(token_id)
            if token.is_special:
                assert (token.text, token.data) == (token.spelling, token.spelling.encode())
                continue
            followed = tokenizer.decode([word, token_id, word])
            assert token.data.decode("utf-8", "replace") == token.text
            assert followed.startswith("a" + token.text)
            if byte_codec is not None and token.spelling != "<unk>":
                assert byte_codec.tokens[token_id] == token.data
        assert codec.tokens[tokenizer.get_vocab_size() + 9].text == ""


def _files(tokenizer: Tokenizer) -> dict[str, str]:
    return {"tokenizer.json": tokenizer.to_str()}


def test_bytes_of_a_character_put_it_together_again():
    """Of byte-level and of SentencePiece's tokens; each alone is U+FFFD."""
    for name in ("byte-level", "llama 2", "unigram"):
        codec, data = CODECS[name], "🦄".encode()
        ids = codec.encode_part("🦄") if name == "byte-level" else [codec.token_id(BYTES[byte]) for byte in data]
        tokens = [codec.tokens[token_id] for token_id in ids if token_id is not None]
        parts = [token for token in tokens if token.text == "\ufffd"]
        assert b"".join(token.data for token in tokens).endswith(data)
        assert len(parts) > 1


def test_a_space_before_the_first_token_of_an_answer_stays():
    """As in vLLM; only where no text is before it, the tokenizer strips it."""
    for name in ("llama 2", "unigram"):
        codec = CODECS[name]
        the, start = codec.token_id("▁the"), codec.token_id("<s>")
        assert the is not None
        assert start is not None
        assert completion_text(codec, [the, the], SamplingParams(), [start, the])[0] == " the the"
        assert completion_text(codec, [the, the], SamplingParams(), [start])[0] == "the the"


# --- stop strings -----------------------------------------------------------------------------------------------------


def expected_end(tokenizer: Tokenizer, prompt: list[int], answer: list[int], stop: str, named: set[int]) -> Any:
    """Return the index of the first token after which the text has the stop string, and the text before that.

    named  special tokens that stand in the text that is searched
    """
    for count in range(1, len(answer) + 1):
        plain = searched = continuation(tokenizer, prompt, answer[:count])
        places = [i for i in range(count) if answer[i] in named]
        inserted = ""
        for place in places:
            start = len(continuation(tokenizer, prompt, answer[:place])) + len(inserted)
            spelled = tokenizer.id_to_token(answer[place])
            searched, inserted = searched[:start] + spelled + searched[start:], inserted + spelled
        if (start := searched.find(stop)) >= 0:
            before = sum(len(tokenizer.id_to_token(answer[place])) for place in places)
            return count - 1, plain[: start if start <= len(plain) else start - before]
    return None, continuation(tokenizer, prompt, answer)


def test_a_stop_string_ends_a_text_for_any_tokenization():
    """Parts of words, words, characters of bytes, at the beginning, across special tokens."""
    for name in ("byte-level", "llama 2", "gemma", "metaspace first", "unigram", "WordPiece"):
        tokenizer, num_found = TOKENIZERS[name], 0
        make, random = Sequences(tokenizer, seed=2), Random(3)
        for _ in range(300):
            prompt, answer = make(1, 3), make(3, 6, 12)
            text = continuation(tokenizer, prompt, answer)
            start = random.randrange(len(text) + 1)
            stop = text[start : start + random.randint(1, 4)]
            if "\ufffd" in stop or not stop:
                continue
            index, before = expected_end(tokenizer, prompt, answer, stop, set())
            matcher, shown = StopMatcher(CODECS[name], (stop,), 0, prompt), ""
            found = None
            for place, token in enumerate(answer):
                found = place if found is None and matcher.push([token]) is not None else found
                shown += matcher.take()
                assert before.startswith(shown)
            num_found += 1
            assert (name, prompt, answer, stop, found) == (name, prompt, answer, stop, index)
            assert shown + matcher.finish() == before
        assert num_found > 50


def test_a_stop_string_that_names_a_special_token_ends_the_text_there():
    """Alone, and with text before and behind it; a special token that none names stays out of the text."""
    tokenizer, codec = TOKENIZERS["byte-level"], CODECS["byte-level"]
    end, start = codec.token_id("<|im_end|>"), codec.token_id("<|im_start|>")
    a, b, first = (codec.encode_part(text)[0] for text in ("a", "b", "🦄"))
    assert end is not None
    assert start is not None
    cases = [
        (("<|im_end|>",), [a, b, end, a], 2, "ab"),
        (("<|im_end|>",), [first, end], 1, "\ufffd"),
        (("b<|im_end|>",), [a, start, b, start, end, a], 4, "a"),
        (("a<|im_end|>b",), [b, a, end, b], 3, "b"),
        (("<|im_end|>b",), [a, end, a, b], None, "aab"),
        (("<|im_end|>a", "ab"), [a, end, b], 2, ""),  # what is shown has "ab"
        (("im_end",), [a, end, a], None, "aa"),  # which names no token
    ]
    for stop, answer, index, text in cases:
        matcher = StopMatcher(codec, stop)
        assert (stop, matcher.push(answer), matcher.finish()) == (stop, index, text)
    assert expected_end(tokenizer, [a], [b, a, end, b], "a<|im_end|>b", {end}) == (3, "b")
    spelled = codec.encode_part("x<")[:1] + [codec.encode_part(letter)[0] for letter in "<|im_end|>"]
    assert StopMatcher(codec, ("<|im_end|>",)).push(spelled) == len(spelled) - 1  # of letters
    late = StopMatcher(codec, ("<|im_end|>",), min_tokens=2)
    assert (late.push([a, end, b, end, a]), late.finish()) == (3, "ab")


def test_a_stop_string_in_a_run_of_bytes_that_is_broken_later():
    """It ends the text when it is there; one that the broken run takes back is not remembered."""
    codec = CODECS["llama 2"]
    wide, high = ([codec.token_id(BYTES[byte]) for byte in data] for data in ("中A".encode(), b"\xff"))
    word = codec.token_id("s")
    early, late = StopMatcher(codec, ("中",), 0, [word]), StopMatcher(codec, ("As",), 0, [word])
    assert (early.push([*wide, *high]), early.finish()) == (2, "")
    assert (late.push([*wide, *high, word]), late.finish()) == (None, "\ufffd" * 5 + "s")
    broken = StopMatcher(codec, ("A\ufffd",), 0, [word])
    assert (broken.push([wide[-1], *high, word]), broken.finish()) == (None, "\ufffd\ufffds")
    assert Detokenizer(codec, [word]).push(wide[0]) == ""


def test_special_tokens_that_are_shown():
    """They stand where they are, also behind text that was held back. Stop strings are searched without them."""
    codec = CODECS["byte-level"]
    end, start = codec.token_id("<|im_end|>"), codec.token_id("<|im_start|>")
    a, b = (codec.encode_part(text)[0] for text in "ab")
    cases = [
        ((), [end, a, start, end, b, end], None, "<|im_end|>a<|im_end|>b<|im_end|>"),
        (("bb",), [a, end, b, end, b, end, a], 4, "a<|im_end|>"),
        (("ba",), [a, b, end, b], None, "ab<|im_end|>b"),
        (("ab",), [b, a, end], None, "ba<|im_end|>"),
        (("b<|im_end|>",), [a, end, b, end], 3, "a<|im_end|>"),
    ]
    for stop, answer, index, text in cases:
        matcher, taken = StopMatcher(codec, stop, shown=frozenset({"<|im_end|>"})), ""
        found = None
        for place, token in enumerate(answer):
            found = place if found is None and matcher.push([token]) is not None else found
            taken += matcher.take()
            assert text.startswith(taken)
        assert (stop, found, taken + matcher.finish()) == (stop, index, text)


def test_pieces_tell_the_text_that_is_known():
    codec = CODECS["byte-level"]
    end = codec.token_id("<|im_end|>")
    ids = (*codec.encode_part("ab"), end, *codec.encode_part("cd"))
    options = TextOptions(shown=frozenset({"<|im_end|>"}))
    for known in range(len(ids) + 1):
        maker = PieceMaker(codec, SamplingParams(), num_known=known, options=options)
        piece = maker.piece(NewTokens(1, ids, ("plain",) * len(ids)))
        assert piece.known + piece.text == completion_text(codec, list(ids), SamplingParams(), (), options)[0]
        assert piece.known == completion_text(codec, list(ids[:known]), SamplingParams(), (), options)[0]
