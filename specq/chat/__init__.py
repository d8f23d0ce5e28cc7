"""A chat in a terminal: questions in, answers that grow before one's eyes, and how they came about.

    pen            text in the colours or marks of its origin
    summary        a line on one answer: rounds, accepted drafts, tokens a second
    conversation   what was said, as messages that fit the model
    commands       `/temp 0.8` and the others: what they change, and their help
    chat           one answer: streamed, stopped by Ctrl-C, kept
    reading        messages from the keyboard, of one line or several

In: a client of `specq.client`. To add a command: a line in `commands.COMMANDS` and its function there.
"""

from specq.chat.chat import Chat
from specq.chat.commands import MOST_TOKENS, ChatSettings
from specq.chat.pen import Pen, pen_for
from specq.chat.reading import with_history
from specq.chat.summary import summary

__all__ = ["MOST_TOKENS", "Chat", "ChatSettings", "Pen", "pen_for", "summary", "with_history"]
