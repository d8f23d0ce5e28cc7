"""Files of prompts to files of results, both JSONL: the work of `specq submit`.

A line is `{"prompt": text}`, `{"messages": [...]}` or `{"token_ids": [...]}`. It may also have `id`, any parameter
(`specq.client.parameters`), and for messages `chat_template_kwargs`. A line of OpenAI's batches is read, too: its
`body` as such a line, `custom_id` as its `id`, with the HTTP API's defaults. Each completion gives a result line, in
the same order; `specq.client.Result` describes its fields.

Rule: a wrong line, or a line whose job fails, becomes a result with `error`. Other lines are not affected.

`specq submit --detach`: the lines of a prompts file become jobs without a waiting client.
"""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NoReturn

from specq.client.completions import is_batch
from specq.client.detached import JobDesk
from specq.client.parameters import LINE_OPTIONS, NAMES
from specq.client.request import CHAT_VARIABLES, SOURCES, Request, read_request
from specq.client.result import Piece, Result
from specq.client.sync import Client
from specq.protocol import BROKER_GONE, MOST_LEVELS, JobError, is_too_deep, known_names

_KEYS = (*SOURCES, CHAT_VARIABLES, "id", *NAMES, *LINE_OPTIONS)
_BATCH_KEYS = {"custom_id", "method", "url", "body"}  # of a line of OpenAI's batches
_BATCH_DEFAULTS: dict[object, dict[str, Any]] = {  # of the HTTP API; reduced to the model's room
    "/v1/completions": {"temperature": 1.0, "max_tokens": 16},
    "/v1/chat/completions": {"temperature": 1.0, "max_tokens": 2**31 - 1},
}
_READ_AHEAD = 4  # lines read ahead per line in progress, so that a slow line does not block the others

