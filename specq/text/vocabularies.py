"""Two vocabularies: their common tokens, and a text of one in tokens of the other.

- SharedTokens: the tokens of equal bytes (token-level intersection: Timor et al. 2025, "Accelerating LLM Inference with
  Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies").
- Retold: one growing text.

Special tokens are shared if their spelling is equal, or if both begin or both end a text. Others are encoded as the
text of their spelling. An example is a chat template's token that the draft model never saw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from specq.protocol import Int32Array
from specq.text.byte_codec import ByteCodec

CHUNK = 32  # tokens after which a text is cut at the start of a word
LONG_CHUNK = 256  # tokens after which it is cut between any two characters
_BLANKS = b" \t\r\n"


@dataclass(frozen=True, slots=True, eq=False)
class SharedTokens:
    """Tokens that both vocabularies have.

    - draft_ids, target_ids: i32[n], each token's id on either side, ascending by the target's.
    - num_target: the number of the target's tokens.
    """

    draft_ids: Int32Array
    target_ids: Int32Array
    num_target: int

    @classmethod
    def of(cls, draft: ByteCodec, target: ByteCodec) -> Self:
        """Compare two vocabularies. Each id of either appears at most once."""
        pairs: dict[int, int] = {}
        for token_id, token in enumerate(target.tokens):
            if token is not None and target.id_of(token) == token_id:
                own = draft.id_of(token)
                if own is not None:
                    pairs[token_id] = own
        pairs |= _shared_special(draft, target)
        target_ids = np.array(sorted(pairs), np.int32)
        return cls(np.array([pairs[i] for i in target_ids.tolist()], np.int32), target_ids, target.num_tokens)

    def within(self, draft_size: int, target_size: int) -> Self:
        """Return the shared tokens whose ids are below these sizes."""
        kept = (self.draft_ids < draft_size) & (self.target_ids < target_size)
        return type(self)(self.draft_ids[kept], self.target_ids[kept], self.num_target)

    def __len__(self) -> int:
        return len(self.target_ids)

    def __str__(self) -> str:
        return f"{len(self) / max(self.num_target, 1):.0%} of the target's {self.num_target} tokens"


def _shared_special(draft: ByteCodec, target: ByteCodec) -> dict[int, int]:
    """Return the draft's ids of the target's special tokens that both have."""
    pairs = {target.special[text]: draft.special[text] for text in target.special.keys() & draft.special.keys()}
    for role, token_id in target.ends.items():
        own = draft.ends.get(role)
        if token_id not in pairs and own is not None and own not in pairs.values():
            pairs[token_id] = own
    return pairs


class Vocabularies:
    """The vocabularies of a draft model and a target, and what they share."""

    def __init__(self, draft: ByteCodec, target: ByteCodec) -> None:
        self.draft, self.target = draft, target
        self.shared = SharedTokens.of(draft, target)
        self.special = _shared_special(draft, target)  # target's id -> draft's
        self._spelled = {i: text.encode() for text, i in target.special.items() if i not in self.special}

    def target_special(self, draft_id: int) -> int | None:
        """Return the target's id of a special token of the draft, or None."""
        return next((target for target, own in self.special.items() if own == draft_id), None)

    def retell(self, target_ids: list[int]) -> list[int]:
        """Return the draft's ids of some tokens of the target, tokenized again."""
        token_ids: list[int] = []
        data = bytearray()
        for token_id in target_ids:
            if token_id in self.special:
                token_ids += [*self.draft.encode(bytes(data)), self.special[token_id]]
                data.clear()
            else:
                data += self.bytes_of(token_id)
        return token_ids + self.draft.encode(bytes(data))

    def bytes_of(self, target_id: int) -> bytes:
        """Return the bytes of a token of the target, b"" for a special one that both have."""
        return self._spelled.get(target_id) or self.target.decode((target_id,))


class Retold:
    """A target's text in tokens of the draft. It grows at the end, and only its last part is ever tokenized again.

    - target_ids: the text in tokens of the target.
    - draft_ids: the text in tokens of the draft. While the target follows a draft, these are the drafted tokens. The
      draft's tokenizer might split that text in another way.

    The ends of parts depend only on the target's earlier tokens. So equal texts that were not drafted have equal
    tokens.
    """

    def __init__(self, vocabularies: Vocabularies, target_ids: list[int]) -> None:
        self._vocabularies = vocabularies
        self.target_ids: list[int] = []
        first = vocabularies.draft.before
        is_begun = bool(first and target_ids and vocabularies.special.get(target_ids[0]) == first[0])
        self.draft_ids = [] if is_begun else list(first)
        self._start = 0  # of the last part, in the target's text; and in the draft's
        self._draft_start = len(self.draft_ids)
        self._num_read = 0  # tokens of the target's text that were searched for ends of parts
        self.append(target_ids)

    def follow(self, target_ids: list[int], draft_ids: list[int]) -> None:
        """Append tokens that were drafted; the draft's tokens stay as they were drafted."""
        self.target_ids += target_ids
        self.draft_ids += draft_ids

    def append(self, target_ids: list[int]) -> int:
        """Append tokens; return how many of the draft's tokens are unchanged at the beginning."""
        before = self.draft_ids
        self.target_ids += target_ids
        told = before[: self._draft_start]
        for end in self._ends():
            told += self._vocabularies.retell(self.target_ids[self._start : end])
            self._start, self._draft_start = end, len(told)
        told += self._vocabularies.retell(self.target_ids[self._start :])
        self.draft_ids = told or [0]  # a draft model needs a token to draft after
        return _num_common(before, self.draft_ids)

    def _ends(self) -> list[int]:
        """Return the ends of parts in the tokens that were not searched yet."""
        ends, start, text = list[int](), self._start, self.target_ids
        for i in range(max(self._num_read, 1), len(text)):
            if i - start >= CHUNK and self._is_end(text[i - 1], text[i], is_long=i - start >= LONG_CHUNK):
                ends.append(i)
                start = i
        self._num_read = max(self._num_read, len(text))
        return ends

    def _is_end(self, last: int, following: int, *, is_long: bool) -> bool:
        """Return whether a word begins between two tokens. In a long part, whether a character does."""
        before, after = (self._vocabularies.bytes_of(token) for token in (last, following))
        if not before or not after:
            return True  # a special token
        if after[0] & 0xC0 == 0x80:
            return False
        return is_long or (after[0] in _BLANKS and before[-1] not in _BLANKS)


def _num_common(first: list[int], second: list[int]) -> int:
    most = min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    return next(i for i in range(most) if first[i] != second[i])
