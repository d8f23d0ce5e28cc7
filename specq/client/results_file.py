"""A file of results for runs that can be continued.

If `specq submit` is killed and run again, it does the remaining work.

An unfinished run keeps `results.jsonl.unfinished` beside `results.jsonl`. Its first line describes the run (its key and
its options). Each further line is its progress: {"done": prompts, "size": bytes of the results, "digest": of the
prompts done}. This line is written before the results. It is valid once the results file has that size. So complete
results in the file count as done, however the run was interrupted.

The next run finds this file. It cuts off anything after the last valid size, such as a torn line. Then it skips the
finished prompts. Job ids are derived from the key. So the broker does not compute them again.

Rules: all results of a prompt are in the file, or none. One process at a time writes. Results of other options or
prompts are never mixed in, and never deleted unasked.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import secrets
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

from specq.protocol import ConfigError, JobError

SUFFIX = ".unfinished"
VERSION = 2  # of the format of the lines and options

T = TypeVar("T")


class ResultsFile:
    """Results that are being written. The run is done when the block ends without an error.

    options  what the results depend on, JSON-able; a run continues only with the same options.
    key      names the run. A continued run has the same key, unless its jobs were cancelled (`interrupted`).

    Raises ConfigError if the file belongs to another run or another process is writing it. Raises OSError as `open`
    does.
    """

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self.key, self.num_done = path, secrets.token_hex(8), 0
        self._digest, self._size = b"", 0
        self._beside = path.with_name(path.name + SUFFIX)
        self._waiting: deque[bytes] = deque()  # digests after each prompt that was handed out
        self._log = self._beside.open("a+b")
        try:
            self._lock()
            self._continue_or_begin(json.loads(json.dumps(options)))
            self._file = self._open()
        except BaseException:
            self._log.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{self.path} is being written by another specq submit") from None

    def _continue_or_begin(self, options: dict[str, Any]) -> None:
        self._log.seek(0)
        lines = list(_whole_lines(self._log.read()))
        if not lines or not self.path.exists():
            self._log.truncate(0)
            self._note({"version": VERSION, "key": self.key, "options": options})
            return
        self._check(lines[0], options)
        size = self.path.stat().st_size
        for line in lines:
            self.key = line.get("key", self.key)
            try:
                self._take_over(line, size)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise self._refusal(f"has a damaged log beside it ({error!r})") from None

    def _take_over(self, line: dict[str, Any], size: int) -> None:
        """Note the progress in a log line, if the results file has that size."""
        noted = line.get("size", size + 1)
        if noted > size:
            return
        done, digest = line["done"], bytes.fromhex(line["digest"])
        if type(noted) is not int or type(done) is not int or min(noted, done) < 0:
            raise ValueError(f"size {noted!r}, done {done!r}")
        self.num_done, self._size, self._digest = done, noted, digest

    def _check(self, head: dict[str, Any], options: dict[str, Any]) -> None:
        if head.get("version") != VERSION:
            raise self._refusal(f"was begun by another version of specq ({head.get('version')!r})")
        known = head.get("options", {})
        names = [name for name in {**known, **options} if known.get(name) != options.get(name)]
        if names:
            name = names[0]
            change = f"{name} was {known.get(name, 'not given')!r}, and is {options.get(name, 'not given')!r} now"
            raise self._refusal(f"is the beginning of a run with other options: {change}")

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} {what}; continue with the same, or delete {self._beside} to start over")

    def _open(self) -> BinaryIO:
        file = self.path.open("r+b" if self._size else "wb")
        file.truncate(self._size)
        file.seek(0, io.SEEK_END)
        # Progress notes of results that were cut off stay invalid, even when the file grows again.
        self._note_progress()
        return file

    # --- prompts in, results out --------------------------------------------------------------------------------------

    def remaining(self, lines: Iterable[T]) -> Iterator[T]:
        """Yield the unfinished prompts; raise ConfigError if the finished prompts differ from the file's."""
        digest, number = b"", 0
        for number, line in enumerate(lines, 1):
            digest = hashlib.blake2b(digest + repr(line).encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if number == self.num_done and digest != self._digest:
                raise self._refusal("was made from other prompts")
            if number > self.num_done:
                self._waiting.append(digest)
                yield line
        if number < self.num_done:
            raise self._refusal(f"has the results of {self.num_done} prompts, but there are only {number}")

    def write(self, data: bytes) -> None:
        """Append all results of the next prompt of `remaining`."""
        self.num_done, self._size, self._digest = self.num_done + 1, self._size + len(data), self._waiting.popleft()
        self._note_progress()
        self._file.write(data)
        self._file.flush()

    def interrupted(self) -> None:
        """Note that jobs in progress were cancelled, so that the next run creates new ones."""
        self._note({"key": secrets.token_hex(8)})

    def _note_progress(self) -> None:
        self._note({"done": self.num_done, "size": self._size, "digest": self._digest.hex()})

    def _note(self, line: dict[str, Any]) -> None:
        self._log.write(json.dumps(line).encode() + b"\n")
        self._log.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            os.fsync(self._file.fileno())
            self._beside.unlink(missing_ok=True)
        elif not isinstance(error, ConfigError | JobError):  # no jobs yet; or the broker is gone and keeps them
            with contextlib.suppress(OSError):
                self.interrupted()
        self._file.close()
        self._log.close()


def _whole_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log, up to a torn line."""
    for raw in data.split(b"\n")[:-1]:
        try:
            line = json.loads(raw)
        except ValueError:
            return
        if isinstance(line, dict):
            yield line