Write = Callable[[list[Result]], None]
Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A line of a prompts file.

    error  the reason if it cannot be used.
    usual  what its form has by default, unless an option says otherwise.
    """

    number: int
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    usual: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def id(self) -> Any:
        """The id given in the line, else its number."""
        return self.arguments.get("id", self.number)

    @property
    def prompt(self) -> str | None:
        prompt = self.arguments.get("prompt")
        return prompt if isinstance(prompt, str) else None

    def request(self, defaults: dict[str, Any], *, as_chat: bool) -> dict[str, Any]:
        """Return the arguments of `Client.generate`; with `as_chat` a prompt becomes a user's message."""
        arguments = self.usual | defaults | {"id": self.id} | self.arguments
        if is_batch(self.arguments):
            raise JobError("a list of prompts is not supported; put each prompt on its own line")
        return _to_chat(arguments) if as_chat else arguments

    def job_key(self, run: str) -> str:
        """Return the name of this line's jobs in a run."""
        content = hashlib.blake2b(repr(self).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        return f"{run} line {self.number} {content}"


# --- reading ------------------------------------------------------------------------------------------------------


def read_lines(raw_lines: Iterable[bytes]) -> Iterator[PromptLine]:
    """Yield the lines of a prompts file, numbered from 1, without blank lines."""
    for number, raw in enumerate(raw_lines, 1):
        if raw.removeprefix(BOM_UTF8).strip():
            yield parse_line(number, raw)


def parse_line(number: int, raw: bytes) -> PromptLine:
    """Return a line as arguments of `Client.generate`, or with the reason if it is malformed."""
    try:
        values = json.loads(raw.decode("utf-8-sig").rstrip(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return PromptLine(number, error=f"line {number} {_unreadable(error)}")
    if is_too_deep(raw, values):
        return PromptLine(number, error=f"line {number} is nested more than {MOST_LEVELS} levels deep")
    if not isinstance(values, dict):
        return PromptLine(number, error=f"line {number} is not a JSON object, but {_kind(values)}")
    if values.keys() == _BATCH_KEYS:
        return _of_batch(number, values)
    return _of_values(number, values)


def _of_batch(number: int, values: dict[str, Any]) -> PromptLine:
    """Return a line of OpenAI's batches."""
    usual, body = _BATCH_DEFAULTS.get(str(values["url"])), values["body"]
    if usual is None:
        known = " or ".join(map(str, _BATCH_DEFAULTS))
        return PromptLine(number, error=f"line {number} has the url {values['url']!r:.80}, but must have {known}")
    if not isinstance(body, dict):
        return PromptLine(number, error=f"line {number} has a body that is not a JSON object, but {_kind(body)}")
    own = {name: value for name, value in body.items() if name not in ("model", "max_completion_tokens")}
    if "max_completion_tokens" in body:
        own["max_tokens"] = body["max_completion_tokens"]
    return replace(_of_values(number, own | {"id": values["custom_id"]}), usual=usual)


def _of_values(number: int, values: dict[str, Any]) -> PromptLine:
    """Return a line from its keys."""
    given = {name: value for name, value in values.items() if value is not None}
    known = {name: value for name, value in given.items() if name in _KEYS}
    unknown = [name for name in given if name not in known]
    if unknown:
        return PromptLine(
            number, known, f"line {number} has the unknown key {unknown[0]!r}; {known_names(unknown[0], _KEYS)}"
        )
    if not any(name in known for name in SOURCES):
        return PromptLine(number, known, f"line {number} has none of {', '.join(SOURCES)}")
    return PromptLine(number, known)


def _unreadable(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: it has the byte 0x{error.object[error.start]:02x}"
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON: {error.msg}, at character {error.pos + 1}"
    return f"is not valid JSON: {error}"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def result_line(result: Result, *, verbose: bool = False) -> bytes:
    """Return a result as a line of JSON.

    verbose  includes all counters.

    The line is plain ASCII if the result has text that UTF-8 cannot represent.
    """
    values = result.to_dict(verbose=verbose)
    try:
        return json.dumps(values, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(values).encode() + b"\n"


# --- running ------------------------------------------------------------------------------------------------------


def run_lines(
    client: Client,
    lines: Iterable[PromptLine],
    defaults: dict[str, Any],
    write: Write,
    *,
    concurrency: int = 16,
    as_chat: bool = False,
    show: Show | None = None,
    key: str | None = None,
) -> int:
    """Complete all lines, at most `concurrency` at a time; return the number of failed results.

    defaults  parameters for lines that do not set their own.
    write     called with the results of each line (several if `n` is above 1), in the order of the lines.
    as_chat   a prompt is the user's message in a chat, for the model's template.
    show      called with each completion's text as it grows; then one line runs at a time.
    key       names the run. A line that runs again under the same key joins its job (`PromptLine.job_key`).

    Raises JobError if the broker is gone and a key is given. Then the run can be continued later, and its jobs keep
    running.
    """
    complete = _Completer(client, defaults, as_chat=as_chat, show=show, key=key)
    num_failed = 0
    try:
        for results in _in_order(complete, lines, 1 if show else concurrency):
            num_failed += sum(result.error is not None for result in results)
            write(results)
    except JobError as error:
        client.leave()
        raise JobError(f"{error}; run the same command again to continue", error.code) from None
    return num_failed


class _Completer:
    """Makes a line's results, also when it fails."""

    def __init__(
        self, client: Client, defaults: dict[str, Any], *, as_chat: bool, show: Show | None, key: str | None
    ) -> None:
        self._client, self._defaults, self._as_chat, self._show = client, {"n": 1} | defaults, as_chat, show
        self._key = key

    def __call__(self, line: PromptLine) -> list[Result]:
        if line.error:
            return [failure(line, line.error)]
        try:
            arguments = line.request(self._defaults, as_chat=self._as_chat)
            results = self._generate(arguments | ({"job_key": line.job_key(self._key)} if self._key else {}))
        except JobError as error:
            if self._key and error.code in BROKER_GONE:
                raise
            return [failure(line, f"line {line.number}: {error}")]
        return [r if r.error is None else replace(r, error=f"line {line.number}: {r.error}") for r in results]

    def _generate(self, arguments: dict[str, Any]) -> list[Result]:
        if self._show is None:
            results: list[Result] = self._client.generate(**arguments)
            return results
        return show_pieces(self._client.stream(**arguments), self._show)


def show_pieces(pieces: Iterable[Piece], show: Show) -> list[Result]:
    """Show the texts of all completions in turn, each as it grows; return the results."""
    results: dict[int, Result] = {}
    waiting: dict[int, str] = {}
    turn = 0
    for piece in pieces:
        waiting[piece.index] = waiting.get(piece.index, "") + piece.text
        if piece.result is not None:
            results[piece.index] = piece.result
        while turn in waiting:
            show(waiting.pop(turn))
            if turn in results:
                show("\n")
                turn += 1
    return [results[index] for index in range(turn)]


def _to_chat(arguments: dict[str, Any]) -> dict[str, Any]:
    rest = dict(arguments)
    prompt = rest.pop("prompt", None)
    if prompt is None or rest.get("messages") is not None:
        return arguments
    if prompt == "":
        raise JobError("the prompt is empty")
    return rest | {"messages": [{"role": "user", "content": prompt}]}


def failure(line: PromptLine, reason: str) -> Result:
    """Return the result of a line that has failed."""
    return Result(line.id, line.prompt, error=reason)


def _in_order(
    complete: Callable[[PromptLine], list[Result]], lines: Iterable[PromptLine], concurrency: int
) -> Iterator[list[Result]]:
    """Yield `complete` of each line, in order, while up to `concurrency` run."""
    waiting: deque[Future[list[Result]]] = deque()
    pool = ThreadPoolExecutor(concurrency)
    try:
        for line in lines:
            waiting.append(pool.submit(complete, line))
            while waiting and (waiting[0].done() or len(waiting) >= _READ_AHEAD * concurrency):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # waiting lines fail when the client closes


_AT_ONCE = 256  # lines


@dataclass(frozen=True, slots=True)
class Detached:
    """A line's jobs; `error` is the reason if jobs are missing."""

    job_ids: tuple[int, ...] = ()
    error: str = ""


def detach_lines(
    client: Client, desk: JobDesk, lines: Iterable[PromptLine], defaults: dict[str, Any], *, as_chat: bool = False
) -> Iterator[Detached]:
    """Submit all lines; yield the accepted jobs of each line, in order."""
    lines = iter(lines)
    while chunk := list(islice(lines, _AT_ONCE)):
        requests = [_request(client, line, defaults, as_chat=as_chat) for line in chunk]
        jobs = [job for request in requests if isinstance(request, Request) for job in request.submits]
        refused = dict(desk.submit(jobs))
        for line, request in zip(chunk, requests, strict=True):
            yield _detached(line, request, refused)


def _request(client: Client, line: PromptLine, defaults: dict[str, Any], *, as_chat: bool) -> Request | str:
    """Return a line's request, or the reason why it has none."""
    if line.error:
        return line.error
    try:
        arguments = line.request(defaults, as_chat=as_chat)
        return read_request(arguments, client.served)
    except JobError as error:
        return f"line {line.number}: {error}"


def _detached(line: PromptLine, request: Request | str, refused: dict[int, JobError | None]) -> Detached:
    if isinstance(request, str):
        return Detached(error=request)
    job_ids = [job.job_id for job in request.submits]
    errors = [str(refused[job_id]) for job_id in job_ids if refused[job_id] is not None]
    taken = tuple(job_id for job_id in job_ids if refused[job_id] is None)
    return Detached(taken, f"line {line.number}: {errors[0]}" if errors else "")
