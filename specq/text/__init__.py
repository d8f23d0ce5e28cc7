"""Text to token ids and back, without torch or transformers.

    codec              the tokenizer of one model
    detokenizer        tokens to text piece by piece, up to a stop string
    stop_strings       where stop strings begin and end in a text that grows
    chat_template      conversations to prompts, by the model's own template
    tokenizer_chunks   a tokenizer's files as messages

In: text, conversations, token ids. Out: token ids, text.
"""

from specq.text.codec import TextCodec, load_tokenizer_files, num_tokens, tokenizer_hash
from specq.text.detokenizer import StopMatcher
from specq.text.tokenizer_chunks import join_chunks, tokenizer_chunks

__all__ = [
    "StopMatcher",
    "TextCodec",
    "join_chunks",
    "load_tokenizer_files",
    "num_tokens",
    "tokenizer_chunks",
    "tokenizer_hash",
]
