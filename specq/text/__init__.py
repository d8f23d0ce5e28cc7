"""Text to token ids and back, without torch or transformers.

- token_texts: what each token is: its spelling, bytes and text. A tokenizer's files as messages.
- codec: the tokenizer of one model.
- byte_codec: the same between bytes and ids, for pieces of a text.
- vocabularies: two vocabularies: their common tokens, and a text of one in tokens of the other.
- detokenizer: tokens to text piece by piece, up to a stop string.
- stop_strings: where stop strings begin and end in a growing text.
- messages: normalise conversations from clients for chat templates, and render them to prompts.
- template_limits: the sandbox of templates, with limits of time and size.

Input: text, conversations, token ids. Output: token ids, text.
"""

from specq.text.byte_codec import ByteCodec, whole_characters
from specq.text.codec import TOKENIZER_FILES, TextCodec, load_tokenizer_files, num_tokens, token_id, tokenizer_hash
from specq.text.detokenizer import Detokenizer, PromptIds, StopMatcher
from specq.text.messages import MissingContentError, UnsupportedPartError, read_content
from specq.text.token_texts import join_chunks, tokenizer_chunks
from specq.text.vocabularies import Retold, SharedTokens, Vocabularies

__all__ = [
    "TOKENIZER_FILES",
    "ByteCodec",
    "Detokenizer",
    "MissingContentError",
    "PromptIds",
    "Retold",
    "SharedTokens",
    "StopMatcher",
    "TextCodec",
    "UnsupportedPartError",
    "Vocabularies",
    "join_chunks",
    "load_tokenizer_files",
    "num_tokens",
    "read_content",
    "token_id",
    "tokenizer_chunks",
    "tokenizer_hash",
    "whole_characters",
]
