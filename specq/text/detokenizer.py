"""Token ids in, text out, piece by piece.

    Detokenizer   all of the text
    StopMatcher   the text up to the first stop string; client and verifier both use it, so they agree

Rules: whatever the token boundaries, the joined pieces are the text of all ids; half a character is never shown, nor any
part of a stop string.
"""

from __future__ import annotations

from collections.abc import Iterable

from specq.text.codec import TextCodec
from specq.text.stop_strings import StopStrings

_UNFINISHED = "\ufffd"  # what half a character decodes to
_MAX_PENDING = 16  # tokens held back for an unfinished character; more are garbage, not a character
_CHARACTER_BYTES = 4  # most bytes, and so most tokens, of a UTF-8 character


class Detokenizer:
    """Token ids in, text out: the joined pieces are the text of all ids, special tokens left out.

    A window of tokens is decoded that starts at a whole character: those of the last piece (for decoders that look
    back, as for the space before a word) and those since. What ends in U+FFFD may be half a character and waits.
    (With byte fallback a run of byte tokens that is no UTF-8 turns U+FFFD as a whole; what was shown is not taken back.)
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._num_read = 0  # tokens of the window whose text is out
        self._num_shown = 0  # characters of the window's text that are out

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is certain now, often the token's own, sometimes none."""
        if token_id in self._codec.special_ids:
            return ""
        self._window.append(token_id)
        text = self._codec.decode(self._window)
        if not text.endswith(_UNFINISHED):
            return self._advance(text)
        if len(self._window) - self._num_read > _MAX_PENDING:
            return self._give_up(text)
        return self._show(text.rstrip(_UNFINISHED))

    def flush(self) -> str:
        """Return what was held back, when no token will follow."""
        return self._show(self._codec.decode(self._window))

    def _show(self, text: str) -> str:
        piece = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return piece

    def _advance(self, text: str) -> str:
        """Show all; the tokens just read become the head of the window."""
        piece = self._show(text)
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        self._num_shown = len(self._codec.decode(self._window))
        return piece

    def _give_up(self, text: str) -> str:
        """Show all but the last character; UTF-8 finds itself again, so that a few bytes of context are enough."""
        piece = self._show(text[:-1])
        self._window = self._window[-_CHARACTER_BYTES:]
        self._num_read = 0
        self._num_shown = len(self._codec.decode(self._window)) - 1
        return piece


class StopMatcher:
    """Text that ends before the first stop string, wherever the token boundaries lie.

    The first is the one that is complete first; of several that end together the longest. Once found, tokens that
    follow are ignored. A stop string that is complete within the first `min_tokens` tokens is text like any other, also
    later; one that only begins there counts (as in vLLM).
    """

    def __init__(self, codec: TextCodec, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._detokenizer = Detokenizer(codec)
        self._strings = StopStrings(stop)
        self._left = min_tokens  # tokens that cannot end the text
        self._hidden = ""  # text that is known but may be part of a stop string
        self._ready = ""  # text that may be shown and was not taken yet
        self.matched = False

    def push(self, token_ids: Iterable[int]) -> int | None:
        """Take tokens; return the index (in `token_ids`) of the one that completes a stop string, or None."""
        for index, token_id in enumerate(token_ids):
            if not self.matched:
                self._left -= 1
                if self._search(self._detokenizer.push(int(token_id))):
                    return index
        return None

    def take(self) -> str:
        """Return the text that became safe to show since the last call."""
        ready, self._ready = self._ready, ""
        return ready

    def finish(self) -> str:
        """Return the text that is left, when no token will follow."""
        if not self.matched and not self._search(self._detokenizer.flush()):
            self._ready += self._hidden
        self._hidden = ""
        return self.take()

    def _search(self, piece: str) -> bool:
        """Add text; True if it completes a stop string. What can no longer become one is ready to be shown."""
        hidden, num_shown = self._hidden, 0
        text = hidden + piece
        for num_read, character in enumerate(piece, len(hidden) + 1):
            hidden = self._strings.begun(hidden, character)
            num_shown = num_read - len(hidden)
            ended = self._strings.ended(hidden) if self._left < 0 else 0
            if ended:
                self._ready, self._hidden, self.matched = self._ready + text[: num_read - ended], "", True
                return True
        self._ready, self._hidden = self._ready + text[:num_shown], hidden
        return False
