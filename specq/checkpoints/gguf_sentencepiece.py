"""SentencePiece's BPE ("llama" in llama.cpp): the tokenizer of Llama 1 and 2, Mistral and TinyLlama.

SentencePiece joins the two neighbours whose token has the highest score, the leftmost first, until no neighbours make a
token. A character that has no token becomes its bytes (<0x0A>).

tokenizer.json has a list of merges instead of scores. It has all pairs that make a token, in the order of its score.
Scores of a trained vocabulary differ, and then both ways give the same tokens: a token always comes from the same pair,
since the order of the merges inside it does not depend on the text around it. So the order of a token's other pairs is
free. It is that of transformers, so that the checkpoint's own tokenizer.json has the same hash.

Two differences from llama.cpp are intended:

- Of tokens with equal scores, the one with the lower id comes first. Files whose converter did not know the scores have
  one score for all. The ids of most vocabularies are in the order of the merges.
- A merge never makes a control token, as in SentencePiece.

As in transformers, a token is not made if one of its characters has no token of its own.
"""

from __future__ import annotations

import math

from specq.checkpoints.gguf_file import GgufFile
from specq.checkpoints.gguf_vocabulary import TokenizerForm, TokenKind, Vocabulary, values
from specq.protocol import ConfigError

_SPACE = "\u2581"  # how a vocabulary spells a space
_MADE = (TokenKind.NORMAL, TokenKind.USER_DEFINED)  # by merges


def sentencepiece(file: GgufFile, vocabulary: Vocabulary) -> TokenizerForm:
    """Return the form of a file's tokenizer. Raises ConfigError for a vocabulary that is damaged or not supported."""
    _check_bytes(file, vocabulary)
    begins_with_space = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    to_letter = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if begins_with_space else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if begins_with_space else []
    return TokenizerForm(
        model={
            "unk_token": next((vocabulary.tokens[i] for i in vocabulary.ids_of(TokenKind.UNKNOWN)), None),
            "fuse_unk": True,
            "byte_fallback": True,
            "merges": _merges(vocabulary, _scores(file)),
        },
        decoders=[to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        normalizer={"type": "Sequence", "normalizers": [*prepend, to_letter]},
        special=frozenset({TokenKind.CONTROL, TokenKind.UNKNOWN}),
        begins=True,
        ids={"bos": 1, "eos": 2, "unknown": 0},
    )


def _check_bytes(file: GgufFile, vocabulary: Vocabulary) -> None:
    found = {vocabulary.tokens[i] for i in vocabulary.ids_of(TokenKind.BYTE)}
    needed = {f"<0x{byte:02X}>" for byte in range(256)}
    if found != needed:
        wrong = sorted(found - needed) or sorted(needed - found)
        raise ConfigError(
            f"{file.path}: its {len(found)} tokens of kind byte must be <0x00> to <0xFF>, each once; "
            f"{'unexpected' if found - needed else 'missing'}: {', '.join(wrong[:3])}"
        )


def _scores(file: GgufFile) -> list[float]:
    """Return the score of each id."""
    scores, num_tokens = values(file, "scores", float), len(values(file, "tokens", str))
    if len(scores) != num_tokens or any(map(math.isnan, scores)):
        raise ConfigError(
            f"{file.path} is damaged: it has {num_tokens} tokens and {len(scores)} scores (tokenizer.ggml.scores), "
            f"which must be numbers; fetch it again"
        )
    return scores


def _merges(vocabulary: Vocabulary, scores: list[float]) -> list[list[str]]:
    """Return the pairs of tokens that make a token, the best first."""
    ids = {vocabulary.tokens[i]: i for i in vocabulary.ids_of(*_MADE)}
    lengths = {len(text) for text in ids}
    merges: list[list[str]] = []
    for text in sorted(ids, key=lambda text: (-scores[ids[text]], ids[text])):
        places = (n for n in range(1, len(text)) if n in lengths and len(text) - n in lengths)
        pairs = [(text[:n], text[n:]) for n in places]
        there = ([ids[first], ids[second]] for first, second in pairs if first in ids and second in ids)
        merges += ([vocabulary.tokens[i] for i in pair] for pair in sorted(there))
    return merges
