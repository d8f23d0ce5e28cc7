"""Files of prompts to files of results, both JSONL: what `specq submit` does.

A line is `{"prompt": text}`, `{"messages": [...]}` or `{"token_ids": [...]}`, optionally with `id` and any sampling
parameter. Each line has a result line, in the same order; see `specq.client.Result` for its fields.

Rule: a line that is wrong, or whose job fails, becomes a result with `error`, and harms no other line.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from specq.client import Client, Result
from specq.client.request import SOURCES
from specq.errors import JobError
from specq.params import SamplingParams

PARAMETERS = tuple(f.name for f in fields(SamplingParams))
_READ_AHEAD = 4  # lines that wait for each one in flight, so that a slow line does not idle the others

Write = Callable[[Result], None]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a prompts file; `error` says why it cannot be used, `unknown` lists keys that mean nothing here."""

    number: int
    arguments: dict[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    error: str = ""

    @property
    def id(self) -> Any:
        """The id that the line gives, else its number."""
        return self.arguments.get("id", self.number)

    @property
    def prompt(self) -> str | None:
        prompt = self.arguments.get("prompt")
        return prompt if isinstance(prompt, str) else None


# --- reading ------------------------------------------------------------------------------------------------------


def read_lines(raw_lines: Iterable[bytes]) -> Iterator[Line]:
    """Yield the lines of a prompts file, numbered from 1; blank ones are left out."""
    for number, raw in enumerate(raw_lines, 1):
        if raw.strip():
            yield parse_line(number, raw)


def parse_line(number: int, raw: bytes) -> Line:
    """Return a line as arguments of `Client.generate`; of what is malformed, what is wrong with it."""
    try:
        values = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return Line(number, error=f"line {number} is no JSON: {error}")
    if not isinstance(values, dict):
        return Line(number, error=f"line {number} is no JSON object, but {_kind(values)}")
    given = {name: value for name, value in values.items() if value is not None}
    known = {name: value for name, value in given.items() if name in (*SOURCES, *PARAMETERS, "id")}
    unknown = tuple(name for name in given if name not in known)
    if not any(name in known for name in SOURCES):
        return Line(number, known, unknown, f"line {number} has none of {', '.join(SOURCES)}")
    return Line(number, known, unknown)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def result_line(result: Result) -> bytes:
    """Return a result as a line of JSON; plain ASCII if it echoes what UTF-8 cannot hold."""
    values = result.to_dict()
    try:
        return json.dumps(values, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(values).encode() + b"\n"


# --- running ------------------------------------------------------------------------------------------------------


def run_lines(
    client: Client,
    lines: Iterable[Line],
    defaults: dict[str, Any],
    write: Write,
    *,
    concurrency: int = 16,
    as_chat: bool = False,
    show: Callable[[str], None] | None = None,
) -> int:
    """Complete all lines, at most `concurrency` at a time; write results in order; return the number that failed.

    defaults  sampling parameters for lines that do not give their own
    as_chat   a prompt is the user's message in a chat, for the model's template
    show      is given each completion's text as it grows (and then one line runs at a time)
    """
    complete = _Completer(client, defaults, as_chat=as_chat, show=show)
    num_failed = 0
    for result in _in_order(complete, lines, 1 if show else concurrency):
        num_failed += result.error is not None
        write(result)
    return num_failed


class _Completer:
    """Makes a line's result, whatever happens."""

    def __init__(
        self, client: Client, defaults: dict[str, Any], *, as_chat: bool, show: Callable[[str], None] | None
    ) -> None:
        self._client, self._defaults, self._as_chat, self._show = client, defaults, as_chat, show

    def __call__(self, line: Line) -> Result:
        if line.error:
            return failure(line, line.error)
        try:
            arguments = self._defaults | {"id": line.id} | line.arguments
            return self._generate(_to_chat(arguments) if self._as_chat else arguments)
        except JobError as error:
            return failure(line, f"line {line.number}: {error}")

    def _generate(self, arguments: dict[str, Any]) -> Result:
        if self._show is None:
            return self._client.generate(**arguments)
        result = None
        for piece in self._client.stream(**arguments):
            self._show(piece.text)
            result = piece.result
        self._show("\n")
        assert result is not None, "the last piece has the result"
        return result


def _to_chat(arguments: dict[str, Any]) -> dict[str, Any]:
    rest = dict(arguments)
    prompt = rest.pop("prompt", None)
    if prompt is None or rest.get("messages") is not None:
        return arguments
    if prompt == "":
        raise JobError("the prompt is empty")
    return rest | {"messages": [{"role": "user", "content": prompt}]}


def failure(line: Line, reason: str) -> Result:
    """Return the result of a line that has none."""
    return Result(line.id, line.prompt, error=reason)


def _in_order(complete: Callable[[Line], Result], lines: Iterable[Line], concurrency: int) -> Iterator[Result]:
    """Yield `complete` of each line, in order, while up to `concurrency` run."""
    waiting: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(concurrency)
    try:
        for line in lines:
            waiting.append(pool.submit(complete, line))
            while waiting and (waiting[0].done() or len(waiting) >= _READ_AHEAD * concurrency):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # whoever still waits hears of it when the client closes
