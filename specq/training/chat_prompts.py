"""Prompts for an existing target: its own chat template around what a user might ask.

A record of the corpus gives its question or instruction, the first words of a dialogue, or a passage with a request
before it.

Rule: evaluation uses no training data. The files that come with specq are both corpus and benchmarks. There every
fourth record (`is_held_out`) is for the evaluation, and the others are for training.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specq.protocol import ConfigError
from specq.text import TextCodec, load_tokenizer_files
from specq.training.corpus import dialogue_turns
from specq.training.records import PROMPTS, prompt_paths, read_questions, read_records
from specq.training.settings import RunSettings

LONGEST_PROMPT = 256
HELD_OUT_EVERY = 4
RENUMBERED = {"gsm8k": 9}  # file -> how many copies of its prompts are asked with other numbers in them
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
class PromptFormat:
    """The chat format of a target, and the tokens that end its answers."""

    codec: TextCodec
    stops: tuple[int, ...]

    def prompt(self, words: str) -> list[int]:
        """Return the token ids of a conversation that begins with these words of the user."""
        return self.codec.encode_chat([{"role": "user", "content": words}])


def chat_of(target: Path, stops: tuple[int, ...]) -> PromptFormat:
    """Return the chat format of a checkpoint; ConfigError if it has no chat template or no end token."""
    codec = TextCodec(load_tokenizer_files(target))
    if not codec.has_chat_template or not stops:
        raise ConfigError(f"{target} has no chat template or no end token; a draft is trained on chats")
    return PromptFormat(codec, stops)


def is_held_out(number: int) -> bool:
    """Return whether a record, counted from 0, is only for the evaluation."""
    return number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


def corpus_prompts(settings: RunSettings, chat: PromptFormat, rng: np.random.Generator) -> list[list[int]]:
    """Return the prompts of a corpus in random order, without duplicates and overlong ones."""
    paths = prompt_paths(settings.corpus)
    asked = dict.fromkeys(words for path in paths for words in _words(path, settings, rng))
    prompts = [ids for ids in map(chat.prompt, asked) if len(ids) <= LONGEST_PROMPT]
    if not prompts:
        raise ConfigError(f"{settings.corpus} has no record that makes a prompt of at most {LONGEST_PROMPT} tokens")
    return [prompts[i] for i in rng.permutation(len(prompts))]


def _words(path: Path, settings: RunSettings, rng: np.random.Generator) -> Iterator[str]:
    """Yield possible user prompts from the records of a file, at most `limit` records."""
    copies = RENUMBERED.get(path.stem, 0) if settings.is_split else 0
    for number, record in enumerate(read_questions(path, settings.limit)):
        if settings.is_split and is_held_out(number):
            continue
        asked = record.get("prompt")
        words = _of_text(record["text"], rng) if asked is None else asked.strip()
        yield words
        yield from (renumbered(words, rng) for _ in range(copies))


def renumbered(words: str, rng: np.random.Generator) -> str:
    """Return a question with other numbers of the same length."""
    return re.sub(r"\d", lambda _: str(rng.integers(1, 10)), words)


def _of_text(text: str, rng: np.random.Generator) -> str:
    asked = [words for role, words in dialogue_turns(text) if role == "user"]
    return asked[0] if asked else f"{rng.choice(REQUESTS)}\n\n{text[: rng.integers(*PASSAGE_SIZES)]}"


def bench_prompts(path: Path, chat: PromptFormat, settings: RunSettings) -> list[list[int]]:
    """Return the first prompts of a benchmark."""
    if not settings.is_split:
        records = list(read_records(path, PROMPTS, settings.bench_prompts))
    else:
        records = [record for number, record in enumerate(read_records(path, PROMPTS)) if is_held_out(number)]
    return [chat.prompt(record["prompt"]) for record in records[: settings.bench_prompts]]
