"""Files of JSON lines: the shards of a corpus, and benchmarks. A line that is no record is named by file and line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from specq.protocol import ConfigError

Form = tuple[str, ...]  # the keys of a record, each of a string

DOCUMENTS: tuple[Form, ...] = (("prompt", "response"), ("text",))
QUESTIONS: tuple[Form, ...] = (("prompt",), ("text",))
PROMPTS: tuple[Form, ...] = (("prompt",),)


def shard_paths(corpus: Path) -> list[Path]:
    """Return the corpus shards in name order; ConfigError if there is none."""
    return _files(corpus, "*.jsonl.gz", "shard")


def bench_paths(bench: Path) -> list[Path]:
    """Return the benchmarks in name order; ConfigError if there is none."""
    return _files(bench, "*.jsonl", "benchmark")


def _files(folder: Path, pattern: str, what: str) -> list[Path]:
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ConfigError(f"no {pattern} {what} in {folder}")
    return paths


def read_records(path: Path, forms: Sequence[Form], limit: int | None = None) -> Iterator[dict[str, str]]:
    """Yield the records of a file, gzipped if its name ends so, at most `limit`; ConfigError for a line of none of the forms."""
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and number > limit:
                    return
                yield _record(line, forms)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        place = f"{path}:{number}" if isinstance(error, _NoRecordError) else f"{path}, after line {number}"
        raise ConfigError(f"{place}: {error}") from error


class _NoRecordError(ValueError):
    """A line that is no record."""


def _record(line: str, forms: Sequence[Form]) -> dict[str, str]:
    wanted = " or ".join(json.dumps(dict.fromkeys(form, "...")) for form in forms)
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _NoRecordError(f"this is not valid JSON ({error}); a line must be {wanted}") from error
    if not isinstance(record, dict) or not any(all(isinstance(record.get(key), str) for key in form) for form in forms):
        raise _NoRecordError(f"a line must be {wanted}, with strings")
    return record
