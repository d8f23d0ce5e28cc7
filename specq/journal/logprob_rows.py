"""Log-probabilities as bytes: a row a token, so that the rows of two rounds are joined by appending.

A row: f32 log-probability of the token, i32[n] the likeliest tokens, f32[n] theirs; little-endian.
"""

from __future__ import annotations

import numpy as np

from specq.protocol import LogprobRecord


def pack(record: LogprobRecord, start: int) -> bytes:
    """Return the rows of the tokens from `start` on; nothing where nothing is recorded."""
    arrays = record.arrays(start)
    if not arrays:
        return b""
    shape = (len(arrays["logprobs"]), record.num_top)
    columns = (
        arrays["logprobs"].astype("<f4").view("<i4").reshape(-1, 1),
        arrays["top_ids"].astype("<i4").reshape(shape),
        arrays["top_logprobs"].astype("<f4").view("<i4").reshape(shape),
    )
    return np.hstack(columns).tobytes()


def unpack(rows: bytes, num_top: int) -> LogprobRecord:
    """Return the record that the rows were packed from."""
    record = LogprobRecord(num_top)
    if num_top >= 0:
        table = np.frombuffer(rows, "<i4").reshape(-1, 1 + 2 * num_top)
        record.tokens = table[:, :1].copy().view("<f4").ravel().tolist()
        record.top_ids = table[:, 1 : 1 + num_top].ravel().tolist()
        record.top = table[:, 1 + num_top :].copy().view("<f4").ravel().tolist()
    return record
