"""A conversation with a served model: questions, commands, answers.

Rule: Ctrl-C stops the answer and not the chat. The part of the answer on the screen stays in the conversation. A
failure only costs the question that caused it.

`Conversation` holds the messages for the chat template. It drops the oldest turns if the model's context is too short.

Lines that begin with a slash are commands. They change the settings of later answers, or act at once.

To add a command, add its line in `COMMANDS` and a function. It takes the chat's settings and the text after the name,
and returns the output. Values are checked like those of every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from specq.chat.pen import Pen, summary
from specq.chat.reading import ReadLine, read_message
from specq.client import AsyncClient, Result, ServedModel, check_values
from specq.protocol import JobError

Messages = list[dict[str, str]]


@dataclass(slots=True)
class Conversation:
    """Turns of a question and its answer, and the system prompt (`system`; "" means the template's own)."""

    system: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> Messages:
        """Return all messages, with one more question."""
        said: Messages = [{"role": "system", "content": self.system}] if self.system else []
        for asked, answered in self.turns:
            said += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        return [*said, {"role": "user", "content": question}]

    def fit(self, question: str, encode: Callable[[Messages], Sequence[int]], limit: int) -> int:
        """Drop the oldest turns until the messages have at most `limit` tokens, or none is left.

        Returns the number of dropped turns.
        """
        num_turns = len(self.turns)
        while self.turns and len(encode(self.messages(question))) > limit:
            del self.turns[0]
        return num_turns - len(self.turns)


OFF = "none"  # resets a value
MOST_TOKENS = 512  # default length of an answer; the default of other jobs, 128, would cut many answers


@dataclass(slots=True)
class ChatSettings:
    """The settings for the next answers; `parameters` as of `specq.Client.generate`."""

    parameters: dict[str, Any] = field(default_factory=dict)
    conversation: Conversation = field(default_factory=Conversation)
    ended: bool = False

    def set(self, name: str, value: Any) -> None:
        """Set a parameter, or reset it with None.

        Raises JobError for a refused value, and then keeps the old one.
        """
        changed = {key: old for key, old in self.parameters.items() if key != name}
        changed |= {} if value is None else {name: value}
        check_values(changed)
        self.parameters = changed


def run_command(line: str, settings: ChatSettings) -> str:
    """Run a line with a slash; return the text to show. Raises JobError if it is unknown or refused."""
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        known = ", ".join(f"/{known}" for known in COMMANDS)
        raise JobError(
            f"unknown command /{name}; known: {known} (a message that starts with a slash needs a space before it)"
        )
    return command.run(settings, rest.strip())


def _help(_settings: ChatSettings, _rest: str) -> str:
    width = max(len(command.usage) for command in COMMANDS.values())
    return "\n".join(
        [
            *(f"  {command.usage:{width}}  {command.text}" for command in COMMANDS.values()),
            '  """ starts and ends a message of several lines; or end each line but the last with \\.',
            "  Ctrl-C stops an answer and keeps its text so far; Ctrl-D ends the chat.",
        ]
    )


def _system(settings: ChatSettings, text: str) -> str:
    if text:
        settings.conversation.system = "" if text == OFF else text
    return f"system: {settings.conversation.system or 'that of the chat template'}"


def _reset(settings: ChatSettings, _rest: str) -> str:
    settings.conversation.turns.clear()
    return "started a new conversation"


def _quit(settings: ChatSettings, _rest: str) -> str:
    settings.ended = True
    return ""


def _parameter(name: str, read: type, unset: str, default: Any = None) -> Callable[[ChatSettings, str], str]:
    """Return the command that sets a parameter, or shows it if no value is given.

    unset    the text for a parameter without a value.
    default  the value after a reset; None: left out.
    """

    def run(settings: ChatSettings, text: str) -> str:
        if text:
            settings.set(name, default if text == OFF else _read(name, read, text))
        return f"{name}: {settings.parameters.get(name, unset)}"

    return run


def _read(name: str, read: type, text: str) -> Any:
    try:
        return read(text)
    except ValueError:
        kind = "a whole number" if read is int else "a number"
        raise JobError(f"{name} is {text!r}, but must be {kind}, or {OFF}") from None


class Command(NamedTuple):
    """The usage of a command, its description, and its function."""

    usage: str
    text: str
    run: Callable[[ChatSettings, str], str]


COMMANDS = {
    "help": Command("/help", "show this list", _help),
    "system": Command("/system TEXT", f"set the system prompt; {OFF}: that of the chat template", _system),
    "reset": Command("/reset", "start a new conversation", _reset),
    "temp": Command(
        "/temp X", "set the sampling temperature; 0 is greedy", _parameter("temperature", float, "0 (greedy)")
    ),
    "seed": Command("/seed N", f"set the random seed; {OFF}: random", _parameter("seed", int, "random")),
    "mode": Command(
        "/mode MODE", "set the drafting mode: async, sync, jit, or plain (no drafts)", _parameter("mode", str, "async")
    ),
    "max": Command(
        "/max N", "set the maximum number of tokens per answer", _parameter("max_tokens", int, "128", MOST_TOKENS)
    ),
    "quit": Command("/quit", "end the chat", _quit),
}
ALIASES = {"?": "help", "exit": "quit", "bye": "quit", "clear": "reset", "temperature": "temp"}


T = TypeVar("T")
CHECK_S = 0.2  # between two checks of the serving processes
ANSWER_SHARE = 4  # the answer gets at least one in this number of the context's tokens


class Chat:
    """Answers questions with a client, in its own event loop.

    tend  called while an answer is awaited; it may raise.
    note  shows a line that is not an answer.
    """

    def __init__(
        self,
        client: AsyncClient,
        settings: ChatSettings,
        pen: Pen,
        note: Callable[[str], object],
        tend: Callable[[], object] = bool,
    ) -> None:
        self._client, self._settings, self._pen, self._note, self._tend = client, settings, pen, note, tend
        self._runner = asyncio.Runner()
        self._waiting: asyncio.Task[Any] | None = None  # the last task run in the loop
        self._text = ""  # of the current answer

    def served(self) -> ServedModel:
        """Wait for the model; raise JobError if there is none, or if it cannot chat."""
        served = self._run(self._client.served())
        if not served.codec.has_chat_template:
            name = served.info.name
            raise JobError(f"{name} has no chat template, so it cannot chat; use `specq submit` to complete texts")
        return served

    def close(self) -> None:
        """Close the client, which stops running jobs, and close the loop."""
        self._runner.run(self._end())
        self._runner.close()

    async def _end(self) -> None:
        """Close the client, and stop a waiting task first.

        A task still waits if a signal has left the loop by an exception.
        """
        if self._waiting is not None and not self._waiting.done():
            self._waiting.cancel()
            await asyncio.wait({self._waiting})
        await self._client.close()

    # --- the loop ---------------------------------------------------------------------------------------------------

    def talk(self, read_line: ReadLine) -> None:
        """Answer messages from the keyboard until the user stops."""
        while not self._settings.ended:
            try:
                message = read_message(read_line)
            except EOFError:
                self._note("")
                return
            except KeyboardInterrupt:
                self._note("\n(Ctrl-D or /quit ends the chat)")
                continue
            self._take(message)

    def _take(self, message: str) -> None:
        """Handle one message; show its error if it has one."""
        try:
            if message.startswith("/"):
                self._show(run_command(message, self._settings))
            elif message.strip():
                self.ask(message.strip())
        except JobError as error:
            self._note(f"specq: {error}")
        except KeyboardInterrupt:
            self._note("(stopped)")

    def _show(self, text: str) -> None:
        if text:
            self._note(text)

    # --- an answer --------------------------------------------------------------------------------------------------

    def ask(self, question: str) -> None:
        """Write the answer as it arrives, and a line about it. Raises KeyboardInterrupt after Ctrl-C, and JobError."""
        conversation, self._text = self._settings.conversation, ""
        self._make_room(question)
        messages = conversation.messages(question)
        try:
            result = self._run(self._write(messages))
        finally:
            if self._text:
                self._pen.finish()
                conversation.turns.append((question, self._text.strip()))
        self._note(f"({summary(result)}{self._remarks(result)})")

    async def _write(self, messages: list[dict[str, str]]) -> Result:
        """Write an answer's pieces; return the result of the last piece."""
        async for piece in self._client.stream(messages=messages, **self._settings.parameters):
            for text, origin in piece.spans:
                self._pen.write(text, origin)
            self._text += piece.text
            if piece.result:
                result = piece.result
        return result

    def _make_room(self, question: str) -> None:
        """Drop and report the oldest turns if an answer has too little room."""
        served = self._run(self._client.served())
        limit = served.context_length
        asked = self._settings.parameters.get("max_tokens", limit)
        dropped = self._settings.conversation.fit(
            question, served.codec.encode_chat, limit - min(asked, limit // ANSWER_SHARE)
        )
        if dropped:
            turns = "the oldest turn" if dropped == 1 else f"the oldest {dropped} turns"
            self._note(f"({turns} dropped: {served.info.name} accepts {limit} tokens in total)")

    def _remarks(self, result: Result) -> str:
        """Return further remarks: the drawn seed, and the reason for the end of the text."""
        seed = f"; seed {result.stats['seed']}" if self._settings.parameters.get("temperature") else ""
        cut = f"; cut at {len(result.token_ids)} tokens (/max)" if result.finish_reason == "length" else ""
        return seed + cut

    # --- waiting ----------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(self._tended(work))

    async def _tended(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine and check the processes meanwhile. If the wait is stopped, the coroutine is too."""
        self._waiting, task = asyncio.current_task(), asyncio.ensure_future(work)
        try:
            while not task.done():
                self._tend()
                await asyncio.wait({task}, timeout=CHECK_S)
        finally:
            task.cancel()
            await asyncio.wait({task})
        return await task
