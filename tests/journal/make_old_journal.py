"""Makes tests/journal/f8b254c.journal and f8b254c.json: a journal with unfinished jobs, and the texts that they must
end with.

It runs the code of whatever checkout it is started in, so for the files that are here, that of commit f8b254c:

    git worktree add /tmp/old f8b254c && cd /tmp/old && make setup
    .venv/bin/python PATH_TO/make_old_journal.py OUTPUT_DIRECTORY

The texts are those of plain decoding by a broker without a journal and a verifier that drafts nothing (`--backup none`,
mode `plain`), with no drafter. The journal is that of a second broker, which is killed (kill -9), and its verifier with
it, while the jobs are under way: some have tokens, and those behind `MAX_SESSIONS` have none. The verifier waits 8 ms a
step (tests/end_to_end/slow_target.py), so that they are caught in the middle.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

sys.path.insert(0, str(Path.cwd()))

from specq.addresses import free_address
from specq.messages import Failed, Submit, Tokens
from specq.params import SamplingParams, Speculation
from specq.wire import decode, encode

from specq.client.sync import Client

NAME = "f8b254c"
PATIENCE_S = 120.0
MAX_SESSIONS = 8
PROMPTS = ("def add(a, b):", "Once upon a time", "2 + 2 =", "The capital of")
LONG = {"max_tokens": 160, "ignore_eos": True}
JOBS: dict[int, dict[str, Any]] = {
    101: {**LONG},
    102: {**LONG, "temperature": 0.8, "seed": 7},
    103: {**LONG, "temperature": 1.0, "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    104: {**LONG, "temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    105: {**LONG, "frequency_penalty": 0.5, "logit_bias": [[20, 2.5], [30, -5.0]], "bad_token_ids": [[12], [40, 41]]},
    106: {**LONG, "temperature": 0.9, "seed": 5, "logprobs": 2},
    107: {**LONG, "temperature": 0.8, "seed": 9, "strategy": "probabilistic"},
    108: {"max_tokens": 120, "min_tokens": 100, "stop_token_ids": [14, 15, 16], "temperature": 0.6, "seed": 2},
    109: {"max_tokens": 100, "stop": ["e the", "ing"], "temperature": 0.9, "seed": 4, "ignore_eos": True},
    110: {"max_tokens": 40, "temperature": 1.2, "seed": 2**63 - 1, "ignore_eos": True},
}
PLAIN = Speculation(mode="plain")


def submits(prompt_ids: list[Any], *, plain: bool) -> list[Submit]:
    """Return the jobs; the one under `probabilistic` is never drafted for, since drafts change what it says."""
    return [
        Submit(
            job_id=job_id,
            params=SamplingParams.from_dict(params),
            speculation=PLAIN if plain or params.get("strategy") == "probabilistic" else Speculation(),
            label=f"job {job_id}",
            prompt_ids=prompt_ids[job_id % len(prompt_ids)],
        )
        for job_id, params in JOBS.items()
    ]


@contextmanager
def servers(address: str, journal: str, engine: str, *options: str) -> Iterator[None]:
    """Run a broker and a verifier; both are killed at the end."""
    specq = [sys.executable, "-m", "specq"]
    slow = [sys.executable, "-m", "tests.end_to_end.slow_target"]
    target = [*(slow if engine == "slow" else specq), "worker", "--role", "target", "--engine", engine]
    commands = [
        [*specq, "broker", "--bind", address, "--journal", journal],
        [*target, "--model", "tiny", "--device", "cpu", "--dtype", "float32", "--broker", address, *options],
    ]
    running = [subprocess.Popen(command) for command in commands]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def texts(dealer: zmq.Socket[bytes], jobs: Mapping[int, list[int]]) -> dict[int, str]:
    """Read until all jobs have ended, filling in their tokens; return why each ended."""
    finish: dict[int, str] = {}
    while len(finish) < len(jobs):
        assert dealer.poll(PATIENCE_S * 1000), "the broker says nothing"
        message = decode(dealer.recv_multipart())
        assert not isinstance(message, Failed), message
        if isinstance(message, Tokens):
            del jobs[message.job_id][message.base_len :]
            jobs[message.job_id].extend(message.token_ids.tolist())
            if message.finish:
                finish[message.job_id] = message.finish
    return finish


def num_tokens(journal: Path) -> dict[int, int]:
    """Return how many tokens the journal has of each job that has any."""
    with sqlite3.connect(f"file:{journal}?mode=ro", uri=True) as connection:
        query = "SELECT job_id, sum(length(token_ids)) / 4 FROM commits GROUP BY job_id"
        return dict(connection.execute(query).fetchall())


def main(directory: Path) -> None:
    """Make both files."""
    context = zmq.Context()
    expected: dict[int, list[int]] = {job_id: [] for job_id in JOBS}
    address = free_address()
    with servers(address, "none", "torch", "--backup", "none"), Client(address) as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
        codec = client.served.codec
        prompt_ids = [codec.encode(prompt) for prompt in PROMPTS]
        dealer = context.socket(zmq.DEALER)
        dealer.connect(address)
        for submit in submits(prompt_ids, plain=True):
            dealer.send_multipart(encode(submit))
        finish = texts(dealer, expected)
        dealer.close(0)
    journal, address = directory / "working.journal", free_address()
    with servers(address, str(journal), "slow", "--max-sessions", str(MAX_SESSIONS)), Client(address) as client:
        client.wait_until_ready(timeout_s=PATIENCE_S)
        dealer = context.socket(zmq.DEALER)
        dealer.connect(address)
        for submit in submits(prompt_ids, plain=False):
            dealer.send_multipart(encode(submit))
        deadline = time.monotonic() + PATIENCE_S
        while len(found := num_tokens(journal)) < MAX_SESSIONS or min(found.values()) < 40:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
    dealer.close(0)
    with sqlite3.connect(journal) as connection, sqlite3.connect(directory / f"{NAME}.journal") as copy:
        connection.backup(copy)
    had = num_tokens(journal)
    told = {
        str(job_id): {"finish": finish[job_id], "had": had.get(job_id, 0), "token_ids": tokens}
        for job_id, tokens in expected.items()
    }
    (directory / f"{NAME}.json").write_text(json.dumps(told) + "\n")
    for job_id, entry in told.items():
        sys.stdout.write(f"job {job_id}: {entry['had']} of {len(entry['token_ids'])} tokens, {entry['finish']}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
