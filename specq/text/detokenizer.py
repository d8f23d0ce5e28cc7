"""Token ids in, text out, piece by piece.

- Detokenizer: the whole text.
- StopMatcher: the text up to the first stop string. Client and verifier both use it, so they agree.

Rules: the joined pieces are the tokenizer's decoding of prompt and answer, without that of the prompt. Text that may
still change is not shown, nor any part of a stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from specq.protocol import Int32Array
from specq.text.codec import TextCodec
from specq.text.stop_strings import StopSearch
from specq.text.token_texts import TextPiece, Token, TokenTexts, common_start

PromptIds = Sequence[int] | Int32Array
_CONTEXT = 4  # tokens of a prompt that are read again: the most bytes of a character, and so the most tokens


class _Text(Protocol):
    """A text that grows by tokens that are not special.

    - unsure: text at its end that later tokens may still change.
    - owed: text that follows if a token does.
    """

    unsure: str
    owed: str

    def push(self, token: Token) -> str:
        """Add one token; return the text that is certain now."""
        ...

    def push_special(self, token: Token) -> str:
        """Add a special token as its spelling; return the text that is certain now."""
        ...

    def rest(self) -> str:
        """Return the text that would follow the certain text if it ended here."""
        ...

    def possible(self) -> tuple[str, ...]:
        """Return all texts that may follow the certain text, from the tokens so far."""
        ...


class _ByteLevel:
    """A text that is the bytes of its tokens. Bytes that are not UTF-8 become U+FFFD as usual (Unicode, 3.9)."""

    unsure = owed = ""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: Token) -> str:
        return self._utf8.decode(token.data)

    push_special = push

    def rest(self) -> str:
        return self._utf8.getstate()[0].decode("utf-8", "replace")

    def possible(self) -> tuple[str, ...]:
        return (self.rest(),)


class _Pieces:
    """A text that is the pieces of its tokens. Tokens for single bytes form runs, as in the decoder `ByteFallback`.

    A run is UTF-8, or each of its bytes is U+FFFD. It is certain where it ends, or when it can no longer be UTF-8.
    """

    def __init__(self, texts: TokenTexts, *, is_first: bool) -> None:
        self._texts = texts
        self._head: list[str] | None = [] if is_first else None  # all tokens so far, while they have no text
        self._run: list[str] = []
        self._is_broken = False
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self.unsure, self.owed, self._last = "", "", ""

    def push(self, token: Token) -> str:
        if token.is_byte:
            return self._push_byte(token)
        ended = self._end_run()
        return ended + self._add([token.spelling], token.piece)

    def push_special(self, token: Token) -> str:
        ended = self._end_run()
        return ended + self._add([token.spelling])

    def _push_byte(self, token: Token) -> str:
        self._run.append(token.spelling)
        if self._is_broken:
            return "\ufffd"
        try:
            character = self._utf8.decode(token.data)
        except UnicodeDecodeError:
            self._is_broken, self.unsure = True, ""
            return self._add(self._run)
        if character:
            self._add_unsure(len(character.encode()))
        return ""

    def _add_unsure(self, num_bytes: int) -> None:
        """Add the character that the last `num_bytes` tokens of the run make."""
        character = self._run[-num_bytes:]
        piece = self._texts.piece(character)
        if self._head is not None and piece != self._texts.piece(character, is_first=True):
            _, piece = self._after(self._run)
            self.unsure = ""
        self.unsure += piece.sure + piece.last

    def _end_run(self) -> str:
        run, is_broken = self._run, self._is_broken
        self._run, self._is_broken, self.unsure = [], False, ""
        self._utf8.reset()
        return self._add(run) if run and not is_broken else ""

    def _add(self, spellings: list[str], piece: TextPiece | None = None) -> str:
        """Add tokens that belong together, with their piece if it is known. Return the text that is certain now."""
        owed, piece = self._after(spellings, piece)
        if self._head is not None:
            self._head = None if piece.sure or piece.last else [*self._head, *spellings]
        self.owed, self._last = piece.followed, piece.last
        return owed + piece.sure

    def _after(self, spellings: list[str], piece: TextPiece | None = None) -> tuple[str, TextPiece]:
        """Return the text that is owed before some tokens, and their piece."""
        if self._head is not None:
            return "", self._texts.piece([*self._head, *spellings], is_first=True)
        return self.owed, piece or self._texts.piece(spellings)

    def rest(self) -> str:
        if not self._run or self._is_broken:
            return self._last
        owed, piece = self._after(self._run)
        return owed + piece.sure + piece.last

    def possible(self) -> tuple[str, ...]:
        if not self._run or self._is_broken:
            return (self.rest(),)
        return self.owed + self.unsure, self.owed + "\ufffd" * len(self._run)


class Detokenizer:
    """Token ids in, text out. The joined pieces are the text of all ids after `before`.

    A character that begins in the prompt and ends in the answer belongs to the answer. Special tokens are left out,
    unless `with_special` is set.
    """

    def __init__(self, codec: TextCodec, before: PromptIds = (), *, with_special: bool = False) -> None:
        self._texts, self._num_certain = codec.tokens, 0
        self._with_special = with_special
        start = self._start(before)
        self._text: _Text = _ByteLevel() if self._texts.is_byte_level else _Pieces(self._texts, is_first=start == 0)
        self._known: tuple[str, ...] = ()  # candidates for the prompt's part of the text to come
        for place in range(start, len(before)):
            self.push(int(before[place]))
        self._known, self._num_certain = self._text.possible(), 0

    def _start(self, before: PromptIds) -> int:
        """Return the place in a prompt from which its tokens determine how its text ends. A run of bytes is not cut."""
        num_read = 0
        for place in range(len(before) - 1, -1, -1):
            token = self._texts[int(before[place])]
            if token.data and not token.is_special:
                num_read += 1
                if num_read >= _CONTEXT and not token.is_byte:
                    return place
        return 0

    @property
    def unsure(self) -> str:
        """The text after the certain text, which later tokens may still change."""
        return self._own(self._text.unsure)

    @property
    def offset(self) -> int:
        """How many characters come before the text of the next token."""
        return self._num_certain + len(self.unsure) + len(self._text.owed)

    def push(self, token_id: int) -> str:
        """Add one token. Return the text that is certain now: often the token's own, sometimes empty."""
        token = self._texts[token_id]
        if not token.spelling or (token.is_special and not self._with_special):
            return ""
        return self._added(self._text.push_special(token) if token.is_special else self._text.push(token))

    def push_all(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the joined results of `push`. Byte-level tokens are decoded at once."""
        if not self._texts.is_byte_level:
            return "".join(map(self.push, token_ids))
        tokens = map(self._texts.__getitem__, token_ids)
        data = b"".join([token.data for token in tokens if self._with_special or not token.is_special])
        return self._added(self._text.push(Token(data=data)))

    def _added(self, piece: str) -> str:
        """Return the newly certain text without the prompt's part."""
        if piece and self._known:
            piece, self._known = self._own(piece), ()
        self._num_certain += len(piece)
        return piece

    def rest(self) -> str:
        """Return the text that follows the certain text if no token does."""
        return self._own(self._text.rest())

    def flush(self) -> str:
        """Return the held text, when no token will follow."""
        rest, self._text = self.rest(), _ByteLevel()
        self._num_certain += len(rest)
        return rest

    def _own(self, text: str) -> str:
        """Return a text without the prompt's part."""
        return text[max((len(common_start(text, known)) for known in self._known), default=0) :]


class StopMatcher:
    """Text that ends before the first stop string, for any division into tokens.

    The first stop string is the string that is complete first. If several end together, it is the longest. Later tokens
    are ignored. A stop string that is complete within the first `min_tokens` tokens is plain text, also later. One that
    only begins there counts (as in vLLM). Special tokens are not part of the text, unless `with_special` is set. But
    stop strings may name special tokens. These strings are searched in the text together with these tokens.

    - `found`: the stop string that ended the text, or "".
    - `keeps_stop`: whether the text includes it.
    - `shown`: special tokens that stand in the returned text. Other stop strings are searched without them.
    """

    def __init__(
        self,
        codec: TextCodec,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        before: PromptIds = (),
        *,
        with_special: bool = False,
        keeps_stop: bool = False,
        shown: frozenset[str] = frozenset(),
    ) -> None:
        self._detokenizer, self._texts = Detokenizer(codec, before, with_special=with_special), codec.tokens
        self._keeps_stop, self.found = keeps_stop, ""
        special = () if with_special else codec.tokens.special  # they are plain text then
        self._special = {text for text in special if any(text in string for string in stop)}
        naming = [string for string in stop if any(text in string for text in self._special)]
        self._naming = StopSearch(naming)
        self._searches = [search for search in (StopSearch(set(stop) - set(naming)), self._naming) if search]
        self._left = min_tokens  # tokens that cannot end the text
        self._hidden = ""  # text that is known but may be part of a stop string, or may change
        self._num_unsure = 0  # characters at its end that may change
        self._ready = ""  # text that may be shown and was not taken yet
        self._shown, self._num_shown = shown, 0  # characters that were shown, without special tokens
        self._marks: list[tuple[int, str]] = []  # special tokens to show, with the characters before them
        self.matched = False

    @property
    def offset(self) -> int:
        """How many characters of the text come before the text of the next token."""
        return self._detokenizer.offset

    def push(self, token_ids: Iterable[int]) -> int | None:
        """Add tokens; return the index in `token_ids` of the token that completes a stop string, or None."""
        for index, token_id in enumerate(token_ids):
            if not self.matched:
                self._left -= 1
                if self._take(int(token_id)):
                    return index
        return None

    def take(self) -> str:
        """Return the text that became safe to show since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def finish(self) -> str:
        """Return the remaining text, when no token will follow."""
        if not self.matched:
            self._hear(self._detokenizer.flush(), "")
            self._show(self._hidden)
            self._hidden = ""
            self._ready += "" if self.matched else "".join(mark for _, mark in self._marks)
        return self.take()

    def _take(self, token_id: int) -> bool:
        """Add a token; return whether it completes a stop string."""
        spelling = self._texts[token_id].spelling
        if spelling in self._special:
            self._hear_special(spelling)
        else:
            self._hear(self._detokenizer.push(token_id), self._detokenizer.unsure)
        if spelling in self._shown and not self.matched:
            self._marks.append((self._detokenizer.offset, spelling))
            self._show("")
        return self.matched

    def _show(self, text: str) -> None:
        """Add text to the ready text, with the special tokens that stand before, in or behind it."""
        while self._marks and self._marks[0][0] <= self._num_shown + len(text):
            place, mark = self._marks.pop(0)
            before, text = text[: place - self._num_shown], text[place - self._num_shown :]
            self._ready += before + mark
            self._num_shown = place
        self._ready += text
        self._num_shown += len(text)

    def _hear(self, piece: str, unsure: str) -> None:
        """Add text, whose end may still change. Show what can no longer be part of a stop string."""
        heard, before = piece + unsure, self._hidden[len(self._hidden) - self._num_unsure :]
        if not heard.startswith(before):
            self._hidden, before = self._hidden.removesuffix(before), ""
            for search in self._searches:
                search.restore()
        self._search(heard[len(before) :])
        if self.matched:
            return
        self._num_unsure = len(unsure)
        if not unsure:
            for search in self._searches:
                search.save()
        num_held = max([self._num_unsure, *(search.num_held for search in self._searches)])
        num_shown = len(self._hidden) - num_held
        shown, self._hidden = self._hidden[:num_shown], self._hidden[num_shown:]
        self._show(shown)

    def _search(self, text: str) -> None:
        """Append text up to a stop string. If there is one, the text before it is ready."""
        if not self._searches:
            self._hidden += text
            return
        for character in text:
            self._hidden += character
            ended = [search for search in self._searches if search.push(character)]
            if ended and self._left < 0:
                self._end(max(ended, key=lambda search: search.num_ended))
                return

    def _hear_special(self, spelling: str) -> None:
        """Search in a special token that a stop string names. For this search, the text before it ends there."""
        rest, unsure = self._detokenizer.rest(), self._detokenizer.unsure
        for character in rest.removeprefix(unsure):
            self._naming.push(character)
        is_ended = [self._naming.push(character, is_text=False) for character in spelling]
        if any(is_ended) and self._left < 0:
            self._hidden = self._hidden.removesuffix(unsure) + rest
            self._end(self._naming)

    def _end(self, search: StopSearch) -> None:
        """End the text before the stop string that a search has found, or with it."""
        self.found = search.ended
        end = len(self._hidden) if self._keeps_stop else len(self._hidden) - search.num_ended
        self._show(self._hidden[:end])
        self._hidden, self.matched = "", True
