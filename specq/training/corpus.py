"""The training corpus: from its files over the tokenizer to rows of tokens.

A shard is a gzipped JSONL file of {"prompt", "response", "source"} or {"text", "source"} records. To add one, put the
file into the corpus directory. Add a line to `SHARD_WEIGHTS` unless a weight of 1 in both phases is right.

The shared tokenizer is a byte-level BPE of 4,096 entries in which every digit is its own token. Both models of the pair
load the same files, so they can exchange token ids directly.

The tokenised corpus is one flat array of ids with document bounds, small enough to copy to a GPU machine. Documents are
packed into rows of equal length, so no position is wasted."""

import json
import re
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


VOCAB_SIZE = 4096
MAX_POSITIONS = 2048
SPECIAL_TOKENS = [END_OF_TEXT, START_OF_TURN, END_OF_TURN, PADDING]

# Words with the space before them, single digits, runs of punctuation, line breaks, other white space.
WORD_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(corpus: Path, limit: int | None) -> PreTrainedTokenizerFast:
    """Train the BPE on the corpus, at most `limit` records a shard."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in read_documents(corpus, limit)), trainer)
    return wrap_tokenizer(tokenizer)


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Give the BPE its special tokens and chat template."""
    wrapped: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=PADDING,
        additional_special_tokens=[END_OF_TEXT, START_OF_TURN],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    tokenizer_of_both: PreTrainedTokenizerFast = wrapped
    return tokenizer_of_both


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and a tokenizer_config.json that transformers 4 and 5 both read."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    for key in ("is_local", "local_files_only"):
        settings.pop(key, None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["additional_special_tokens"] = settings.pop("extra_special_tokens", [END_OF_TEXT, START_OF_TURN])
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Read the tokenizer that `save_tokenizer` wrote."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the ids that end an answer: <|im_end|> and <|endoftext|>."""
    return [token_id(tokenizer, name) for name in (END_OF_TURN, END_OF_TEXT)]


def token_id(tokenizer: PreTrainedTokenizerFast, name: str) -> int:
    """Return the id of one token."""
    found = tokenizer.convert_tokens_to_ids(name)
    assert isinstance(found, int), "one name, one id"
    return found


HELD_OUT_SHARE = 0.01
MAX_HELD_OUT = 60


@dataclass(frozen=True)
class Dataset:
    """Documents as token ids, and which of them are held out."""

    token_ids: np.ndarray  # [num_tokens] uint16
    bounds: np.ndarray  # [num_documents + 1] int64: document i is token_ids[bounds[i]:bounds[i + 1]]
    context_sizes: np.ndarray  # [num_documents] int32: ids before the answer, 0 without a prompt
    shard_ids: np.ndarray  # [num_documents] int16
    held_out: np.ndarray  # [num_documents] bool
    shards: tuple[str, ...]

    def document(self, index: int) -> np.ndarray:
        """Return the ids of one document, [num_ids] uint16."""
        return self.token_ids[self.bounds[index] : self.bounds[index + 1]]

    def context(self, index: int) -> list[int]:
        """Return the ids of a document up to the answer."""
        token_ids: list[int] = self.document(index)[: self.context_sizes[index]].tolist()
        return token_ids

    def members(self, shard: str, *, held_out: bool) -> np.ndarray:
        """Return the indices of a shard's training (or held-out) documents."""
        return np.flatnonzero((self.shard_ids == self.shards.index(shard)) & (self.held_out == held_out))

    def sample_epoch(self, phase: int, rng: np.random.Generator) -> np.ndarray:
        """Return training documents in random order, each shard weighted for `phase` (0 main, 1 closing)."""
        chosen = []
        for shard in self.shards:
            members = self.members(shard, held_out=False)
            copies = SHARD_WEIGHTS.get(shard, (1.0, 1.0))[phase]
            chosen += [members] * int(copies)
            chosen.append(members[rng.random(len(members)) < copies % 1])
        return rng.permutation(np.concatenate(chosen))

    def save(self, path: Path) -> None:
        """Write the dataset to one compressed file."""
        np.savez_compressed(path, **{name: getattr(self, name) for name in self.__dataclass_fields__})


def load_dataset(path: Path) -> Dataset:
    """Read a file of `Dataset.save`."""
    with np.load(path) as arrays:
        fields = {name: arrays[name] for name in Dataset.__dataclass_fields__}
    return Dataset(**{**fields, "shards": tuple(fields["shards"].tolist())})


def build_dataset(corpus: Path, tokenizer: PreTrainedTokenizerFast, limit: int | None) -> Dataset:
    """Tokenise the corpus, at most `limit` records a shard."""
    documents = list(read_documents(corpus, limit))
    encode = tokenizer.backend_tokenizer.encode_batch_fast
    sizes: list[int] = []
    contexts: list[int] = []
    chunks: list[np.ndarray] = []
    for start in range(0, len(documents), 1000):
        batch = documents[start : start + 1000]
        ids = [encoding.ids for encoding in encode([document.text for document in batch])]
        sizes += map(len, ids)
        contexts += [len(encoding.ids) for encoding in encode([document.context for document in batch])]
        chunks.append(np.concatenate([np.asarray(row, dtype=np.uint16) for row in ids]))
    shards = tuple(sorted({document.shard for document in documents}))
    return Dataset(
        token_ids=np.concatenate(chunks),
        bounds=np.concatenate([[0], np.cumsum(sizes)]),
        context_sizes=np.asarray(contexts, dtype=np.int32),
        shard_ids=np.asarray([shards.index(document.shard) for document in documents], dtype=np.int16),
        held_out=hold_out(documents, shards),
        shards=shards,
    )


def hold_out(documents: list[Document], shards: tuple[str, ...]) -> np.ndarray:
    """Mark about 1% of each shard, spread evenly and at most 60 documents, for validation. [num_documents] bool."""
    marked = np.zeros(len(documents), dtype=bool)
    names = np.asarray([document.shard for document in documents])
    for shard in shards:
        members = np.flatnonzero(names == shard)
        count = min(max(round(len(members) * HELD_OUT_SHARE), 1), MAX_HELD_OUT, len(members) - 1)
        marked[members[np.linspace(0, len(members) - 1, count, dtype=int)]] = True
    return marked


SMALLEST_GAP = 8  # a row with less room counts as full


def cut_pieces(documents: Sequence[np.ndarray], row_length: int) -> list[np.ndarray]:
    """Cut documents that are longer than a row into pieces that fit."""
    return [
        document[start : start + row_length]
        for document in documents
        for start in range(0, max(len(document) - 1, 1), row_length)
    ]


def assign_rows(sizes: Sequence[int], row_length: int) -> list[list[int]]:
    """Place each piece in the fullest row that still has room (best fit); return the pieces of each row."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, row), sorted
    for piece, size in enumerate(sizes):
        place = bisect_left(room, (size, -1))
        if place == len(room):
            rows.append([])
            free, row = row_length, len(rows) - 1
        else:
            free, row = room.pop(place)
        rows[row].append(piece)
        if free - size >= SMALLEST_GAP:
            insort(room, (free - size, row))
    return rows


def pack_rows(documents: Sequence[np.ndarray], row_length: int, pad_id: int) -> np.ndarray:
    """Pack documents into rows that each begin with one. Returns [num_rows, row_length] int64."""
    pieces = cut_pieces(documents, row_length)
    assigned = assign_rows([len(piece) for piece in pieces], row_length)
    rows = np.full((len(assigned), row_length), pad_id, dtype=np.int64)
    for row, members in zip(rows, assigned, strict=True):
        joined = np.concatenate([pieces[piece] for piece in members])
        row[: len(joined)] = joined
    return rows


def row_batches(
    dataset: Dataset, *, phase: int, row_length: int, batch_rows: int, pad_id: int, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield batches of packed rows without end, packed again each epoch. Each is [batch_rows, row_length] int64."""
    left = np.empty((0, row_length), dtype=np.int64)
    while True:
        documents = [dataset.document(index) for index in dataset.sample_epoch(phase, rng)]
        rows = rng.permutation(np.concatenate([left, pack_rows(documents, row_length, pad_id)]))
        if len(rows) < batch_rows:
            rows = np.resize(rows, (batch_rows, row_length))
        full = len(rows) - len(rows) % batch_rows
        yield from np.split(rows[:full], full // batch_rows)
        left = rows[full:]
