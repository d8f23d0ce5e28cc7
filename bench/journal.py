"""Jobs and tokens a second that journals take, a file beside a PostgreSQL database, in turns.

    python -m bench.journal --database postgresql://postgres@/postgres?host=/run/postgresql [--out FILE]

A turn is a number of sessions from `JobTaken` to `JobEnded`, with a row of tokens for each session in each group, as a
broker's writer makes them. As there, the next group may be sent while one is written, IN_A_ROW times. Each journal is
new and warm: earlier turns are not counted. Both wait for the disk at each group (`full`). A database of its own is
created for a journal, and dropped.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import click
import numpy as np

from bench.suites.broker_rate import new_database
from specq.journal import IN_A_ROW, JobBound, JobEnded, JobTaken, Journal, Opening, Record, TokensAdded, open_journal
from specq.protocol import SamplingParams, Submit
from specq.runtime import columns
from specq.runtime.machine import describe

SHAPES = ((8, 1), (64, 1), (256, 1), (256, 4))  # sessions, and tokens of each in a group
GROUPS = 50
WARM = 3  # turns before the first that counts


def groups(first: int, sessions: int, tokens: int) -> Iterator[list[Record]]:
    """Yield the groups of a turn. Ids begin with `first`."""
    ids = range(first, first + sessions)
    prompt = np.arange(64, dtype=np.int32)
    params = SamplingParams(max_tokens=tokens * GROUPS)
    yield [JobTaken(Submit(job_id=i, params=params, prompt_ids=prompt), "bench", 1.0, 0.0) for i in ids]
    yield [JobBound(i, "weights", 1) for i in ids]
    raw, origins = np.arange(tokens, dtype="<i4").tobytes(), bytes(tokens)
    for number in range(GROUPS):
        yield [TokensAdded(i, number * tokens, raw, origins, b"", 4) for i in ids]
    stats = {"rounds": GROUPS, "draft_tokens": 4 * GROUPS}
    yield [JobEnded(i, "length", "", "", stats, 2.0, raw * GROUPS, origins * GROUPS, b"") for i in ids]


def turn(journal: Journal, number: int, sessions: int, tokens: int) -> float:
    """Return the seconds of a turn."""
    written = list(groups(1 + number * sessions, sessions, tokens))
    started = time.perf_counter()
    for start in range(0, len(written), IN_A_ROW):
        deque(journal.write_all(written[start : start + IN_A_ROW]), maxlen=0)
    return time.perf_counter() - started


def measure(database: str, sessions: int, tokens: int, turns: int) -> dict[str, list[float]]:
    """Return the seconds of each turn, by kind. The kinds take turns, and the first one alternates."""
    with ExitStack() as stack:
        file = str(Path(stack.enter_context(TemporaryDirectory())) / "journal")
        places = {"SQLite": file, "PostgreSQL": stack.enter_context(new_database(database))}
        journals = {kind: open_journal(place, Opening()) for kind, place in places.items()}
        for journal in journals.values():
            stack.callback(journal.close)
        found: dict[str, list[float]] = {kind: [] for kind in journals}
        for number in range(WARM + turns):
            for kind in list(journals)[:: 1 if number % 2 else -1]:
                seconds = turn(journals[kind], number, sessions, tokens)
                if number >= WARM:
                    found[kind].append(round(seconds, 5))
    return found


@click.command()
@click.option("--database", required=True, help="Address of a PostgreSQL server; databases are created in it.")
@click.option("--turns", type=click.IntRange(1), default=9, show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path))
def main(database: str, turns: int, out: Path | None) -> None:
    """Measure, and print the medians."""
    rows: list[tuple[object, ...]] = [("SESSIONS", "TOKENS", "JOURNAL", "TOKENS/S", "JOBS/S", "RATIO")]
    found = {}
    for sessions, tokens in SHAPES:
        seconds = found[f"{sessions} x {tokens}"] = measure(database, sessions, tokens, turns)
        ratio = median(a / b for a, b in zip(seconds["SQLite"], seconds["PostgreSQL"], strict=True))
        for kind, taken in seconds.items():
            rate = sessions / median(taken)
            said = f"{ratio:.2f}" if kind == "PostgreSQL" else ""
            rows.append((sessions, tokens, kind, f"{rate * tokens * GROUPS:.0f}", f"{rate:.0f}", said))
    click.echo(columns(rows))
    if out is not None:
        out.write_text(json.dumps(describe() | {"load": os.getloadavg(), "seconds": found}), "utf-8")


if __name__ == "__main__":
    main()
