"""A chat in a terminal: it reads questions and streams answers with their origins.

    chat      the conversation, commands such as `/temp 0.8`, and answers: streamed, stopped by Ctrl-C, kept
    pen       text in the colours or marks of its origin; a line about an answer: rounds, accepted drafts, speed
    reading   messages from the keyboard, of one line or several

Input: a client of `specq.client`. To add a command, add a line in `chat.COMMANDS` and its function there.
"""

from specq.chat.chat import MOST_TOKENS, Chat, ChatSettings
from specq.chat.pen import Pen, pen_for, summary
from specq.chat.reading import with_history

__all__ = ["MOST_TOKENS", "Chat", "ChatSettings", "Pen", "pen_for", "summary", "with_history"]
