"""The tokenised corpus: one flat array of ids with document bounds, small enough to copy to a GPU machine."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from specq.training.corpus import SHARD_WEIGHTS, Document, read_documents

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
