"""Large tokenizers on disk."""

import json

import numpy as np
import orjson

from specq.client.tokenizer_files import TokenizerCache
from specq.protocol.messages import TokenizerChunk
from specq.testing.fake_broker import INFO
from specq.testing.tokenizer import tokenizer_files
from tests.each import each

FILES = {"tokenizer_config.json": "{}", **tokenizer_files()}


def first_piece(files: dict[str, str], count: int = 2) -> TokenizerChunk:
    data = np.frombuffer(orjson.dumps(files)[:100], np.uint8)
    return TokenizerChunk(model=INFO, index=0, count=count, data=data)


def test_keep_and_recall(tmp_path):
    """What was kept is found again, by another cache too; keeping twice is harmless."""
    TokenizerCache(tmp_path).keep(FILES)
    TokenizerCache(tmp_path).keep(FILES)
    assert TokenizerCache(tmp_path).recall(first_piece(FILES)) == FILES
    assert len(list((tmp_path / "tokenizers").iterdir())) == 1


def test_what_was_recalled_is_not_kept_again(tmp_path, monkeypatch):
    """Its hash, which takes a while, was compared when it was read."""
    cache = TokenizerCache(tmp_path)
    cache.keep(FILES)
    files = cache.recall(first_piece(FILES))
    hashed = []
    monkeypatch.setattr("specq.client.tokenizer_files.tokenizer_hash", hashed.append)
    cache.keep(files)
    assert hashed == []


def test_another_first_piece(tmp_path):
    """The same tokenizer with another chat template is not taken from the cache."""
    cache = TokenizerCache(tmp_path)
    cache.keep(FILES)
    assert cache.recall(first_piece({**FILES, "tokenizer_config.json": '{"chat_template": "new"}'})) is None


def test_small_tokenizers_are_not_looked_up(tmp_path):
    """A tokenizer in one piece is here already."""
    cache = TokenizerCache(tmp_path)
    cache.keep(FILES)
    assert cache.recall(first_piece(FILES, count=1)) is None


@each("damage", [b"", b"[]", b'{"tokenizer.json": 3}', b"\xff", "cut", "other"])
def test_damaged_files(tmp_path, damage):
    """A file that is not the requested tokenizer is not used."""
    cache = TokenizerCache(tmp_path)
    cache.keep(FILES)
    (path,) = (tmp_path / "tokenizers").iterdir()
    content = json.loads(FILES["tokenizer.json"])
    content["added_tokens"][0]["content"] = "<|other|>"
    other = orjson.dumps({**FILES, "tokenizer.json": json.dumps(content)})
    path.write_bytes({"cut": path.read_bytes()[:-9], "other": other}.get(damage, damage))
    assert cache.recall(first_piece(FILES)) is None


def test_unusable_folder(tmp_path):
    """A cache that cannot be written is not an error."""
    (tmp_path / "file").write_text("")
    cache = TokenizerCache(tmp_path / "file")
    cache.keep(FILES)
    assert cache.recall(first_piece(FILES)) is None
    TokenizerCache(None).keep(FILES)
