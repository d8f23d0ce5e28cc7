"""Bad words, as the token sequences that a verifier never completes.

Tokens are banned, not text. Each word is banned as the tokenizer spells it alone and as it spells it after a space.
vLLM does the same (`SamplingParams.update_from_tokenizer`), except that it drops the second spelling if its number of
tokens differs. The same letters may still appear in another way: cut into other tokens, across the end of a token that
also holds the text before or after, or in capitals. And the tokens are banned everywhere, also within a longer word.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.protocol import JobError, shown
from specq.text import TextCodec

TokenIds = tuple[int, ...]


def bad_word_ids(words: Iterable[str], codec: TextCodec) -> tuple[TokenIds, ...]:
    """Return the token sequences of the words, each once; raises JobError for a word that has no tokens."""
    return tuple(dict.fromkeys(spelling for word in words for spelling in _spellings(word.lstrip(" "), codec)))


def _spellings(word: str, codec: TextCodec) -> list[TokenIds]:
    """Return a word's tokens, and those of the word after a space unless they end with the first ones."""
    alone, spaced = tuple(codec.encode_part(word)), tuple(codec.encode_part(" " + word))
    if not alone:
        raise JobError(f"bad_words has {shown(word)}, for which the tokenizer has no tokens", field="bad_words")
    return [alone] if spaced[-len(alone) :] == alone else [alone, spaced]
