"""A tokenizer's files as messages, and back: cut into pieces so that a small message never waits behind a large one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import orjson

from specq.protocol import ModelInfo, ProtocolError, TokenizerChunk

CHUNK_BYTES = 1 << 20


def tokenizer_chunks(model: ModelInfo, files: dict[str, str]) -> Iterator[TokenizerChunk]:
    """Yield the pieces of the files (name -> text) of a model's tokenizer, in order."""
    data, model = orjson.dumps(files), model.of_before()  # no reader needs more, and an older one refuses it
    count = -(-len(data) // CHUNK_BYTES)
    for index in range(count):
        piece = data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        yield TokenizerChunk(model=model, index=index, count=count, data=np.frombuffer(piece, np.uint8))


def join_chunks(chunks: Sequence[TokenizerChunk]) -> dict[str, str]:
    """Return the files of a complete set of pieces in any order; raises ProtocolError if they do not make a whole."""
    ordered = sorted(chunks, key=lambda chunk: chunk.index)
    if [chunk.index for chunk in ordered] != list(range(ordered[0].count if ordered else 1)):
        raise ProtocolError("pieces of the tokenizer are missing")
    try:
        files = orjson.loads(b"".join(chunk.data.tobytes() for chunk in ordered))
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the tokenizer is not valid JSON: {error}") from None
    if not isinstance(files, dict) or not all(isinstance(text, str) for text in files.values()):
        raise ProtocolError("the tokenizer is not a JSON object of texts")
    return files
