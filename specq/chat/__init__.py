"""A chat in a terminal: questions in, answers that grow before one's eyes, and how they came about.

    chat      what was said, commands such as `/temp 0.8`, and one answer: streamed, stopped by Ctrl-C, kept
    pen       text in the colours or marks of its origin; a line on an answer: rounds, accepted drafts, tokens a second
    reading   messages from the keyboard, of one line or several

In: a client of `specq.client`. To add a command: a line in `chat.COMMANDS` and its function there.
"""

from specq.chat.chat import MOST_TOKENS, Chat, ChatSettings
from specq.chat.pen import Pen, pen_for, summary
from specq.chat.reading import with_history

__all__ = ["MOST_TOKENS", "Chat", "ChatSettings", "Pen", "pen_for", "summary", "with_history"]
