"""Prompts for a target that exists: its own chat template around what a user might ask.

A record of the corpus gives its question or instruction, the first words of a dialogue, or a passage with a request before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specq.protocol import ConfigError
from specq.text import TextCodec, load_tokenizer_files
from specq.training.corpus import dialogue_turns
from specq.training.records import PROMPTS, QUESTIONS, read_records, shard_paths

LONGEST_PROMPT = 256
PASSAGE_SIZES = (150, 700)  # characters
REQUESTS = (
    *(
        "Continue this text:",
        "Summarize this text:",
        "Explain the following:",
        "Rewrite the following in simpler words:",
    ),
    *("What is the main idea of the following passage?", "Write a short story or essay that starts like this:"),
)


@dataclass(frozen=True)
class Chat:
    """How a target is spoken to, and what ends its answers."""

    codec: TextCodec
    stops: tuple[int, ...]

    def prompt(self, words: str) -> list[int]:
        """Return the ids of a conversation that begins with these words of the user."""
        return self.codec.encode_chat([{"role": "user", "content": words}])


def chat_of(target: Path, stops: tuple[int, ...]) -> Chat:
    """Return how a checkpoint is spoken to; ConfigError if it has no chat template or nothing that ends an answer."""
    codec = TextCodec(load_tokenizer_files(target))
    if not codec.has_chat_template or not stops:
        raise ConfigError(f"{target} has no chat template or no end token; a draft is trained on chats")
    return Chat(codec, stops)


def corpus_prompts(corpus: Path, chat: Chat, limit: int | None, rng: np.random.Generator) -> list[list[int]]:
    """Return the prompts that a corpus gives, in random order, without doubles and those that are too long."""
    asked = dict.fromkeys(words for path in shard_paths(corpus) for words in _words(path, limit, rng))
    prompts = [ids for ids in map(chat.prompt, asked) if len(ids) <= LONGEST_PROMPT]
    if not prompts:
        raise ConfigError(f"{corpus} has no record that makes a prompt of at most {LONGEST_PROMPT} tokens")
    return [prompts[i] for i in rng.permutation(len(prompts))]


def _words(path: Path, limit: int | None, rng: np.random.Generator) -> Iterator[str]:
    """Yield what a user may ask by each record of a shard, at most `limit`."""
    for record in read_records(path, QUESTIONS, limit):
        asked = record.get("prompt")
        yield _of_text(record["text"], rng) if asked is None else asked.strip()


def _of_text(text: str, rng: np.random.Generator) -> str:
    asked = [words for role, words in dialogue_turns(text) if role == "user"]
    return asked[0] if asked else f"{rng.choice(REQUESTS)}\n\n{text[: rng.integers(*PASSAGE_SIZES)]}"


def bench_prompts(path: Path, chat: Chat, count: int) -> list[list[int]]:
    """Return the first prompts of a benchmark."""
    return [chat.prompt(record["prompt"]) for record in read_records(path, PROMPTS, count)]
