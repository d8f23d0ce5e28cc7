"""Files of JSON lines (the shards of a corpus, and benchmarks), and of plain lines, each a prompt.

Errors name the file and the line. This module does not import torch: `specq train` checks its inputs before it imports
torch.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from specq.protocol import ConfigError

Form = tuple[str, ...]  # the keys of a record, each with a string

DOCUMENTS: tuple[Form, ...] = (("prompt", "response"), ("text",))
QUESTIONS: tuple[Form, ...] = (("prompt",), ("text",))
PROMPTS: tuple[Form, ...] = (("prompt",),)
ROLLOUTS = "rollouts"  # the folder of a run's answers, within --work
PROMPT_FILES = (".jsonl.gz", ".jsonl", ".txt")


def shard_paths(corpus: Path) -> list[Path]:
    """Return the corpus shards in name order; ConfigError if there is none."""
    return _files(corpus, "*.jsonl.gz", "shard")


def bench_paths(bench: Path) -> list[Path]:
    """Return the benchmarks in name order; ConfigError if there is none."""
    return _files(bench, "*.jsonl", "benchmark")


def prompt_paths(corpus: Path) -> list[Path]:
    """Return the prompt files of a corpus, a directory or one file, in name order; ConfigError if there is none."""
    paths = [corpus] if corpus.is_file() else [file for file in sorted(corpus.glob("*")) if file.is_file()]
    if found := [path for path in paths if path.name.endswith(PROMPT_FILES)]:
        return found
    what = f"there are no such files in {corpus}" if corpus.exists() else f"there is no {corpus}"
    raise ConfigError(
        f"a corpus is a directory of {', '.join(f'*{end}' for end in PROMPT_FILES)} files, or one such file; {what}"
    )


def rollout_paths(folder: Path, given: Sequence[Path]) -> list[Path]:
    """Return the given files of rollouts, and those of a run's folder; ConfigError if one is missing or none exists."""
    for path in given:
        if not path.is_file():
            raise ConfigError(f"there is no file of rollouts {path}")
    paths = [*given, *sorted(folder.glob("*.npz"))]
    if not paths:
        raise ConfigError(f"there are no rollouts in {folder}; run the stage 'rollouts', or name --rollouts")
    return paths


def read_questions(path: Path, limit: int | None = None) -> Iterator[dict[str, str]]:
    """Yield the prompts of a file, at most `limit`: its records, or one for each non-blank line of plain text."""
    if path.suffix != ".txt":
        yield from read_records(path, QUESTIONS, limit)
        return
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from error
    yield from ({"prompt": line} for line in lines[:limit])


def _files(folder: Path, pattern: str, what: str) -> list[Path]:
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ConfigError(f"no {pattern} {what} in {folder}")
    return paths


def read_records(path: Path, forms: Sequence[Form], limit: int | None = None) -> Iterator[dict[str, str]]:
    """Yield at most `limit` records of a file, gzipped if its name ends so; ConfigError for a line of another form."""
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
    """A line that is not a record."""


def _record(line: str, forms: Sequence[Form]) -> dict[str, str]:
    wanted = " or ".join(json.dumps(dict.fromkeys(form, "...")) for form in forms)
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _NoRecordError(f"this is not valid JSON ({error}); a line must be {wanted}") from error
    if not isinstance(record, dict) or not any(all(isinstance(record.get(key), str) for key in form) for form in forms):
        raise _NoRecordError(f"a line must be {wanted}, with strings")
    return record
