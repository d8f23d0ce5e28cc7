"""Log-probabilities as bytes."""

from __future__ import annotations

import numpy as np

from specq.journal import pack, unpack
from specq.protocol import LogprobRecord


def test_log_probabilities_survive_as_bytes() -> None:
    """Packed in pieces and joined, they are the same; with none wanted there are no bytes."""
    record = LogprobRecord(2)
    rng = np.random.default_rng(0)
    record.tokens = rng.normal(size=5).astype(np.float32).tolist()
    record.top_ids = rng.integers(0, 2**31 - 1, 10).tolist()
    record.top = rng.normal(size=10).astype(np.float32).tolist()
    whole = pack(record, 0)
    found = unpack(whole[: 3 * 20] + pack(record, 3), 2)
    assert (found.tokens, found.top_ids, found.top) == (record.tokens, record.top_ids, record.top)
    bare = LogprobRecord(0)
    bare.tokens = record.tokens
    assert unpack(pack(bare, 1), 0).tokens == record.tokens[1:]
    assert (pack(LogprobRecord(-1), 0), unpack(b"", -1).tokens) == (b"", [])
