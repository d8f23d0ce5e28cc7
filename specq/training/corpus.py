"""The training corpus: its records, how often each shard is read, and how a record becomes one string.

A shard is a gzipped JSONL file of {"prompt", "response", "source"} or {"text", "source"} records. To add one, put the
file into the corpus directory. Add a line to `SHARD_WEIGHTS` unless a weight of 1 in both phases is right.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specq.training.records import DOCUMENTS, read_records, shard_paths

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
PADDING = "<|pad|>"

# shard -> (copies an epoch in the main phase, copies an epoch in the closing phase)
SHARD_WEIGHTS: dict[str, tuple[float, float]] = {
    "math_gsm8k_train": (1.2, 1.6),
    "math_misc": (1.0, 1.3),
    "math_synthetic": (0.7, 1.0),
    "code_mbpp_train": (1.5, 2.0),
    "code_gpteacher": (1.3, 1.6),
    "code_stdlib_files": (0.7, 0.3),
    "code_stdlib_functions": (1.0, 1.2),
    "code_stdlib_tests": (0.6, 0.2),
    "instruct_ultrafeedback": (1.0, 1.3),
    "instruct_gpteacher_roleplay": (1.2, 1.6),
    "instruct_misc": (1.2, 1.5),
    "instruct_medquad": (0.7, 0.5),
    "chat_oasst": (1.0, 1.3),
    "chat_misc": (1.0, 1.0),
    "prose_books": (1.0, 0.4),
    "prose_peps": (0.8, 0.3),
}

_SPEAKER = re.compile(r"(?m)^(System|User|Assistant): ")


@dataclass(frozen=True)
class Document:
    """One record as the model reads it: `text` = `context` (up to the assistant's first word) + the rest."""

    shard: str
    context: str
    text: str


def read_documents(corpus: Path, limit: int | None = None) -> Iterator[Document]:
    """Yield every record of every shard as a Document, at most `limit` a shard."""
    for path in shard_paths(corpus):
        shard = path.name.removesuffix(".jsonl.gz")
        for record in read_records(path, DOCUMENTS, limit):
            yield to_document(shard, record)


def to_document(shard: str, record: dict[str, str]) -> Document:
    """Format a record: instructions and dialogues in ChatML, all other text raw; all end with <|endoftext|>."""
    if "prompt" in record and "response" in record:
        context = chat_context(record["prompt"])
        return Document(shard, context, f"{context}{record['response']}{END_OF_TURN}\n{END_OF_TEXT}")
    turns = dialogue_turns(record["text"])
    if not turns:
        return Document(shard, "", record["text"] + END_OF_TEXT)
    text = "".join(chat_turn(role, words) for role, words in turns)
    context, header, _ = text.partition(f"{START_OF_TURN}assistant\n")
    return Document(shard, context + header, text + END_OF_TEXT)


def dialogue_turns(text: str) -> list[tuple[str, str]]:
    """Split lines of "User: ..." and "Assistant: ..." into (role, words) pairs; else an empty list."""
    pieces = _SPEAKER.split(text)
    if pieces[0].strip() or "Assistant" not in pieces[1::2]:
        return []
    return [(role.lower(), words.strip()) for role, words in zip(pieces[1::2], pieces[2::2], strict=True)]


def chat_turn(role: str, words: str) -> str:
    """Return one ChatML turn."""
    return f"{START_OF_TURN}{role}\n{words}{END_OF_TURN}\n"


def chat_context(prompt: str) -> str:
    """Return the chat template's output for one user prompt, generation prompt included."""
    return f"{chat_turn('user', prompt)}{START_OF_TURN}assistant\n"
