"""A journal with unfinished jobs that commit f8b254c wrote: its jobs end with the texts that they would have ended with
there.

tests/journal/make_old_journal.py made the journal and the texts; commit 2b162de has it.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from specq.protocol import Failed, Follow, JobTokens, Tokens, decode, encode

pytestmark = pytest.mark.slow

OLD = Path(__file__).parent / "f8b254c.journal.gz"
EXPECTED = {
    int(job_id): entry
    for job_id, entry in json.loads(Path(__file__).parent.joinpath("f8b254c.json").read_text()).items()
}
PATIENCE_S = 120.0


@pytest.mark.parametrize("prompt_lookup", ["suffix", "none"])
def test_jobs_of_an_old_journal_end_with_their_texts(
    spawn: Callable[..., subprocess.Popen[bytes]], free_address: str, tmp_path: Path, prompt_lookup: str
) -> None:
    """Half done or not begun, with every kind of parameter; drafted for or not."""
    journal = tmp_path / "old.journal"
    journal.write_bytes(gzip.decompress(OLD.read_bytes()))
    assert num_tokens(journal) == {job_id: entry["had"] for job_id, entry in EXPECTED.items() if entry["had"]}
    spawn("broker", "--bind", free_address, "--journal", str(journal))
    target = ("--model", "tiny", "--device", "cpu", "--dtype", "float32", "--prompt-lookup", prompt_lookup)
    spawn("worker", "--role", "target", "--broker", free_address, *target)

    found = follow(free_address)

    assert found == {job_id: (entry["finish"], entry["token_ids"]) for job_id, entry in EXPECTED.items()}


def num_tokens(journal: Path) -> dict[int, int]:
    """Return how many tokens the journal has of each job that has any."""
    with sqlite3.connect(f"{journal.absolute().as_uri()}?mode=ro", uri=True) as connection:
        query = "SELECT job_id, sum(length(token_ids)) / 4 FROM commits GROUP BY job_id"
        return dict(connection.execute(query).fetchall())


def follow(address: str) -> dict[int, tuple[str, list[int]]]:
    """Return of each job why it ended, and its tokens."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(address)
    found: dict[int, tuple[str, list[int]]] = {}
    tokens: dict[int, list[int]] = {job_id: [] for job_id in EXPECTED}
    try:
        for job_id in EXPECTED:
            dealer.send_multipart(encode(Follow(job_id=job_id)))
        while len(found) < len(EXPECTED):
            assert dealer.poll(PATIENCE_S * 1000), f"nothing is heard of {set(EXPECTED) - set(found)}"
            message = decode(dealer.recv_multipart())
            assert not isinstance(message, Failed), message
            for part in message.each() if isinstance(message, JobTokens) else [message]:
                if isinstance(part, Tokens):
                    del tokens[part.job_id][part.base_len :]
                    tokens[part.job_id] += part.token_ids.tolist()
                    if part.finish:
                        found[part.job_id] = part.finish, tokens[part.job_id]
    finally:
        context.destroy(0)
    return found
