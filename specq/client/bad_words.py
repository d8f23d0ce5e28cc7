"""Words that shall not appear, as the token sequences that a verifier never completes.

The ban is one of tokens, not of text. Each word is banned as the tokenizer spells it alone and as it spells it after a
space; that is what vLLM does (`SamplingParams.update_from_tokenizer`), but that vLLM drops the second spelling where its
number of tokens differs. The same letters may still come about in another way: cut into other tokens, across the end of
a token that also holds what stands before or after, or in capitals. And the tokens are banned wherever they stand, within
a longer word too.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.protocol import JobError
from specq.text import TextCodec

TokenIds = tuple[int, ...]


def bad_word_ids(words: Iterable[str], codec: TextCodec) -> tuple[TokenIds, ...]:
    """Return the token sequences of the words, each once; raises JobError for a word that has no tokens."""
    return tuple(dict.fromkeys(spelling for word in words for spelling in _spellings(word.lstrip(" "), codec)))


def _spellings(word: str, codec: TextCodec) -> list[TokenIds]:
    """Return a word's tokens, and those of the word after a space unless they end with the first ones."""
    alone, spaced = tuple(codec.encode_part(word)), tuple(codec.encode_part(" " + word))
    if not alone:
        raise JobError(f"bad_words has {word!r}, for which the tokenizer has no tokens")
    return [alone] if spaced[-len(alone) :] == alone else [alone, spaced]
